"""A proposer that may fail: its requests then go on without drafts, since nothing depends on them but speed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Scores
from foretoken.propose.base import Observation, Proposer, Wrapper

_log = logging.getLogger(__name__)
_MOST = 3  # failures one after another, after which it is not asked again


class Tolerant(Wrapper):
    """``inner``; where it raises, that is logged, its memory of the sequences is dropped, and nothing is drafted."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.failures = 0

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        drafts: list[Draft] = []

        def work() -> None:
            drafts.extend(self.inner.propose(contexts, budgets))
            self.failures = 0

        return drafts if self._tried(work, contexts) else [Draft.empty()] * len(contexts)

    def join(self, context: Context) -> int:
        answers = [len(context.tokens)]
        self._tried(lambda: answers.append(self.inner.join(context)), [context])
        return answers[-1]

    def read(self, contexts: Sequence[Context], scores: Sequence[Scores]) -> None:
        self._tried(lambda: self.inner.read(contexts, scores), contexts)

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        self._tried(lambda: self.inner.observe(contexts, observations), contexts)

    def _tried(self, work: Callable[[], None], contexts: Sequence[Context]) -> bool:
        """Whether ``work`` was done."""
        if self.failures >= _MOST:
            return False
        try:
            work()
        except Exception as error:
            if not isinstance(error, InvalidRequest):  # which a request caused, and the others go on with drafts
                self.failures += 1
                _log.exception("%s failed (%d of %d before it is left out)", self.inner.name, self.failures, _MOST)
            for context in contexts:
                self.inner.forget(context)
            return False
        return True

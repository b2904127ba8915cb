"""A proposer that may fail: its requests then continue without drafts, at the cost of speed alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Scores
from foretoken.propose.base import Observation, Proposer, Wrapper

_log = logging.getLogger(__name__)
_MAX_FAILURES = 3  # consecutive failures after which the proposer is left out


class FallbackProposer(Wrapper):
    """Delegates to ``inner``. If it raises, logs the error, drops its state of the sequences, and drafts nothing."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.failures = 0

    @property
    def left_out(self) -> bool:
        """Whether it failed so often that it is not asked any more."""
        return self.failures >= _MAX_FAILURES

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        drafts: list[Draft] = []

        def work() -> None:
            drafts.extend(self.inner.propose(contexts, budgets))
            self.failures = 0

        return drafts if self._try(work, contexts) else [Draft.empty()] * len(contexts)

    def reusable_prefix_len(self, context: Context) -> int:
        lengths = [len(context.tokens)]
        self._try(lambda: lengths.append(self.inner.reusable_prefix_len(context)), [context])
        return lengths[-1]

    def prefill(self, contexts: Sequence[Context], scores: Sequence[Scores]) -> None:
        self._try(lambda: self.inner.prefill(contexts, scores), contexts)

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        self._try(lambda: self.inner.observe(contexts, observations), contexts)

    def _try(self, work: Callable[[], None], contexts: Sequence[Context]) -> bool:
        """Calls ``work`` and returns whether it succeeded."""
        if self.left_out:
            return False
        try:
            work()
        except Exception as error:
            if not isinstance(error, InvalidRequest):  # caused by one request; the others keep their drafts
                self.failures += 1
                _log.exception(
                    "%s failed (%d of %d before it is left out)", self.inner.name, self.failures, _MAX_FAILURES
                )
            for context in contexts:
                self.inner.forget(context)
            return False
        return True

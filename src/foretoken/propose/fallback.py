"""A proposer that may fail: its requests then continue without drafts, at the cost of speed alone."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.propose.base import MEMBERS, ForwardedMember, Proposer, Wrapper

_log = logging.getLogger(__name__)
_MAX_FAILURES = 3  # consecutive failures of one member after which the proposer is disabled
_PLAIN = Proposer()


class FallbackProposer(Wrapper):
    """Guards every member of ``inner``. Where one raises, plain decoding's takes its place.

    The error is logged once, and the state of the sequences of the call is dropped. A proposer of which one member
    fails three times in succession is disabled: it is only asked to forget sequences.

    Args:
        inner: The proposer.
        vocab_size: The target's vocabulary size, for which drafts are checked. None checks no token.

    Attributes:
        disabled: Whether it failed so often that nothing is drafted.
    """

    def __init__(self, inner: Proposer, vocab_size: int | None = None) -> None:
        super().__init__(inner)
        self._vocab_size, self.disabled = vocab_size, False
        self._failures = Counter[str]()  # consecutive ones, by member
        self._logged: set[tuple[str, type[Exception]]] = set()
        self._missed: dict[int, Context] = {}  # sequences of calls that a disabled proposer did not receive

    @property
    def failures(self) -> int:
        """Number of consecutive failures of the member that fails most."""
        return max(self._failures.values(), default=0)

    def enable(self) -> None:
        """Lets a disabled proposer draft again."""
        self.disabled = False
        self._failures.clear()
        self._logged.clear()
        for context in list(self._missed.values()):
            self.forget(context)

    def read(self, name: str) -> Any:
        """Returns a member of ``inner``, or that of plain decoding: for a method, a function that calls either."""
        if callable(getattr(_PLAIN, name)):
            return partial(self._call, name)
        try:
            value = getattr(self.inner, name)
        except Exception as error:
            self._note(name, error)
            return getattr(_PLAIN, name)
        self._failures.pop(name, None)
        return value

    def _call(self, name: str, *args: Any) -> Any:
        contexts = _contexts(args)
        if name == "forget":
            self._missed.pop(contexts[0].id, None)
        elif self.disabled:
            self._missed.update((context.id, context) for context in contexts)
            return getattr(_PLAIN, name)(*args)
        try:
            result = getattr(self.inner, name)(*args)
            if name == "propose":
                self._check(result, *args)
        except Exception as error:
            self._note(name, error)
            if name != "forget":
                for context in contexts:
                    self.forget(context)
            return getattr(_PLAIN, name)(*args)
        self._failures.pop(name, None)
        return result

    def _check(self, drafts: Sequence[Draft], contexts: Sequence[Context], budgets: Sequence[int]) -> None:
        """Raises ValueError for drafts that the target cannot compute, or that are not those that were asked for."""
        if len(drafts) != len(contexts):
            raise ValueError(f"{len(drafts)} drafts for {len(contexts)} requests")
        for draft, budget in zip(drafts, budgets, strict=True):
            if len(draft) > budget:
                raise ValueError(f"a draft of {len(draft)} tokens where {budget} were asked for")
            if (
                self._vocab_size is not None
                and len(draft)
                and not 0 <= min(draft.ids) <= max(draft.ids) < self._vocab_size
            ):
                raise ValueError(f"a draft of tokens outside the vocabulary of {self._vocab_size}: {draft.ids[:8]}")

    def _note(self, name: str, error: Exception) -> None:
        """Counts and logs a failure of a member. Requests' own errors, such as forbidden tokens, do not count."""
        if isinstance(error, InvalidRequest):
            return
        self._failures[name] += 1
        method = vars(self.inner).get("name", type(self.inner).name)  # read without a property's code, which may fail
        _log.debug("%s.%s failed", method, name, exc_info=error)
        if (name, type(error)) not in self._logged:
            self._logged.add((name, type(error)))
            frame = traceback.extract_tb(error.__traceback__)[-1]
            _log.error(
                "the method %s failed in %s: %s: %s (%s, line %d); its requests continue without drafts, and after %d "
                "failures in succession it is disabled",
                method,
                name,
                type(error).__name__,
                error,
                Path(frame.filename).name,
                frame.lineno or 0,
                _MAX_FAILURES,
            )
        if self.failures >= _MAX_FAILURES and not self.disabled:
            self.disabled = True
            _log.error("the method %s is disabled after %d failures of %s", method, _MAX_FAILURES, name)


class Guarded(ForwardedMember):
    """A member of ``Proposer`` that a ``FallbackProposer`` guards."""

    def __get__(self, wrapper: Wrapper | None, owner: type[Wrapper]) -> Any:
        return wrapper.read(self.name) if isinstance(wrapper, FallbackProposer) else self


for _name in MEMBERS:
    setattr(FallbackProposer, _name, Guarded(_name))


def guarded(proposer: Proposer, vocab_size: int) -> FallbackProposer:
    """Returns a proposer of which every member is guarded: ``proposer`` itself if it is."""
    return proposer if isinstance(proposer, FallbackProposer) else FallbackProposer(proposer, vocab_size)


def _contexts(args: Sequence[Any]) -> Sequence[Context]:
    """Returns the sequences of a call, which are its first argument."""
    first = args[0] if args else ()
    if isinstance(first, Context):
        return [first]
    return [each for each in first if isinstance(each, Context)] if isinstance(first, Sequence) else []

"""Methods loaded side by side, of which each request names one, and proposers that may fail.

Requests of a proposer that failed continue without drafts, at the cost of speed alone.
"""

import logging
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Scores
from foretoken.propose.base import MEMBERS, ForwardedMember, Needs, Observation, Proposer, Wrapper

PREDICTION = "prediction"
_JOINS = ("auto", "mixture")  # methods whose drafts predictions join


class PerRequestProposer(Proposer):
    """Chooses a proposer for each request by name.

    A request that names none uses the first, or, if it has a prediction, the method that follows predictions. One that
    asks for a draft length uses the part of the first that drafts alone, if there is one.

    Args:
        members: Proposers by the name that requests use, the default first; at least one.
        alone: Members of the first that also draft alone, by name. The first one drafts for requests that ask for a
            draft length.
    """

    def __init__(self, members: Mapping[str, Proposer], alone: Mapping[str, Proposer] | None = None) -> None:
        first, *others = members
        alone = alone or {}
        self.members = {first: members[first], **alone, **{name: members[name] for name in others}}
        self.alone, self._first = tuple(alone), first
        self.make_usual(next(iter(self.members)))
        self.needs = Needs.union(member.needs for member in self.members.values())

    def make_usual(self, name: str) -> None:
        """Makes the member ``name`` that of requests that name none. No such request may be open."""
        self.usual, first = name, self.members[name]
        self.name, self.costless, self.learns = first.name, first.costless, first.learns

    def of(self, context: Context) -> str:
        if context.method is None and context.prediction and self.name not in _JOINS and PREDICTION in self.members:
            return PREDICTION
        if context.method is None and context.depth is not None and self.alone and self.usual == self._first:
            return self.alone[0]
        return self.usual if context.method is None else context.method

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        if member := self._only_member(contexts):
            return member.propose(contexts, budgets)
        drafts = [Draft.empty()] * len(contexts)
        for member, own in self._by_member(contexts):
            made = member.propose([contexts[i] for i in own], [budgets[i] for i in own])
            for i, draft in zip(own, made, strict=True):
                drafts[i] = draft
        return drafts

    def ends_early(self, context: Context) -> bool:
        return self.members[self.of(context)].ends_early(context)

    def needs_of(self, context: Context) -> Needs:
        return self.members[self.of(context)].needs_of(context)

    def reusable_prefix_len(self, context: Context) -> int:
        return self.members[self.of(context)].reusable_prefix_len(context)

    def prefill(self, contexts: Sequence[Context], scores: Sequence[Scores]) -> None:
        for member, own in self._by_member(contexts):
            member.prefill([contexts[i] for i in own], [scores[i] for i in own])

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        if only := self._only_member(contexts):
            only.observe(contexts, observations)
            return
        for member, own in self._by_member(contexts):
            member.observe([contexts[i] for i in own], [observations[i] for i in own])

    def forget(self, context: Context) -> None:
        self.members[self.of(context)].forget(context)

    @property
    def timed_part(self) -> Proposer | None:
        return self.members[self.usual].timed_part

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(member.kv_bytes_per_token for member in self._owners)

    @property
    def state_bytes(self) -> int:
        return sum(member.state_bytes for member in self._owners)

    def enable_prefix_cache(self, max_bytes: int) -> None:
        self.enable_prefix_caches(self._owners, max_bytes)

    @property
    def _owners(self) -> list[Proposer]:
        """The members that are no part of another one."""
        return [member for name, member in self.members.items() if name not in self.alone]

    def _only_member(self, contexts: Sequence[Context]) -> Proposer | None:
        names = {self.of(context) for context in contexts}
        return self.members[names.pop()] if len(names) == 1 else None

    def _by_member(self, contexts: Sequence[Context]) -> list[tuple[Proposer, list[int]]]:
        """Returns the members that have work, with the indices of their contexts."""
        places: dict[str, list[int]] = {}
        for i, context in enumerate(contexts):
            places.setdefault(self.of(context), []).append(i)
        return [(self.members[name], own) for name, own in places.items()]


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
    first = args[0] if args else ()
    if isinstance(first, Context):
        return [first]
    return [each for each in first if isinstance(each, Context)] if isinstance(first, Sequence) else []

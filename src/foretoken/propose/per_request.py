"""Several speculative methods loaded side by side: each request is drafted for by the one that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.models.base import Scores
from foretoken.propose.base import Needs, Observation, Proposer

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
        """Returns the name of the member that drafts for ``context``."""
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
        """Returns the member that drafts for all contexts; None if there are several."""
        names = {self.of(context) for context in contexts}
        return self.members[names.pop()] if len(names) == 1 else None

    def _by_member(self, contexts: Sequence[Context]) -> list[tuple[Proposer, list[int]]]:
        """Returns the members that have work, with the indices of their contexts."""
        places: dict[str, list[int]] = {}
        for i, context in enumerate(contexts):
            places.setdefault(self.of(context), []).append(i)
        return [(self.members[name], own) for name, own in places.items()]

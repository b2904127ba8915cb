"""Several ways to propose, and for every round the one that is worth most (the rule of ArcticInference, generalised).

Free members (text and tables, no model) draft every round, and their drafts are joined into one tree. All of them are
judged on the text that came, used or not: full information, which bandits have not. A member that costs time drafts
as many nodes as pay, by how often its nodes stood so far, and only where the tokens it is expected to bring, over the
time it takes, are more than the free tree's; what it brings is known by what the free tree promises at such a moment,
for where text is being copied nobody else is needed. If its
draft is of fixed candidates too (greedy requests, requests with a seed, trees of the likeliest) it joins the tree; if
it was drawn, its law is its own, and it takes the tree's place. What was learned in other requests is where a request
begins; what happens in it soon weighs more.

The choice is made from the past alone, before anything is drawn in the round, so it cannot bend the law.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from foretoken.control.passes import Passes
from foretoken.control.survival import Survival
from foretoken.core.checks import number
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.law import PointMass
from foretoken.core.verdict import Verdict
from foretoken.models.base import Scores
from foretoken.propose.base import Method, Needs, Observation, Proposer, Workshop
from foretoken.propose.credit import Account, Guess, Ladder, Mean, Rates
from foretoken.propose.pace import Pace
from foretoken.propose.union import Union

_DEFAULT = ({"method": "suffix"}, {"method": "recycling"})
_TRIALS = 8  # rounds after which a costly member is known well enough to be left out
_MOST = 16  # nodes that a costly member drafts at most unless its configuration says otherwise
_PROBE = 32  # rounds of a request without a costly member before it is tried again; doubles each time


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """members: configurations as ``speculative_config`` takes them, one for each member.

    A member's "num_speculative_tokens" bounds its own part of a draft; without it a costly one drafts up to 16 nodes, a
    free one what the round allows. Of both as many are drafted or kept as pay for their rows. "cost" says what a
    member's longest draft costs, in passes of the target; without it the cost is measured.
    """

    members: Sequence[Mapping[str, Any]] = _DEFAULT

    def __post_init__(self) -> None:
        if isinstance(self.members, str | Mapping) or not self.members:
            raise InvalidRequest("members must be a list of speculative configurations, one at least")
        for member in self.members:
            if not isinstance(member, Mapping) or not isinstance(member.get("method"), str):
                raise InvalidRequest(f"a member is a speculative configuration with a 'method', got {member!r}")
            if member["method"] == "mixture":
                raise InvalidRequest("a mixture cannot be a member of a mixture; list its members instead")
            number("cost (in passes of the target)", member.get("cost"), 0.0, optional=True)


@dataclass(eq=False, slots=True)
class Member:
    """A proposer in the mixture. most: nodes it may draft, None for the whole budget. cost: in passes, None measured.

    rates, gain, survival: what is known of it over all requests; the last two of costly ones only: accepted tokens of
    the rounds that it took part in, and how likely its own nodes are to stand. seconds: of drafting one node.
    """

    name: str
    proposer: Proposer
    free: bool
    most: int | None = None
    cost: float | None = None
    seconds: Mean = field(default_factory=lambda: Mean(memory=32.0))
    rates: Rates = field(default_factory=Rates)
    gain: Ladder = field(default_factory=Ladder)
    survival: Survival = field(init=False)

    def __post_init__(self) -> None:
        self.survival = Survival(_MOST if self.most is None else self.most, memory=256.0)

    def budget(self, nodes: int) -> int:
        return nodes if self.most is None else min(nodes, self.most)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        started = time.perf_counter()
        drafts = self.proposer.propose(contexts, [self.budget(nodes) for nodes in budgets])
        self.seconds.add((time.perf_counter() - started) / max(1, *map(len, drafts)))
        return drafts


@dataclass(eq=False, slots=True)
class Record:
    """What the mixture keeps of one request.

    accounts, costly: of free and of costly members. gains, survivals: of costly ones, see ``Member``.
    trees: the free trees whose worth is not known yet, each with the accepted tokens that it promised; off: how many
    more such trees brought. chosen, promised: this round's costly member, and what the free tree promised. asked, own:
    the nodes that the costly member was to draft, and its draft.
    idle: rounds since a costly member drafted here, and in ``probe`` how many until it is tried again.
    """

    accounts: list[Account]
    costly: list[Account]
    gains: list[Ladder]
    survivals: list[Survival]
    off: Ladder
    idle: list[int]
    probe: list[int]
    trees: list[tuple[Guess, float]] = field(default_factory=list)
    chosen: int | None = None
    promised: float = 0.0
    asked: int = 0
    own: Guess | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """The union of the free members' drafts, and the tree of those nodes that pay. promised: tokens it should bring."""

    union: Union
    draft: Draft
    names: tuple[str, ...]
    promised: float


class Mixture(Proposer):
    """See the module. ``last_member`` tells viewers, by context id, who drafted each node of the last draft."""

    name = "mixture"
    learns = True

    def __init__(self, members: Sequence[Member], passes: Passes | None = None) -> None:
        """passes: where others learn from the same ones."""
        self.free = [member for member in members if member.free]
        self.costly = [member for member in members if not member.free]
        self.members = [*self.free, *self.costly]
        self.needs = replace(Needs.union(member.proposer.needs for member in members), rounds=True)
        self.pace = Pace(passes)
        self.last_member: dict[int, tuple[str, ...]] = {}
        self._records: dict[int, Record] = {}
        self._off = Ladder()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        offers = [member.propose(contexts, budgets) for member in self.free]
        trees: list[Joined] = []
        users: dict[int, list[int]] = {}
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            record = self._record(context)
            tree = self._join(context, record, budget, [offer[i] for offer in offers], len(contexts))
            trees.append(tree)
            record.promised = tree.promised
            record.chosen = self._choose(record, tree, budget, len(contexts)) if budget > 0 else None
            if record.chosen is not None:
                users.setdefault(record.chosen, []).append(i)
        for costly, own in users.items():
            asked = [self._record(contexts[i]).asked for i in own]
            made = self.costly[costly].propose([contexts[i] for i in own], asked)
            for i, draft in zip(own, made, strict=True):
                trees[i] = self._with(contexts[i], costly, trees[i], draft, budgets[i], len(contexts))
        for context, tree in zip(contexts, trees, strict=True):
            self.last_member[context.id] = tree.names
        return [tree.draft for tree in trees]

    def join(self, context: Context) -> int:
        return min(member.proposer.join(context) for member in self.members)

    def read(self, contexts: Sequence[Context], scores: Sequence[Scores]) -> None:
        for member in self.members:
            member.proposer.read(contexts, scores)

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for member in self.members:
            member.proposer.observe(contexts, observations)
        self.pace.observe([observation.step for observation in observations])
        for context, observation in zip(contexts, observations, strict=True):
            record = self._records.get(context.id)
            if record is not None:
                self._settle(context, record, observation)

    @property
    def row_bytes(self) -> int:
        return sum(member.proposer.row_bytes for member in self.members)

    def keep(self, limit: int) -> None:
        self.keep_among((member.proposer for member in self.members), limit)

    def forget(self, context: Context) -> None:
        for member in self.members:
            member.proposer.forget(context)
        self._records.pop(context.id, None)
        self.last_member.pop(context.id, None)

    def _record(self, context: Context) -> Record:
        if context.id not in self._records:
            self._records[context.id] = Record(
                accounts=[Account(Rates(member.rates, strength=16.0, memory=48.0)) for member in self.free],
                costly=[Account(Rates(member.rates, strength=16.0, memory=48.0)) for member in self.costly],
                gains=[Ladder(member.gain, strength=8.0, memory=32.0) for member in self.costly],
                survivals=[Survival(member.survival.most, member.survival) for member in self.costly],
                off=Ladder(self._off, strength=8.0, memory=32.0),
                idle=[0] * len(self.costly),
                probe=[_PROBE] * len(self.costly),
            )
        return self._records[context.id]

    def _join(self, context: Context, record: Record, budget: int, offers: Sequence[Draft], batch: int) -> Joined:
        """The free members' drafts as one tree."""
        union = Union()
        if budget < 1:
            return Joined(union, Draft.empty(), (), 0.0)
        for member, account, draft in zip(self.free, record.accounts, offers, strict=True):
            if not isinstance(draft.law, PointMass):
                raise TypeError(f"{member.name} counts as free, but its drafts are drawn; only fixed candidates join")
            union.add(draft, account.guess(draft, len(context.tokens)), member.name)
        tree = self._pruned(union, budget, batch)
        if len(tree.draft):
            record.trees.append((Guess(tree.draft, len(context.tokens)), tree.promised))
        return tree

    def _with(self, context: Context, costly: int, free: Joined, draft: Draft, budget: int, batch: int) -> Joined:
        """The round's draft now that the costly member has made its own."""
        record, member = self._record(context), self.costly[costly]
        if not len(draft):
            record.chosen = None
            return free
        record.own = Guess(draft, len(context.tokens))
        tree = Joined(free.union, draft, (member.name,) * len(draft), free.promised)
        if isinstance(draft.law, PointMass):
            rates = record.costly[costly].guess(draft, len(context.tokens))
            held = free.union.add(draft, rates, member.name)  # paid for, and rows cost little beside it
            tree = self._pruned(free.union, budget, batch, held)
        return tree

    def _pruned(self, union: Union, budget: int, batch: int, held: Sequence[int] = ()) -> Joined:
        """The nodes that are worth a row, and those ``held``."""
        weights = union.weights()
        kept = sorted(self.pace.worthwhile(weights, budget, batch, held))
        names = tuple(union.owners[node] for node in kept)
        return Joined(union, union.draft(kept, weights), names, sum(weights[node] for node in kept))

    def _choose(self, record: Record, tree: Joined, budget: int, batch: int) -> int | None:
        """The costly member that is to draft, None for the free tree: most tokens per second, as far as is known."""
        expected = max(0.0, tree.promised + record.off.at(tree.promised).value)
        best = (1.0 + expected) / self.pace.seconds(len(tree.draft), batch)
        choice: int | None = None
        for i, (member, gain) in enumerate(zip(self.costly, record.gains, strict=True)):
            most = min(budget, record.survivals[i].most)
            seconds = self.pace.table(most, batch) + np.arange(1.0, most + 1.0) * self._price(member, most) / batch
            nodes = int(np.argmax((1.0 + np.cumsum(record.survivals[i].stands()[:most])) / seconds))
            value = (1.0 + gain.at(tree.promised).value) / seconds[nodes]
            untold = member.gain.all.count < _TRIALS or record.idle[i] >= record.probe[i]
            if untold or value > best:
                best, choice, record.asked = value, i, nodes + 1
            if untold:
                break
        return choice

    def _price(self, member: Member, most: int) -> float:
        """Of drafting one node."""
        return member.seconds.value if member.cost is None else member.cost * self.pace.seconds(0, 1) / most

    def _settle(self, context: Context, record: Record, observation: Observation) -> None:
        for account in (*record.accounts, *record.costly):
            account.settle(context.tokens)
        open_trees = []
        for guess, expected in record.trees:
            if guess.follow(context.tokens):
                record.off.at(expected).add(guess.depth - expected)
            else:
                open_trees.append((guess, expected))
        record.trees = open_trees
        step = observation.step
        for i, gain in enumerate(record.gains):
            record.idle[i] += 1
            if record.chosen == i:
                record.probe[i] *= 2 if record.idle[i] > record.probe[i] else 1
                record.idle[i] = 0
                if step.finish_reason is None and record.own is not None:
                    gain.at(record.promised).add(float(step.accepted))
                    record.own.follow(context.tokens)
                    draft, stood = record.own.draft, record.own.draft.path(record.own.at)
                    record.survivals[i].observe(record.asked, draft, Verdict(stood, 0))


def build(config: MixtureConfig, workshop: Workshop) -> Mixture:
    """Every member as its own configuration would have it."""
    members: list[Member] = []
    for given in config.members:
        own = {key: value for key, value in given.items() if key != "cost"}
        method = given["method"]
        name = method if all(member.name != method for member in members) else f"{method} {len(members) + 1}"
        proposer = workshop.member(own)
        free = proposer.costless and not given.get("cost")
        most = given.get("num_speculative_tokens", None if free else _MOST)
        members.append(Member(name, proposer, free, most, given.get("cost")))
    return Mixture(members, workshop.passes)


METHOD = Method(MixtureConfig, build, tokens=32)

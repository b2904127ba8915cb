"""Several ways to propose, and for every round the one that is worth most (the rule of ArcticInference, generalised).

Free members (text and tables, no model) draft every round, and their drafts are joined into one tree. All of them are
judged on the text that came, used or not: full information, which bandits have not. A member that costs time drafts
only where the tokens it is expected to bring, over the time it takes, are more than the free tree's. What was learned
in other requests is where a request begins; what happens in it soon weighs more.

The choice is made from the past alone, before anything is drawn in the round, so it cannot bend the law.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.core.checks import number
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.law import PointMass
from foretoken.propose.base import Method, Needs, Observation, Proposer, Workshop
from foretoken.propose.credit import Account, Guess, Mean, Rates
from foretoken.propose.pace import Pace
from foretoken.propose.union import Union

FREE = frozenset({"ngram", "suffix", "retrieval", "recycling", "prediction"})
_DEFAULT = ({"method": "suffix"}, {"method": "recycling"})
_TRIALS = 8  # rounds after which a costly member is known well enough to be left out
_MOST = 8  # nodes that a costly member drafts unless its configuration says otherwise
_PROBE = 32  # rounds of a request without a costly member before it is tried again; doubles each time


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """members: configurations as ``speculative_config`` takes them, one for each member.

    A member's "num_speculative_tokens" bounds its own part of a draft; without it a costly one drafts 8 nodes, a free
    one what the round allows, of which those are kept that pay for their rows. "cost" says what drafting with a member
    costs, in passes of the target; without it the cost is measured.
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

    rates, gain: what is known of a free and of a costly one over all requests.
    """

    name: str
    proposer: Proposer
    free: bool
    most: int | None = None
    cost: float | None = None
    seconds: Mean = field(default_factory=lambda: Mean(memory=32.0))
    rates: Rates = field(default_factory=Rates)
    gain: Mean = field(default_factory=lambda: Mean(memory=256.0))

    def budget(self, nodes: int) -> int:
        return nodes if self.most is None else min(nodes, self.most)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        started = time.perf_counter()
        drafts = self.proposer.propose(contexts, [self.budget(nodes) for nodes in budgets])
        self.seconds.add(time.perf_counter() - started)
        return drafts


@dataclass(eq=False, slots=True)
class Record:
    """What the mixture keeps of one request.

    trees: the free trees whose worth is not known yet, each with the accepted tokens it was expected to bring.
    idle: rounds since a costly member drafted here, and in ``probe`` how many until it is tried again.
    """

    accounts: list[Account]
    gains: list[Mean]
    idle: list[int]
    probe: list[int]
    trees: list[tuple[Guess, float]] = field(default_factory=list)
    chosen: int | None = None


class Mixture(Proposer):
    """See the module. ``last_member`` tells viewers, by context id, who drafted each node of the last draft."""

    name = "mixture"

    def __init__(self, members: Sequence[Member]) -> None:
        self.free = [member for member in members if member.free]
        self.costly = [member for member in members if not member.free]
        self.members = [*self.free, *self.costly]
        self.needs = Needs(tuple(sorted({tap for member in members for tap in member.proposer.needs.taps})))
        self.pace = Pace()
        self.last_member: dict[int, tuple[str, ...]] = {}
        self._records: dict[int, Record] = {}
        self._promised, self._kept = Mean(memory=256.0), Mean(memory=256.0)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        offers = [member.propose(contexts, budgets) for member in self.free]
        drafts: list[Draft] = []
        users: dict[int, list[int]] = {}
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            record = self._record(context)
            tree, names, expected = self._join(context, record, budget, [offer[i] for offer in offers], len(contexts))
            drafts.append(tree)
            self.last_member[context.id] = names
            record.chosen = self._choose(record, len(tree), expected, budget, len(contexts)) if budget > 0 else None
            if record.chosen is not None:
                users.setdefault(record.chosen, []).append(i)
        for costly, own in users.items():
            member = self.costly[costly]
            made = member.propose([contexts[i] for i in own], [budgets[i] for i in own])
            for i, draft in zip(own, made, strict=True):
                if len(draft):
                    drafts[i] = draft
                    self.last_member[contexts[i].id] = (member.name,) * len(draft)
                else:
                    self._record(contexts[i]).chosen = None
        return drafts

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for member in self.members:
            member.proposer.observe(contexts, observations)
        self.pace.observe([observation.step for observation in observations])
        for context, observation in zip(contexts, observations, strict=True):
            record = self._records.get(context.id)
            if record is not None:
                self._settle(context, record, observation)

    def forget(self, context: Context) -> None:
        for member in self.members:
            member.proposer.forget(context)
        self._records.pop(context.id, None)
        self.last_member.pop(context.id, None)

    def _record(self, context: Context) -> Record:
        if context.id not in self._records:
            self._records[context.id] = Record(
                accounts=[Account(Rates(member.rates, strength=16.0, memory=48.0)) for member in self.free],
                gains=[Mean(member.gain, strength=8.0, memory=32.0) for member in self.costly],
                idle=[0] * len(self.costly),
                probe=[_PROBE] * len(self.costly),
            )
        return self._records[context.id]

    def _join(
        self, context: Context, record: Record, budget: int, offers: Sequence[Draft], batch: int
    ) -> tuple[Draft, tuple[str, ...], float]:
        """The free members' drafts as one tree of the nodes that are worth a row.

        -> the tree, each node's member, and how many tokens are expected to be accepted
        """
        if budget < 1:
            return Draft.empty(), (), 0.0
        union = Union()
        for member, account, draft in zip(self.free, record.accounts, offers, strict=True):
            if not isinstance(draft.law, PointMass):
                raise TypeError(f"{member.name} counts as free, but its drafts are drawn; only fixed candidates join")
            union.add(draft, account.guess(draft, len(context.tokens)), member.name)
        weights = union.weights()
        kept = sorted(self.pace.worthwhile(weights, budget, batch))
        expected = sum(weights[node] for node in kept)
        tree = union.draft(kept, weights)
        if kept:
            record.trees.append((Guess(tree, len(context.tokens)), expected))
        return tree, tuple(union.owners[node] for node in kept), expected

    def _choose(self, record: Record, nodes: int, expected: float, budget: int, batch: int) -> int | None:
        """The costly member that is to draft, None for the free tree: most tokens per second, as far as is known."""
        trust = (self._kept.value + 0.1) / (self._promised.value + 0.1)
        best = (1.0 + trust * expected) / self.pace.seconds(nodes, batch)
        choice: int | None = None
        for i, (member, gain) in enumerate(zip(self.costly, record.gains, strict=True)):
            if member.gain.count < _TRIALS or record.idle[i] >= record.probe[i]:
                return i
            value = (1.0 + gain.value) / (self.pace.seconds(member.budget(budget), batch) + self._price(member) / batch)
            if value > best:
                best, choice = value, i
        return choice

    def _price(self, member: Member) -> float:
        return member.seconds.value if member.cost is None else member.cost * self.pace.seconds(0, 1)

    def _settle(self, context: Context, record: Record, observation: Observation) -> None:
        for account in record.accounts:
            account.settle(context.tokens)
        open_trees = []
        for guess, expected in record.trees:
            if guess.follow(context.tokens):
                self._promised.add(expected)
                self._kept.add(float(guess.depth))
            else:
                open_trees.append((guess, expected))
        record.trees = open_trees
        step = observation.step
        for i, gain in enumerate(record.gains):
            record.idle[i] += 1
            if record.chosen == i:
                record.probe[i] *= 2 if record.idle[i] > record.probe[i] else 1
                record.idle[i] = 0
                if step.finish_reason is None:
                    gain.add(float(step.accepted))


def build(config: MixtureConfig, workshop: Workshop) -> Mixture:
    """Every member as its own configuration would have it."""
    members: list[Member] = []
    for given in config.members:
        own = {key: value for key, value in given.items() if key != "cost"}
        method = given["method"]
        name = method if all(member.name != method for member in members) else f"{method} {len(members) + 1}"
        free = method in FREE and not given.get("cost")
        most = given.get("num_speculative_tokens", None if free else _MOST)
        members.append(Member(name, workshop.member(own), free, most, given.get("cost")))
    return Mixture(members)


METHOD = Method(MixtureConfig, build, tokens=32)

"""Several speculative methods, and for every step the one with the most expected tokens per second.

This generalizes the rule of ArcticInference. Free members (text and tables, no model) draft in every step, and their
drafts are merged into one tree. All of them are scored on the text that followed, used or not: full information, unlike
a bandit. A costly member drafts only if its expected tokens per second exceed those of the free tree, and as many nodes
as pay for their rows by its acceptance so far. Its gain is learned by the number of tokens that the free tree promises,
because where text is being copied no other draft is needed.

If the costly member's draft has fixed candidates (greedy requests, requests with a seed, "top_k" trees) it joins the
tree, of which the nodes that pay for their rows are kept; if it was drawn it has its own distribution, and replaces the
tree. A tree of a model does not grow where, by its own estimate, a node would not pay for its row and for the time to
draft it. A request starts from what was learned in earlier requests of its kind (temperature 0 or not, and grade); its
own observations soon weigh more.

The choice depends on the past alone and precedes any draw of the step, so it cannot change the distribution.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foretoken.control.survival import Survival, acceptance
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.law import PointMass
from foretoken.core.part import DraftPart
from foretoken.core.verdict import Verdict
from foretoken.costs.model import CostModel
from foretoken.models.base import Scores
from foretoken.propose.acceptance import BucketedMeans, MemberRecord, PendingDraft, UsualRate
from foretoken.propose.base import BuildContext, Method, Needs, Observation, Proposer
from foretoken.propose.growers import is_drawn
from foretoken.propose.mixture_members import (
    MAX_COSTLY,
    PROBE,
    TRIALS,
    Member,
    MixtureConfig,
    MixtureState,
    RequestKind,
    kind_of,
)
from foretoken.propose.pace import DraftingCosts
from foretoken.propose.union import DraftUnion, MergedDraft


class Mixture(Proposer):
    """Proposes with the members that pay off, as the module describes.

    Attributes:
        last_member: The member that proposed each node of the last draft, by context id.
    """

    name = "mixture"
    learns = True

    def __init__(self, members: Sequence[Member], costs: CostModel | None = None) -> None:
        """Initializes the mixture. ``costs`` is the cost model, if it is shared with others."""
        costs = costs or CostModel()
        self.free = [member for member in members if member.free]
        self.costly = [member for member in members if not member.free]
        self.members = [*self.free, *self.costly]
        self.needs = replace(Needs.union(member.proposer.needs for member in members), live_steps=True, costs=costs)
        self.pace = DraftingCosts(costs)
        self.last_member: dict[int, tuple[str, ...]] = {}
        self._records: dict[int, MixtureState] = {}
        self._surplus: dict[RequestKind, BucketedMeans] = defaultdict(BucketedMeans)
        self._usual: dict[RequestKind, UsualRate] = defaultdict(UsualRate)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        drafts = [Draft.empty()] * len(contexts)
        if asked := [i for i, budget in enumerate(budgets) if budget > 0]:
            own = [contexts[i] for i in asked]
            for i, tree in zip(asked, self._trees(own, [budgets[i] for i in asked], len(contexts)), strict=True):
                drafts[i] = tree.draft
                self.last_member[contexts[i].id] = tree.names
        return drafts

    def _trees(self, contexts: Sequence[Context], budgets: Sequence[int], batch: int) -> list[MergedDraft]:
        """Returns the drafts of the sequences of a step that have a budget. ``batch`` counts the others as well."""
        offers = [member.propose(contexts, budgets) for member in self.free]
        trees: list[MergedDraft] = []
        indices_by_member: dict[int, list[int]] = {}
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            record = self._record(context)
            self._settle(context, record)
            tree = self._join(context, record, budget, [offer[i] for offer in offers], batch)
            trees.append(tree)
            record.promised = tree.promised
            record.fixed = not is_drawn(context, context.law)
            record.asked_at = context.generated
            record.chosen = None if context.part is DraftPart.FREE else self._choose(record, tree, budget, batch)
            if record.chosen is not None:
                indices_by_member.setdefault(record.chosen, []).append(i)
        for costly, indices in indices_by_member.items():
            node_budgets = [self._record(contexts[i]).requested for i in indices]
            floor = min(self._record(contexts[i]).floor for i in indices)
            drafts = self.costly[costly].propose([contexts[i] for i in indices], node_budgets, floor)
            for i, draft in zip(indices, drafts, strict=True):
                trees[i] = self._with(contexts[i], costly, trees[i], draft, budgets[i], batch)
        return trees

    def prunes(self, context: Context) -> bool:
        return True

    def parts(self, context: Context) -> Collection[DraftPart]:
        return (DraftPart.ALL, DraftPart.FREE) if self.free and self.costly else (DraftPart.ALL,)

    def reusable_prefix_len(self, context: Context) -> int:
        return min(member.proposer.reusable_prefix_len(context) for member in self.members)

    def prefill(self, contexts: Sequence[Context], scores: Sequence[Scores]) -> None:
        for member in self.members:
            member.proposer.prefill(contexts, scores)

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for member in self.members:
            member.proposer.observe(contexts, observations)
        for context, observation in zip(contexts, observations, strict=True):
            record = self._records.get(context.id)
            if record is not None and record.asked_at == observation.step.position:
                record.step = observation.step

    @property
    def timed_part(self) -> Proposer | None:
        return next((member.proposer.timed_part for member in self.costly), None)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(member.proposer.kv_bytes_per_token for member in self.members)

    @property
    def state_bytes(self) -> int:
        return sum(member.proposer.state_bytes for member in self.members)

    def enable_prefix_cache(self, max_bytes: int) -> None:
        self.enable_prefix_caches((member.proposer for member in self.members), max_bytes)

    def forget(self, context: Context) -> None:
        for member in self.members:
            member.proposer.forget(context)
        if (record := self._records.pop(context.id, None)) is not None:
            self._settle(context, record)
        self.last_member.pop(context.id, None)

    def _record(self, context: Context) -> MixtureState:
        if context.id not in self._records:
            costly = [member.known(context) for member in self.costly]
            kind = kind_of(context)
            self._records[context.id] = MixtureState(
                accounts=[MemberRecord(member.known(context).rates.for_request()) for member in self.free],
                costly=[MemberRecord(known.rates.for_request()) for known in costly],
                gains=[BucketedMeans(known.gain, strength=8.0, memory=32.0) for known in costly],
                sizes=[BucketedMeans(known.size, strength=8.0, memory=32.0) for known in costly],
                survivals=[Survival(known.survival.max_rank, known.survival) for known in costly],
                surplus=BucketedMeans(self._surplus[kind], strength=8.0, memory=32.0),
                usual=self._usual[kind],
                last=[context.generated] * len(self.costly),
                probe=[PROBE] * len(self.costly),
            )
        return self._records[context.id]

    def _join(
        self, context: Context, record: MixtureState, budget: int, offers: Sequence[Draft], batch: int
    ) -> MergedDraft:
        """Returns the free members' drafts as one tree."""
        union = DraftUnion()
        for member, account, draft in zip(self.free, record.accounts, offers, strict=True):
            if not isinstance(draft.law, PointMass):
                raise TypeError(f"{member.name} counts as free, but its drafts are drawn; only fixed candidates join")
            union.add(draft, account.add(draft, len(context.tokens)), member.name)
        tree = self._pruned(union, budget, batch, record.usual.rate)
        if len(tree.draft):
            record.trees.append((PendingDraft(tree.draft, len(context.tokens)), tree.promised))
        return tree

    def _with(
        self, context: Context, costly: int, free: MergedDraft, draft: Draft, budget: int, batch: int
    ) -> MergedDraft:
        """Returns the step's draft, now that the costly member has drafted."""
        record, member = self._record(context), self.costly[costly]
        record.own = None
        if not len(draft):
            record.chosen = costly if member.proposer.caught_up(context) else None
            return free
        record.own = PendingDraft(draft, len(context.tokens))
        tree = MergedDraft(free.union, draft, (member.name,) * len(draft), free.promised)
        if isinstance(draft.law, PointMass):
            rates = record.costly[costly].add(draft, len(context.tokens))
            free.union.add(draft, rates, member.name)
            tree = self._pruned(free.union, budget, batch, record.usual.rate)
        return tree

    def _pruned(self, union: DraftUnion, budget: int, batch: int, rate: float) -> MergedDraft:
        """Returns the nodes that pay for their rows."""
        if not union.tokens:
            return MergedDraft(union, Draft.empty(), (), 0.0)
        weights = union.weights()
        kept = sorted(self.pace.worthwhile(weights, budget, batch, rate))
        names = tuple(union.owners[node] for node in kept)
        return MergedDraft(union, union.draft(kept, weights), names, sum(weights[node] for node in kept))

    def _choose(self, record: MixtureState, tree: MergedDraft, budget: int, batch: int) -> int | None:
        """Returns the costly member with the most expected tokens per second, None for the free tree."""
        promised = tree.promised
        best = _tokens(promised, record.surplus) / self.pace.seconds(len(tree.draft), batch)
        choice: int | None = None
        for i, (member, gain) in enumerate(zip(self.costly, record.gains, strict=True)):
            max_nodes = min(budget, record.survivals[i].max_rank)
            price = self._price(member, max_nodes) / batch
            verified = record.sizes[i].at(promised).value
            value = _tokens(promised, gain) / (self.pace.seconds(verified, batch) + verified * price)
            unexplored = not self._explored(record, i)
            if unexplored or value > best:
                best, choice, record.price = max(best, value), i, price
                record.requested = (
                    max_nodes
                    if member.proposer.uses_floor and record.fixed
                    else self._depth(record.survivals[i], max_nodes, price, batch)
                )
                record.floor = (record.usual.rate or best) * (self.pace.row(max_nodes, batch) + price)
            if unexplored:
                break
        return choice

    def _depth(self, survival: Survival, max_nodes: int, price: float, batch: int) -> int:
        """Returns the number of nodes that pays best on average, each of which takes ``price`` seconds to draft."""
        accepted, exists = (p[0, :max_nodes] for p in acceptance([survival]))
        nodes = np.cumsum(exists)
        seconds = self.pace.table(nodes, batch) + nodes * price
        return int(np.argmax((1.0 + np.cumsum(accepted)) / seconds)) + 1

    def _price(self, member: Member, max_nodes: int) -> float:
        """Returns the seconds to draft one level, or one node of a member whose cost is given."""
        return member.seconds.value if member.cost is None else member.cost * self.pace.seconds(0, 1) / max_nodes

    def _explored(self, record: MixtureState, costly: int) -> bool:
        """Returns whether a costly member was tried often enough, and lately."""
        idle = record.asked_at - record.last[costly]
        return record.gains[costly].all.count >= TRIALS and idle < record.probe[costly]

    def _settle(self, context: Context, record: MixtureState) -> None:
        """Updates the request's statistics after its last step with drafts.

        That is done before the next one, whose time of drafting then shows what it takes.
        """
        step, record.step = record.step, None
        if step is None:
            return
        for account in (*record.accounts, *record.costly):
            account.settle(context.tokens)
        open_trees = []
        for tree, expected in record.trees:
            if tree.follow(context.tokens):
                record.surplus.at(expected).add(tree.depth - expected)
            else:
                open_trees.append((tree, expected))
        record.trees = open_trees
        if self.pace.known:
            drafting = 0.0 if record.chosen is None else record.price * max(step.draft.depths, default=1)
            seconds = self.pace.seconds(len(step.draft), step.timings.batch) + drafting
            record.usual.add(1.0 + step.accepted, seconds)
        for i, gain in enumerate(record.gains):
            if record.chosen == i:
                record.probe[i] *= 2 if step.position - record.last[i] >= record.probe[i] else 1
                record.last[i] = step.position
                if step.finish_reason is None:
                    gain.at(record.promised).add(step.accepted - record.promised)
                    record.sizes[i].at(record.promised).add(max(1.0, len(step.draft)))  # one level is always drafted
                if step.finish_reason is None and record.own is not None:
                    record.own.follow(context.tokens)
                    draft, path = record.own.draft, record.own.draft.path(record.own.at)
                    record.survivals[i].observe(record.requested, draft, Verdict(path, 0))


def _tokens(promised: float, surplus: BucketedMeans) -> float:
    """Returns the tokens expected of a step whose free tree promises ``promised`` accepted ones."""
    return 1.0 + max(0.0, promised + surplus.at(promised).value)


def build_members(configs: Sequence[Mapping[str, Any]], build_context: BuildContext) -> list[Member]:
    """Builds every member from its own configuration."""
    members: list[Member] = []
    for member_config in configs:
        own = {key: value for key, value in member_config.items() if key != "cost"}
        method = member_config["method"]
        name = method if all(member.name != method for member in members) else f"{method} {len(members) + 1}"
        proposer = build_context.member(own)
        free = proposer.costless and not member_config.get("cost")
        max_nodes = member_config.get("num_speculative_tokens", None if free else MAX_COSTLY)
        members.append(Member(name, proposer, free, max_nodes, member_config.get("cost")))
    return members


def build(config: MixtureConfig, build_context: BuildContext) -> Mixture:
    """Builds the mixture."""
    return Mixture(build_members(config.members, build_context), build_context.costs)


METHOD = Method(MixtureConfig, build, tokens=32, drafts_trees=True)

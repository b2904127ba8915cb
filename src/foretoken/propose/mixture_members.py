"""The members of a mixture: their configuration, and what is known of them over all requests and in one request."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.control.survival import Survival
from foretoken.core.checks import integer, number
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.step import StepOutput
from foretoken.propose.acceptance import (
    BucketedMeans,
    DecayingMean,
    MemberRecord,
    NodeRates,
    PendingDraft,
    ScoredRates,
    UsualRate,
)
from foretoken.propose.base import Proposer

_DEFAULT = ({"method": "suffix"}, {"method": "recycling"})
TRIALS = 8  # steps with a costly member before it may be left out
MAX_COSTLY = 16  # default maximum number of nodes of a costly member's draft
PROBE = 32  # tokens of a request without a costly member before it is tried again; doubles each time


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """Members of the mixture.

    Attributes:
        members: Configurations as in ``speculative_config``, one per member. "num_speculative_tokens" bounds the
            member's own part of a draft; without it a costly member drafts up to 16 nodes, a free one up to the step's
            budget. Within these bounds, as many nodes are drafted or kept as pay for their rows. "cost" is the duration
            of the member's longest draft in target passes; without it the duration is measured.
    """

    members: Sequence[Mapping[str, Any]] = _DEFAULT

    def __post_init__(self) -> None:
        if isinstance(self.members, str | Mapping) or not self.members:
            raise InvalidRequest("members must be a list of speculative configurations, one at least")
        for member in self.members:
            if not isinstance(member, Mapping) or not isinstance(member.get("method"), str):
                raise InvalidRequest(f"a member is a speculative configuration with a 'method', got {member!r}")
            if member["method"] in ("auto", "mixture"):
                raise InvalidRequest("a mixture cannot be a member of a mixture; list its members instead")
            integer("num_speculative_tokens of a member", member.get("num_speculative_tokens"), 1, optional=True)
            number("cost (in passes of the target)", member.get("cost"), 0.0, optional=True)


RequestKind = tuple[bool, Exactness]


def kind_of(context: Context) -> RequestKind:
    """Returns whether a request is greedy, and its grade."""
    return context.law.greedy, context.exactness


@dataclass(eq=False, slots=True)
class MemberStatistics:
    """What is known of a member over all requests of one kind.

    Attributes:
        rates: Acceptance rates of its nodes.
        gain: Accepted tokens of the steps in which it drafted, beyond what the free tree promised. Costly members only.
        size: Nodes that were verified in these steps. Costly members only.
        survival: Probability that its nodes are accepted, by rank. Costly members only.
    """

    rates: NodeRates
    gain: BucketedMeans
    size: BucketedMeans
    survival: Survival


@dataclass(eq=False, slots=True)
class Member:
    """A proposer in the mixture, with what is known of it over all requests.

    Attributes:
        free: Its drafts take negligible time.
        max_nodes: Maximum number of nodes that it drafts, None for the whole budget.
        cost: Duration of its longest draft in target passes, None if measured.
        seconds: Measured seconds to draft one level.
    """

    name: str
    proposer: Proposer
    free: bool
    max_nodes: int | None = None
    cost: float | None = None
    seconds: DecayingMean = field(default_factory=lambda: DecayingMean(memory=32.0))
    _known: dict[RequestKind, MemberStatistics] = field(default_factory=dict)

    def known(self, context: Context) -> MemberStatistics:
        """Returns what is known of the member over all requests of the kind of ``context``."""
        kind = kind_of(context)
        if kind not in self._known:
            survival = Survival(MAX_COSTLY if self.max_nodes is None else self.max_nodes, memory=256.0)
            self._known[kind] = MemberStatistics(
                NodeRates() if self.free else ScoredRates(), BucketedMeans(), BucketedMeans(), survival
            )
        return self._known[kind]

    def budget(self, nodes: int) -> int:
        """Returns the member's part of a budget."""
        return nodes if self.max_nodes is None else min(nodes, self.max_nodes)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int], floor: float = 0.0) -> list[Draft]:
        """Drafts what is accepted with a probability of ``floor`` at least, and measures the time per level."""
        started = time.perf_counter()
        self.proposer.floor = floor
        try:
            drafts = self.proposer.propose(contexts, [self.budget(nodes) for nodes in budgets])
        finally:
            self.proposer.floor = 0.0  # it may also draft alone
        if levels := max(max(draft.depths, default=0) for draft in drafts):
            self.seconds.add((time.perf_counter() - started) / levels)
        return drafts


@dataclass(eq=False, slots=True)
class MixtureState:
    """State of one request.

    Attributes:
        accounts: Records of the free members.
        costly: Records of the costly members.
        gains: See ``MemberStatistics``; of the costly members in this request.
        sizes: Likewise.
        survivals: Likewise.
        surplus: Tokens that free trees brought beyond what they promised.
        usual: Tokens per second of requests of this kind.
        last: Tokens that the request had generated when each costly member drafted last.
        probe: Tokens after which each costly member is tried again.
        trees: Free trees that are not fully scored, each with the accepted tokens that it promised.
        chosen: The costly member of the current step, None for the free tree.
        promised: Accepted tokens that the current free tree promises.
        requested: Nodes that the costly member was to draft.
        floor: Probability of acceptance from which its nodes pay.
        price: Seconds in which the chosen costly member drafts one level, as this request's share.
        fixed: Whether a model's candidates are fixed in this request, so that what does not pay is pruned.
        own: The costly member's draft.
        asked_at: Tokens that the request had generated when the mixture drafted last.
        step: The step of that draft, until it has been learned from.
    """

    accounts: list[MemberRecord]
    costly: list[MemberRecord]
    gains: list[BucketedMeans]
    sizes: list[BucketedMeans]
    survivals: list[Survival]
    surplus: BucketedMeans
    usual: UsualRate
    last: list[int]
    probe: list[int]
    trees: list[tuple[PendingDraft, float]] = field(default_factory=list)
    chosen: int | None = None
    promised: float = 0.0
    requested: int = 0
    floor: float = 0.0
    price: float = 0.0
    fixed: bool = False
    own: PendingDraft | None = None
    asked_at: int = 0
    step: StepOutput | None = None

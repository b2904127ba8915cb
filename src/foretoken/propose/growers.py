"""One sequence's draft while a model grows it: a chain, a tree of fixed candidates, or a drawn tree.

All are driven alike: until ``done`` the model scores ``growing()`` and ``extend`` gets the logits of what is new in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from foretoken.control.stops import Gate
from foretoken.core.checks import integer
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.law import PointMass, ProposalLaw, Sampled
from foretoken.core.sampling import Law, Rows
from foretoken.core.streams import Purpose, Stream
from foretoken.propose.drawn_tree import DrawnTree
from foretoken.propose.tree import Candidates, Growth, Tree, drafting_probs, likeliest, racing

Shape = Literal["chain", "top_k", "sampled", "greedy_multi"]
TREE_STEPS = 8  # levels of a tree unless its configuration says otherwise

Widen = Callable[[Tensor], Tensor]  # logits [rows, Vd] over the draft's vocabulary -> [rows, V] over the target's
Rank = Callable[
    [Tensor, Tree], Candidates
]  # the draft's logits [frontier, Vd] at the tree's frontier -> likely children


@dataclass(frozen=True, slots=True)
class GrowthConfig:
    """What a model that drafts level by level makes of its budget.

    tree: "chain"; "top_k", the likeliest candidates re-ranked over all levels (EAGLE-2); "sampled", siblings drawn
    without replacement; "greedy_multi", the likeliest ones and one drawn. Greedy requests and those of the trajectory
    grade have fixed candidates: of any tree they get "top_k".
    num_steps: the greatest depth, and so the passes of the draft; None is the whole budget, for trees at most 8.
    top_k: siblings at most, and nodes expanded on a level at most.
    """

    tree: Shape = "chain"
    num_steps: int | None = None
    top_k: int = 4

    def __post_init__(self) -> None:
        if self.tree not in get_args(Shape):
            raise InvalidRequest(f"tree must be one of {', '.join(get_args(Shape))}, got {self.tree!r}")
        integer("num_steps", self.num_steps, 1, optional=True)
        integer("top_k", self.top_k, 1)

    def steps(self, budget: int) -> int:
        """The greatest depth of a draft of ``budget`` nodes."""
        return min(budget, self.num_steps or (budget if self.tree == "chain" else TREE_STEPS))


class Grower(Protocol):
    """See the module."""

    @property
    def done(self) -> bool:
        """Nothing is left to score."""
        ...

    def growing(self) -> Draft:
        """What the model is to score."""
        ...

    def extend(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        """logits: [rows, V] of the nodes of ``growing()`` that were not scored before, the root's at first.

        hidden: [rows, H], the normed states there, where a gate wants them.
        """
        ...

    def draft(self) -> Draft:
        """What has grown."""
        ...


@dataclass(slots=True)
class Chain:
    """Drawn tokens, each the argmax of a greedy law; drawn: they are draws whose law the verifier needs.

    gate: asked before each draw whether the chain ends there.
    """

    context: Context
    budget: int
    law: Law
    widen: Widen
    stream: Stream
    drawn: bool
    gate: Gate | None = None
    stopped: bool = False
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.budget

    def growing(self) -> Draft:
        return Draft.chain(self.tokens)

    def extend(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        logits = self.widen(logits)
        rows = self._rows(self.law, logits)
        certain = rows.certain(0)
        # Where no token can come the chain ends before anything is drawn: to drop a token that was drawn bends the law.
        impossible = math.isnan(rows[0][0]) if certain is None else certain < 0
        self.stopped = impossible or self._gated(rows, logits, hidden)
        if self.stopped:
            return
        self.tokens.append(self.stream.categorical(rows[0], len(self.tokens)) if certain is None else certain)
        if self.drawn:
            self.rows.append(rows[0])

    def draft(self) -> Draft:
        law: ProposalLaw = Sampled(torch.stack(self.rows)) if self.rows else PointMass()
        return Draft.chain(self.tokens, law)

    def _gated(self, rows: Rows, logits: Tensor, hidden: Tensor | None) -> bool:
        """Whether the gate ends the chain here."""
        if self.gate is None:
            return False
        seen = self._rows(self.law.with_temperature(1.0), logits) if self.law.greedy else rows
        return self.gate.stops(seen[0], None if hidden is None else hidden[0])

    def _rows(self, law: Law, logits: Tensor) -> Rows:
        return Rows(law, logits, lambda row: self.context.history(self.tokens))


@dataclass(slots=True)
class Fixed:
    """The best candidates by ``rank``, re-ranked over all levels."""

    budget: int
    steps: int
    width: int
    rank: Rank
    tree: Tree = field(default_factory=Tree)

    @property
    def done(self) -> bool:
        return self.tree.level >= self.steps or not self.tree.frontier

    def growing(self) -> Draft:
        return self.tree.growing()

    def extend(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        self.tree.expand(self.rank(logits, self.tree), self.width, self.budget)

    def draft(self) -> Draft:
        return self.tree.pruned(self.budget)


@dataclass(slots=True)
class Drawn:
    """A tree whose nodes are drawn; its law travels with it. laws: the law at each node of the frontier."""

    tree: DrawnTree
    laws: Callable[[Tensor, Growth], Tensor]

    @property
    def done(self) -> bool:
        return not self.tree.frontier

    def growing(self) -> Draft:
        return self.tree.growing()

    def extend(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        self.tree.expand(self.laws(logits, self.tree))

    def draft(self) -> Draft:
        return self.tree.finished()


def begin(
    config: GrowthConfig,
    context: Context,
    budget: int,
    widen: Widen,
    law: Law,
    sharpest: Rank | None = None,
    gate: Gate | None = None,
) -> Grower:
    """What grows a draft of ``budget`` nodes for ``context``, which draws from ``law`` or ranks by it.

    sharpest: ranks for a greedy request whose law has no history; None ranks by ``law`` at temperature 1, since which
    of the others would be the target's argmax is a question at temperature 1.
    gate: may end a chain early; a tree has its budget.
    """
    shared = context.exactness is Exactness.TRAJECTORY
    streams, position = context.streams, context.generated
    stream = streams.shared(position) if shared else streams.private(Purpose.DRAFT, position)
    steps, width = config.steps(budget), config.top_k
    if config.tree == "chain":
        return Chain(context, steps, law, widen, stream, drawn=not shared and not law.greedy, gate=gate)
    ranking = law.with_temperature(1.0) if law.greedy else law

    def laws(logits: Tensor, tree: Growth) -> Tensor:
        """[frontier, V], each node judged with its own history; all zeros where no token can come."""
        histories = [context.history(tree.path(node)) for node in tree.frontier] if ranking.needs_history else ()
        return drafting_probs(ranking, widen(logits), histories)

    if law.greedy:
        own = None if law.needs_history else sharpest
        return Fixed(budget, steps, width, own or (lambda logits, tree: likeliest(laws(logits, tree), width)))
    if shared:
        return Fixed(budget, steps, width, lambda logits, tree: racing(laws(logits, tree), width, stream, tree.level))
    if config.tree == "top_k":
        return Fixed(budget, steps, width, lambda logits, tree: likeliest(laws(logits, tree), width))
    return Drawn(DrawnTree(kind=config.tree, budget=budget, steps=steps, width=width, stream=stream), laws)

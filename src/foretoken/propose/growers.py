"""One sequence's draft while a model grows it: a chain, a tree of fixed candidates, or a sampled tree.

All growers are driven in one way: until ``done``, the model scores ``growing()``, and ``extend`` receives the logits
of the new nodes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from torch import Tensor

from foretoken.core.checks import integer
from foretoken.core.context import Context, Exactness
from foretoken.core.distributions import Law
from foretoken.core.draft import Draft, ProposalLaw
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Purpose
from foretoken.models.chains import ChainRequest, DraftStop, ModelChain, TreeShape
from foretoken.propose.chain import AtOnce, Chain, Widen, draws_of, request_of
from foretoken.propose.drawn_tree import DrawnTree, DrawnTreeKind
from foretoken.propose.tree import Candidates, Growth, Tree, drafting_probs, likeliest, racing

TreeKind = Literal["chain", "top_k", "ranked", "at_once", DrawnTreeKind]
TREE_STEPS = 8  # default depth of a tree

# Returns likely children from the draft's logits [frontier, Vd] at the tree's frontier.
Rank = Callable[[Tensor, Tree], Candidates]


@dataclass(frozen=True, slots=True)
class GrowthConfig:
    """Shape of the drafts of a model that drafts level by level.

    Greedy requests and those of the trajectory grade have fixed candidates: any tree is a "top_k" tree for them.
    """

    # "chain"; "top_k", the likeliest candidates re-ranked over all levels (EAGLE-2); "sampled", siblings sampled
    # without replacement; "greedy_multi", the likeliest siblings and one sampled; "ranked", "top_k" where candidates
    # are fixed, and a chain where tokens are sampled; "at_once", "top_k" for greedy requests, else a chain, which a
    # head drafts in one call
    tree: TreeKind = "chain"
    # maximum depth, hence the number of draft passes; None is the whole budget, for trees at most 8
    num_steps: int | None = None
    top_k: int = 4  # maximum number of siblings, and of nodes expanded on a level
    # number of tokens that the drafter's attention sees at most; None for the drafter's own windows
    draft_window: int | None = None

    def __post_init__(self) -> None:
        if self.tree not in get_args(TreeKind):
            raise InvalidRequest(f"tree must be one of {', '.join(get_args(TreeKind))}, got {self.tree!r}")
        integer("num_steps", self.num_steps, 1, optional=True)
        integer("top_k", self.top_k, 1)
        integer("draft_window", self.draft_window, 1, optional=True)

    def is_chain(self, drawn: bool) -> bool:
        """Returns whether a draft whose tokens are ``drawn``, or else fixed candidates, is a chain."""
        return self.tree == "chain" or (self.tree in ("ranked", "at_once") and drawn)

    def steps(self, budget: int, drawn: bool = False) -> int:
        return min(budget, self.num_steps or (budget if self.is_chain(drawn) else TREE_STEPS))


class Grower(AtOnce, Protocol):
    """A draft that grows, driven as the module describes."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to score."""
        ...

    def growing(self) -> Draft: ...

    def extend(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        """Adds children below the new nodes.

        Args:
            logits: [rows, V] of the nodes of ``growing()`` that were not scored before; first the root's.
            hidden: [rows, H], the normed states there, if a score needs them.
        """
        ...


@dataclass(slots=True, kw_only=True)
class TreeGrower:
    """Base class of trees that a model may also draft at once."""

    whole: ChainRequest | None = None  # the request to that model; None if it cannot draft as this class does
    drafted: Draft | None = None  # the draft, if a model did

    def request(self) -> ChainRequest | None:
        return self.whole


@dataclass(slots=True)
class RankedTreeGrower(TreeGrower):
    """Grows the best candidates by ``rank``, re-ranked over all levels."""

    budget: int
    steps: int
    width: int
    rank: Rank
    tree: Tree

    def take(self, chain: ModelChain) -> None:
        self.drafted = Draft.tree(chain.tokens, chain.parents, chain.probabilities)

    @property
    def done(self) -> bool:
        return self.tree.level >= self.steps or not self.tree.frontier

    def growing(self) -> Draft:
        return self.tree.growing()

    def extend(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        self.tree.expand(self.rank(logits, self.tree), self.width, self.budget)

    def draft(self) -> Draft:
        return self.tree.pruned(self.budget) if self.drafted is None else self.drafted


@dataclass(slots=True)
class SampledTreeGrower(TreeGrower):
    """Grows a tree of sampled nodes, whose distributions travel with the draft.

    distributions: Returns the distribution at each node of the frontier.
    """

    tree: DrawnTree
    distributions: Callable[[Tensor, Growth], Tensor]

    def take(self, chain: ModelChain) -> None:
        self.drafted = Draft.empty()
        law: ProposalLaw | None = self.tree.law(chain.rows) if isinstance(chain.rows, Tensor) else chain.rows
        if chain.tokens and law is not None:
            scores = tuple(chain.probabilities)
            self.drafted = Draft(tuple(chain.tokens), tuple(chain.parents), law, scores)

    @property
    def done(self) -> bool:
        return not self.tree.frontier

    def growing(self) -> Draft:
        return self.tree.growing()

    def extend(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        self.tree.expand(self.distributions(logits, self.tree))

    def draft(self) -> Draft:
        return self.tree.finished() if self.drafted is None else self.drafted


def grow_at_once(grower: Grower, logits: Tensor) -> None:
    """Grows a draft from the logits of all its levels, which a model computed before any of its tokens was chosen.

    The distribution at a node depends on its depth alone, apart from what the request's own parameters make of the
    node's history. So a chain's tokens are sampled independently, and all nodes of a level have the same logits. The
    draft carries the distributions that its tokens were sampled from, as any other.

    Args:
        grower: The draft, which has not begun.
        logits: [levels, V], those of the root's children first.
    """
    scored = 0
    for level in logits:
        if grower.done:
            return
        nodes = len(grower.growing())
        grower.extend(level.expand(max(1, nodes - scored), -1))
        scored = nodes


def refuse_window(window: int | None) -> None:
    """Raises InvalidRequest for a window of a drafter that reads the target's KV cache."""
    if window is not None:
        raise InvalidRequest("this method drafts from the target's KV cache, so it has no draft_window; leave it out")


def is_drawn(context: Context, law: Law) -> bool:
    """Returns whether draft tokens are sampled from ``law``, rather than fixed candidates."""
    return context.exactness is not Exactness.TRAJECTORY and not law.greedy


def begin(
    config: GrowthConfig,
    context: Context,
    budget: int,
    widen: Widen,
    law: Law,
    greedy_rank: Rank | None = None,
    greedy_temperature: float | None = None,
    stop: DraftStop | None = None,
) -> Grower:
    """Returns the grower of a draft of ``budget`` nodes for ``context``, which samples from ``law`` or ranks by it.

    A greedy draft ends where ``Context.end`` says.

    Args:
        greedy_rank: Ranks for a greedy request whose law needs no history. None ranks by ``law`` at temperature 1:
            which other token could be the target's argmax depends on the probabilities at temperature 1.
        greedy_temperature: The temperature at which ``greedy_rank`` takes the likeliest tokens; None if it ranks
            otherwise.
        stop: Scores the tokens of chains in the place of the draft's own probabilities, also of sampled ones.
    """
    drawn = is_drawn(context, law)
    chained = drawn or (config.tree == "at_once" and not law.greedy)
    steps, width = config.steps(budget, chained), config.top_k

    least = min(context.end.min_acceptance) if context.end and law.greedy else 0.0
    floor = math.log(least) if least else -math.inf

    def ranked(rank: Rank, whole: ChainRequest | None) -> Grower:
        return RankedTreeGrower(budget, steps, width, rank, Tree(floor=floor), whole=whole)

    def at_temperature(temperature: float | None) -> ChainRequest | None:
        shape = None if temperature is None else TreeShape(width, steps, temperature, floor)
        return None if shape is None else ChainRequest(budget, tree=shape)

    if law.greedy and greedy_rank and not law.needs_history and config.tree != "chain" and not config.is_chain(chained):
        return ranked(greedy_rank, at_temperature(greedy_temperature))
    shared = context.exactness is Exactness.TRAJECTORY
    streams, position = context.streams, context.generated
    stream = streams.shared(position) if shared else streams.private(Purpose.DRAFT, position)
    if config.tree == "chain" or config.is_chain(chained):  # the first tells the type checker what is left
        return Chain(context, steps, law, widen, stream, sampled=drawn, stop=stop)
    ranking = law.with_temperature(1.0) if law.greedy else law

    def distributions(logits: Tensor, tree: Growth) -> Tensor:
        """Returns [frontier, V], each node with its own history; all zeros where no token is possible."""
        histories = [context.history(tree.path(node)) for node in tree.frontier] if ranking.needs_history else ()
        return drafting_probs(ranking, widen(logits), histories)

    if shared and not law.greedy:
        whole = request_of(law, context, budget, draws_of(law, stream, steps), TreeShape(width, steps))
        return ranked(lambda logits, tree: racing(distributions(logits, tree), width, stream, tree.level), whole)
    if law.greedy or config.tree == "top_k" or config.tree == "ranked" or config.tree == "at_once":
        whole = at_temperature(_bare_temperature(ranking)) or request_of(
            ranking, context, budget, draws_of(ranking, stream, 0), TreeShape(width, steps, floor=floor)
        )
        return ranked(lambda logits, tree: likeliest(distributions(logits, tree), width), whole)
    grown = DrawnTree(kind=config.tree, budget=budget, steps=steps, width=width, stream=stream)
    draws, shape = draws_of(law, stream, budget, rows=True), TreeShape(width, steps, kind=config.tree)
    return SampledTreeGrower(grown, distributions, whole=request_of(law, context, budget, draws, shape))


def _bare_temperature(law: Law) -> float | None:
    """Returns the temperature of a law that changes logits in no other way; None for other laws."""
    if not isinstance(law, SamplingLaw) or law.adjusts or law.kept[1:] != SamplingLaw().kept[1:]:
        return None
    return law.temperature

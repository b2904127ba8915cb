"""Trees of fixed candidates: grown level by level under a model, cut from independent heads at once, or made of counted
continuations.

The tree maximizes E[accepted], the sum over nodes of the probability that the target's text passes through them. A
node's score is the log of the draft's estimate of it, the sum over its path. Scores only fall along a path, so the best
nodes of a tree always contain their own ancestors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nlargest
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.core.distributions import Law
from foretoken.core.draft import Draft, PointMass, ProposalLaw, log_scores
from foretoken.core.history import History
from foretoken.core.native import sampling as native
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import SharedStream, Stream
from foretoken.propose.matches import BREAK


class Candidates(NamedTuple):
    """Likely children of some nodes, the likeliest first."""

    # [rows, K], log of the estimated probability that the target continues from the node with the token; -inf marks no
    # candidate
    scores: Tensor
    ids: Tensor  # int64 [rows, K], the tokens


def drafting_probs(law: Law, logits: Tensor, histories: Sequence[History]) -> Tensor:
    """Returns ``law.probs`` for a draft: all zeros in rows where no token is possible, so that nothing is drafted
    there.

    If the law raises, all rows are zero: the target's own pass ends the request with an error.
    """
    try:
        probs = law.probs(logits, histories)
    except Exception:
        return torch.zeros_like(logits, dtype=torch.float32)
    impossible = probs[:, :1].isnan()
    return probs.masked_fill_(impossible, 0.0) if bool(impossible.any()) else probs


def likeliest(probs: Tensor, count: int) -> Candidates:
    """Returns the ``count`` most probable tokens of each row [rows, V]."""
    top = probs.topk(min(count, probs.shape[-1]))
    return Candidates(top.values.log(), top.indices)


def racing(probs: Tensor, count: int, stream: Stream, depth: int) -> Candidates:
    """Returns the ``count`` leaders of each row's race log q + G under the noise that the target will use (2408.07978).

    The leader is the token that plain decoding with q would emit. If log p = log q + e, with errors e of a standard
    Gumbel distribution, the target emits x with probability softmax(log q + G). These are the scores, which roughly
    match what the leaders of a 1 M draft showed.

    Args:
        probs: [rows, V], distributions of nodes at one depth.
        depth: 0 for the root's children.
    """
    if not isinstance(stream, SharedStream):
        raise TypeError("a race needs the shared noise of the trajectory grade: context.streams.shared(position)")
    race = stream.race(probs, depth)
    top = race.topk(min(count, race.shape[-1]))
    smallest = torch.finfo(race.dtype).tiny  # a row of zeros has no candidates
    return Candidates((top.values / race.sum(-1, keepdim=True).clamp_(min=smallest)).log_(), top.indices)


def kernel_candidates(law: Law, logits: Tensor, count: int, stream: SharedStream | None) -> Candidates | None:
    """Returns ``likeliest`` of the distributions of rows by the compiled kernels, or ``racing`` if there is a stream.

    Returns None if the kernels do not compute them: the law has a history or changes logits, or the kernels are
    missing.
    logits: [rows, V], with a stream those at the depths from 0 on.
    """
    kernels = native.for_rows(logits) if isinstance(law, SamplingLaw) and not law.adjusts and not law.greedy else None
    if kernels is None or not isinstance(law, SamplingLaw):
        return None
    keys = () if stream is None else stream.keys(len(logits))
    ids, scores = kernels.leaders(logits, min(count, logits.shape[1]), law.kept, keys)
    return Candidates(scores, ids)


@dataclass(slots=True)
class Growth:
    """A tree while a model grows it.

    The model scores ``growing()``, whose last nodes are the ``frontier``; children are then added below those. The
    first frontier is the root, -1. An empty frontier means that the tree is complete.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [-1])  # the nodes whose logits come next
    scored: list[int] = field(default_factory=list)  # nodes that the model has scored or is to score, in its order

    def growing(self) -> Draft:
        """Returns the nodes of the next pass: those scored before, then the frontier; empty for the root alone."""
        return self.subtree(self.scored)

    def path(self, node: int) -> tuple[int, ...]:
        """Returns the tokens from the root's child down to ``node``; empty for the root (-1)."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def advance(self, frontier: Sequence[int]) -> None:
        self.frontier = list(frontier)
        self.scored += self.frontier

    def subtree(
        self, nodes: Sequence[int], law: ProposalLaw | None = None, scores: tuple[float, ...] | None = None
    ) -> Draft:
        """Returns a draft of these nodes in this order; each node's parent must come before it."""
        number = {node: i for i, node in enumerate(nodes)}
        tokens = tuple(self.tokens[node] for node in nodes)
        parents = tuple(number[self.parents[node]] if self.parents[node] >= 0 else -1 for node in nodes)
        return Draft(tokens, parents, law or PointMass(), scores)


@dataclass(slots=True)
class Tree(Growth):
    """Fixed candidates as EAGLE-2 grows them (2406.16858, section 4): expands the best nodes of a level, keeps the best
    of all levels.
    """

    scores: list[float] = field(default_factory=list)
    level: int = 0  # of the frontier; the root's is 0
    floor: float = -math.inf  # score below which a node is not expanded

    def expand(self, candidates: Candidates, width: int, budget: int) -> None:
        """Adds ``candidates`` below the frontier; the next frontier is the best ``width`` of them.

        A node with ``budget`` better nodes in the tree will not be kept, nor will anything below it, so it is not
        expanded. Nor is a node whose score is below ``floor``.
        candidates: One row for each node of the frontier.
        """
        start = len(self.tokens)
        rows = zip(self.frontier, candidates.scores.tolist(), candidates.ids.tolist(), strict=True)
        for node, scores, ids in rows:
            above = self.scores[node] if node >= 0 else 0.0
            for score, token in zip(scores, ids, strict=True):
                if score == float("-inf"):
                    break
                self.tokens.append(token)
                self.parents.append(node)
                self.scores.append(above + min(0.0, score))
        best = set(self._best(budget, range(len(self.tokens))))
        best_of_level = self._best(width, range(start, len(self.tokens)))
        self.advance(sorted(node for node in best_of_level if node in best and self.scores[node] >= self.floor))
        self.level += 1

    def pruned(self, budget: int) -> Draft:
        """Returns the best ``budget`` nodes of all levels, parents first, with their scores."""
        kept = sorted(self._best(budget, range(len(self.tokens))))
        return self.subtree(kept, scores=tuple(self.scores[node] for node in kept))

    def _best(self, count: int, nodes: Sequence[int]) -> list[int]:
        """Returns the ``count`` nodes of highest score; on ties the older, so that parents precede their children."""
        return nlargest(count, nodes, key=lambda node: (self.scores[node], -node))


def best_first(log_probs: Tensor, ids: Tensor, budget: int) -> Draft:
    """Returns the ``budget`` best nodes of a tree in which all nodes of a depth have the same children.

    The heads of Medusa (2401.10774) and of blockwise decoding (1811.03115) make such trees, as they do not see what was
    drafted before. The draft has fixed candidates, the best node first, so parents come before children. A node's score
    is the sum over its path.

    Args:
        log_probs: [D, K], candidates of each depth in any order; -inf marks no candidate.
        ids: [D, K], their tokens.
        budget: Maximum number of nodes.
    """
    order = log_probs.argsort(dim=-1, descending=True, stable=True)
    levels = log_probs.clamp(max=0.0).gather(-1, order).tolist()
    names = ids.gather(-1, order).tolist()
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    open_nodes: list[tuple[float, int, int, int, int]] = []  # (-score, age, depth, rank, parent)
    age = 0

    def offer(above: float, depth: int, rank: int, parent: int) -> None:
        nonlocal age
        if depth < len(levels) and rank < len(levels[depth]) and levels[depth][rank] > float("-inf"):
            heappush(open_nodes, (-(above + levels[depth][rank]), age, depth, rank, parent))
            age += 1

    offer(0.0, 0, 0, -1)
    while open_nodes and len(tokens) < budget:
        cost, _, depth, rank, parent = heappop(open_nodes)
        tokens.append(names[depth][rank])
        parents.append(parent)
        scores.append(-cost)
        offer(scores[parent] if parent >= 0 else 0.0, depth, rank + 1, parent)
        offer(-cost, depth + 1, 0, len(tokens) - 1)
    return Draft.tree(tokens, parents, scores)


Continuation = tuple[int, ...]


@dataclass(slots=True)
class CandidateTree:
    """A tree of tokens, parents first, with the estimated probability that the output passes through each node."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)

    @property
    def score(self) -> float:
        """Expected number of accepted tokens, if the estimates are right."""
        return sum(self.probs)

    def draft(self, match: int = 0) -> Draft:
        """Returns fixed candidates. A node's score is the log of its probability.

        match: Length of the matched context. A longer one is more likely to go on: one of m tokens goes on for another
        with m / (m + 2). 0 is unknown.
        """
        if not self.tokens:
            return Draft.empty()
        further: list[float] = []  # P(the match holds up to the node)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else match)
            above = further[parent] if parent >= 0 else 1.0
            further.append(above * depths[-1] / (depths[-1] + 2.0) if match else 1.0)
        probs = [p * holds for p, holds in zip(self.probs, further, strict=True)]
        return Draft.tree(self.tokens, self.parents, log_scores(probs))


def candidate_tree(
    continuations: Mapping[Continuation, float], budget: int, steps: int, top_k: int, min_prob: float = 0.0
) -> CandidateTree:
    """Returns the ``budget`` likeliest nodes of the trie of ``continuations``.

    On ties the earlier continuation wins.

    Args:
        continuations: Weights (counts). A node's probability is its parent's times its share of the parent's weight.
        budget: Maximum number of nodes.
        steps: Maximum depth.
        top_k: Maximum number of children of a node. 1 makes a chain of the commonest tokens.
        min_prob: Minimum probability of a node.
    """
    tree = CandidateTree()
    waiting: list[tuple[float, int, int, int, int, list[tuple[Continuation, float]]]] = []
    age = 0

    def offer(members: Sequence[tuple[Continuation, float]], depth: int, prob: float, parent: int) -> None:
        nonlocal age
        if len(members) == 1:  # the remainder of a continuation that no other one shares
            token = members[0][0][depth] if depth < len(members[0][0]) else BREAK
            if token != BREAK:
                heappush(waiting, (-prob, age, token, parent, depth + 1, list(members)))
                age += 1
            return
        weights: dict[int, float] = {}
        groups: dict[int, list[tuple[Continuation, float]]] = {}
        for member in members:
            token = member[0][depth] if depth < len(member[0]) else BREAK
            weights[token] = weights.get(token, 0.0) + member[1]
            groups.setdefault(token, []).append(member)
        total = sum(weights.values())
        weights.pop(BREAK, None)
        for token in sorted(weights, key=weights.__getitem__, reverse=True)[:top_k]:
            share = prob * weights[token] / total
            if share > 0.0 and share >= min_prob:
                heappush(waiting, (-share, age, token, parent, depth + 1, groups[token]))
                age += 1

    offer(list(continuations.items()), 0, 1.0, -1)
    while waiting and len(tree.tokens) < budget:
        cost, _, token, parent, depth, members = heappop(waiting)
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.probs.append(-cost)
        if depth < steps:
            offer(members, depth, -cost, len(tree.tokens) - 1)
    return tree

"""Drawn trees: from the leaves up (traversal), or from the root down by one solver per node.

In all of them the shape may depend on anything drawn before, but how many children a node has is decided before any of
them is drawn, and what was drawn stays.
"""

from __future__ import annotations

from itertools import count

from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.law import Sampled, WithoutReplacement
from foretoken.core.streams import Stream
from foretoken.core.verdict import Verdict
from foretoken.verify.residual import drawn_rows, excess, normalised, ratio
from foretoken.verify.rows import Probs, chances, draw, possible, reached


def traversal(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
    """Traversal verification (2505.12398, algorithm 2), leaf to root: block verification's idea, for a tree.

    A node is reached with weight pa: 1 at the root, min(1, pa p(x) / q(x)) at its child x. The first leaf in post-order
    is accepted with its pa, whole path and all. Else it is deleted, and with Z the mass of (pa p - q)+ its parent gets
    pa <- Z / (Z + 1 - pa), p <- norm((pa p - q)+); siblings drawn without replacement also take q[x] <- 0,
    renormalised. Below a weight of 0 everything is rejected, and no row is read; nor is one above what was accepted at
    once. On a chain this is block verification, number for number.

    draft: law ``Sampled`` (siblings i.i.d.) or ``WithoutReplacement``. probs: [n+1, V].
    """
    rows = drawn_rows(draft, probs)
    replaced = isinstance(draft.law, Sampled)

    def settle(node: int, weight: float) -> Verdict | None:
        """The verdict below ``node``, None when all of it is rejected."""
        p: Tensor | None = None  # the whole row only once a child was rejected
        children = draft.children[node + 1]
        q = rows[node + 1] if children else None
        for child in children:
            assert q is not None
            token = draft.ids[child]
            drawn = float(p[token]) if p is not None else next(chances(probs, [node + 1], [token]))
            reached = min(1.0, weight * ratio(drawn, float(q[token])))
            verdict = settle(child, reached) if reached > 0.0 else None
            if verdict is not None:
                return verdict
            if p is None:
                if not possible(probs, node + 1):
                    break  # all children are rejected, and the node keeps its weight
                p = probs[node + 1]
            rest, mass = excess(p, q, weight)
            left = mass + (1.0 - weight)
            weight = mass / left if left > 0.0 else 1.0
            p = rest / mass if mass > 0.0 else p
            q = q if replaced else _without(q, [token])
        if node >= 0 and not stream.bernoulli(weight, index=node + 1):
            return None
        token = draw(probs, node + 1, stream, node + 1) if p is None else stream.categorical(p, index=node + 1)
        return Verdict(draft.path(node), token)

    verdict = settle(-1, 1.0)
    assert verdict is not None, "the root always yields a token"
    return verdict


def recursive(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
    """Recursive rejection (SpecInfer, 2305.09781; without replacement: Sequoia, 2402.12374).

    Children in turn: accept with min(1, p/q), else p <- norm((p - q)+); siblings drawn without replacement also
    take q[x] <- 0, renormalised. When all have failed, y ~ p. On a chain this is token rejection.

    draft: law ``Sampled`` (siblings i.i.d.) or ``WithoutReplacement``. probs: [n+1, V].
    """
    rows = drawn_rows(draft, probs)
    node = -1
    for depth in count():
        p = reached(probs, node + 1)
        children = draft.children[node + 1]
        q = normalised(rows[node + 1]) if children else p
        for child in children:
            token = draft.ids[child]
            if stream.bernoulli(min(1.0, ratio(float(p[token]), float(q[token]))), index=child):
                node = child
                break
            rest, mass = excess(p, q)
            p = rest / mass if mass > 0.0 else p
            if isinstance(draft.law, WithoutReplacement):
                q = _without(q, [token])
        else:
            return Verdict(draft.path(node), stream.categorical(p, index=depth))
    raise AssertionError("a tree has a deepest node")


def greedy_multi(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
    """Greedy multi-draft (2502.18779): k-1 fixed siblings T and a last one drawn from q' = q outside T.

    Accept the drawn one with min(1, p/q'), else y ~ norm((p - q')+), which may land in T and go on from there.
    Attains the optimal-transport bound p(T) + sum over the rest of min(p, q').

    draft: law ``TopPlusSampled``. probs: [n+1, V].
    """
    rows = drawn_rows(draft, probs)
    node = -1
    for depth in count():
        p = reached(probs, node + 1)
        children = draft.children[node + 1]
        if children:
            *fixed, drawn = children
            token = draft.ids[drawn]
            q = _without(rows[node + 1], [draft.ids[c] for c in fixed])
            if stream.bernoulli(min(1.0, ratio(float(p[token]), float(q[token]))), index=drawn):
                node = drawn
                continue
            rest, mass = excess(p, q)
            p = rest if mass > 0.0 else p
        token = stream.categorical(p, index=depth)
        landed = next((c for c in children if draft.ids[c] == token), None)
        if landed is None:
            return Verdict(draft.path(node), token)
        node = landed
    raise AssertionError("a tree has a deepest node")


def _without(q: Tensor, tokens: list[int]) -> Tensor:
    """q with ``tokens`` taken out, renormalised by the mass that is left; all zeros when nothing is left."""
    left = q.double().clone()
    left[tokens] = 0.0
    return normalised(left)

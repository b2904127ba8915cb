"""Verifiers of sampled trees: from the leaves up (traversal), or from the root down with one solver per node.

All of them require that the number of a node's children is decided before any of them is sampled, and that no sampled
node is removed. Apart from that, the shape may depend on anything sampled before.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from foretoken.core.draft import Draft, Sampled, WithoutReplacement
from foretoken.core.streams import Stream
from foretoken.core.verdict import Verdict
from foretoken.verify.residual import drawn_rows, excess, normalized, ratio
from foretoken.verify.rows import Probs, chances, draw, possible, reached


def traversal(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
    """Traversal verification (2505.12398, algorithm 2), leaf to root: block verification for a tree.

    A node is reached with weight pa: 1 at the root, min(1, pa p(x) / q(x)) at its child x. The first leaf in post-order
    is accepted with probability pa, together with its path. Otherwise it is deleted, and its parent gets pa <- Z / (Z +
    1 - pa) and p <- norm((pa p - q)+), where Z is the mass of (pa p - q)+. For siblings sampled without replacement,
    q[x] <- 0 and q is renormalized. Below a weight of 0 everything is rejected and no row is read; neither are rows
    above a leaf that is accepted at once. On a chain the result equals block verification's, bit for bit.

    Args:
        draft: Law ``Sampled`` (siblings i.i.d.) or ``WithoutReplacement``.
        probs: [n+1, V].
        stream: Random numbers of the verification.
    """
    rows = drawn_rows(draft, probs)
    path = [_Reached(-1, 1.0, iter(draft.children[0]))]  # from the root down; not recursive, because drafts are deep
    while True:
        above = path[-1]
        child = next(above.untested, None)
        if child is not None:
            token, row = draft.ids[child], above.node + 1
            drawn = float(above.p[token]) if above.p is not None else next(chances(probs, [row], [token]))
            above.q = rows[row] if above.q is None else above.q
            weight = min(1.0, above.weight * ratio(drawn, float(above.q[token])))
            if weight > 0.0:
                path.append(_Reached(child, weight, iter(draft.children[child + 1])))
                continue
        elif above.node < 0 or stream.bernoulli(above.weight, index=above.node + 1):
            row = above.node + 1
            token = draw(probs, row, stream, row) if above.p is None else stream.categorical(above.p, index=row)
            return Verdict(draft.path(above.node), token)
        else:
            child = path.pop().node
            above = path[-1]
        above.reject(draft.ids[child], probs, replaced=isinstance(draft.law, Sampled))


@dataclass(slots=True)
class _Reached:
    """A node on the path that traversal verification tests."""

    node: int  # its index, -1 for the root
    weight: float  # probability with which it is reached, then that with which it is accepted as a leaf
    untested: Iterator[int]  # its children that were not tested
    # [V]; the target's distribution after rejected children; None until a child is rejected: the row is not read
    p: Tensor | None = None
    q: Tensor | None = None  # [V]; the distribution of the next child; None until a child is tested

    def reject(self, token: int, probs: Probs, *, replaced: bool) -> None:
        """Deletes the child ``token``. ``replaced``: siblings are independent samples."""
        assert self.q is not None
        if self.p is None:
            if not possible(probs, self.node + 1):
                self.untested = iter(())  # all children are rejected, and the node keeps its weight
                return
            self.p = probs[self.node + 1]
        residual, mass = excess(self.p, self.q, self.weight)
        remaining = mass + (1.0 - self.weight)
        self.weight = mass / remaining if remaining > 0.0 else 1.0
        self.p = residual / mass if mass > 0.0 else self.p
        self.q = self.q if replaced else _without(self.q, [token])


def recursive(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
    """Recursive rejection (SpecInfer, 2305.09781; without replacement: Sequoia, 2402.12374).

    The children are tested in turn: each is accepted with min(1, p/q), else p <- norm((p - q)+). For siblings sampled
    without replacement, q[x] <- 0 and q is renormalized. When all are rejected, the token is sampled from p. On a chain
    this is token rejection.

    Args:
        draft: Law ``Sampled`` (siblings i.i.d.) or ``WithoutReplacement``.
        probs: [n+1, V].
        stream: Random numbers of the verification.
    """
    rows = drawn_rows(draft, probs)
    node = -1
    for depth in count():
        p = reached(probs, node + 1)
        children = draft.children[node + 1]
        q = rows[node + 1] if children else p
        for child in children:
            token = draft.ids[child]
            if stream.bernoulli(min(1.0, ratio(float(p[token]), float(q[token]))), index=child):
                node = child
                break
            residual, mass = excess(p, q)
            p = residual / mass if mass > 0.0 else p
            if isinstance(draft.law, WithoutReplacement):
                q = _without(q, [token])
        else:
            return Verdict(draft.path(node), stream.categorical(p, index=depth))
    raise AssertionError("a tree has a deepest node")


def greedy_multi(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
    """Greedy multi-draft (2502.18779): k-1 fixed siblings T and a last one sampled from q', which is q outside T.

    The sampled sibling is accepted with min(1, p/q'). Otherwise a token is sampled from norm((p - q')+); if it is in T,
    the verification continues from that node. The acceptance attains the optimal-transport bound p(T) + sum of min(p,
    q') over the tokens outside T.

    Args:
        draft: Law ``TopPlusSampled``.
        probs: [n+1, V].
        stream: Random numbers of the verification.
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
            residual, mass = excess(p, q)
            p = residual if mass > 0.0 else p
        token = stream.categorical(p, index=depth)
        landed = next((c for c in children if draft.ids[c] == token), None)
        if landed is None:
            return Verdict(draft.path(node), token)
        node = landed
    raise AssertionError("a tree has a deepest node")


def _without(q: Tensor, tokens: list[int]) -> Tensor:
    """Returns q without ``tokens``, renormalized by the remaining mass; all zeros if nothing remains."""
    remaining = q.double().clone()
    remaining[tokens] = 0.0
    return normalized(remaining)

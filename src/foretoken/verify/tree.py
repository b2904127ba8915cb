"""Drawn trees, verified by one solver per node; the exactness of each node gives that of the tree."""

from __future__ import annotations

from itertools import count

from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.law import WithoutReplacement
from foretoken.core.streams import Stream
from foretoken.core.verdict import Verdict
from foretoken.verify.residual import drawn_rows, excess, normalised, ratio
from foretoken.verify.rows import Probs


def recursive(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
    """Recursive rejection (SpecInfer, 2305.09781; without replacement: Sequoia, 2402.12374).

    Children in turn: accept with min(1, p/q), else p <- norm((p - q)+); siblings drawn without replacement also
    take q[x] <- 0, renormalised. When all have failed, y ~ p. On a chain this is token rejection.

    draft: law ``Sampled`` (siblings i.i.d.) or ``WithoutReplacement``. probs: [n+1, V].
    """
    rows = drawn_rows(draft, probs)
    node = -1
    for depth in count():
        p = probs[node + 1]
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
        p = probs[node + 1]
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

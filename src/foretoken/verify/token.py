"""Token-by-token rejection of a drawn chain (2211.17192, algorithm 1; 2302.01318, algorithm 2)."""

from __future__ import annotations

from foretoken.core.draft import Draft
from foretoken.core.streams import Stream
from foretoken.core.verdict import Verdict
from foretoken.verify.residual import drawn_rows, excess, ratio
from foretoken.verify.rows import Probs, draw, reached


def verify(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
    """Accept x_i with min(1, p/q); at the first failure draw from norm((p - q)+), else the bonus from row n.

    draft: a chain with law ``Sampled``; token i was drawn from row i of q. probs: [n+1, V].
    """
    q = drawn_rows(draft, probs)
    for i, token in enumerate(draft.ids):
        p = reached(probs, i)
        if not stream.bernoulli(min(1.0, ratio(float(p[token]), float(q[i, token]))), index=i):
            rest, mass = excess(p, q[i])
            return Verdict(tuple(range(i)), stream.categorical(rest if mass > 0.0 else p, index=i))
    n = len(draft)
    return Verdict(tuple(range(n)), draw(probs, n, stream, index=n))

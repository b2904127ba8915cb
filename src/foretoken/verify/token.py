"""Rejection sampling of a sampled chain, token by token (2211.17192, algorithm 1; 2302.01318, algorithm 2)."""

from foretoken.core.draft import Draft
from foretoken.core.streams import Stream
from foretoken.core.verdict import Verdict
from foretoken.verify import tree
from foretoken.verify.residual import drawn_rows, excess, ratio
from foretoken.verify.rows import Probs, draw, reached


def verify(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
    """Accepts x_i with probability min(1, p/q).

    At the first rejection the recovered token is sampled from norm((p - q)+). If all are accepted, the bonus token is
    sampled from row n. A tree that is no chain is verified by ``tree.recursive``, the same rule for trees.

    Args:
        draft: A draft with law ``Sampled``; token i of a chain was sampled from row i of q.
        probs: [n+1, V].
        stream: Random numbers of the verification.
    """
    if not draft.is_chain:
        return tree.recursive(draft, probs, stream)
    q = drawn_rows(draft, probs)
    for i, token in enumerate(draft.ids):
        p = reached(probs, i)
        if not stream.bernoulli(min(1.0, ratio(float(p[token]), float(q[i, token]))), index=i):
            residual, mass = excess(p, q[i])
            return Verdict(tuple(range(i)), stream.categorical(residual if mass > 0.0 else p, index=i))
    n = len(draft)
    return Verdict(tuple(range(n)), draw(probs, n, stream, index=n))

"""Block verification of a sampled chain (2403.10444, algorithm 2), optimal for a single path.

With w_0 = 1 and w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)), E[accepted] = sum_i E_q[w_i], never less than with token
rejection. It is also exact when the draft's length is a stopping time.
"""

from torch import Tensor

from foretoken.core.distributions import NodeDistributions
from foretoken.core.draft import Draft
from foretoken.core.streams import PrivateStream, Stream
from foretoken.core.verdict import Verdict
from foretoken.verify import tree
from foretoken.verify.residual import drawn_rows, excess, ratio
from foretoken.verify.rows import Probs, chances, draw, reached


def verify(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
    """Accepts tau = max{i : u_i <= h_i} tokens, then samples from norm((w_tau p_{tau+1} - q_{tau+1})+).

    h_n = w_n, else h_i = Z_i / (Z_i + 1 - w_i), where Z_i is the mass of that excess. If tau = n, the bonus token is
    sampled from p_{n+1}. A tree that is no chain is verified by ``tree.traversal``, the same rule for trees.

    Once w_i is 0 it stays 0, and no row below is read. The other rows are tested from the deepest up, so no excess is
    computed nearer the root than tau. Nor is it where u_i >= w_i: the excess is at most w_i, and so is h_i.

    Args:
        draft: A draft with law ``Sampled``; token i of a chain was sampled from row i of q.
        probs: [n+1, V].
        stream: Random numbers of the verification.
    """
    if not draft.is_chain:
        return tree.traversal(draft, probs, stream)
    n = len(draft)
    q = drawn_rows(draft, probs)
    if n and isinstance(probs, NodeDistributions) and isinstance(stream, PrivateStream):
        verdict = probs.verify_chain(draft.ids, q, stream.key)
        if verdict is not None:
            return Verdict(tuple(range(verdict[0])), verdict[1])
    w = _weights(draft, probs, q)
    if n == 0 or (len(w) > n and stream.bernoulli(w[n], index=n)):
        return Verdict(tuple(range(n)), draw(probs, n, stream, index=n))
    for tau in range(min(len(w), n) - 1, -1, -1):
        u = stream.uniform(tau) if tau else None
        if u is not None and not u.below(w[tau]):
            continue
        p = reached(probs, tau)  # if no token is possible, w is 0 below and h equals w
        residual, mass = excess(p, q[tau], w[tau])
        exit_mass = mass + (1.0 - w[tau])
        if u is None or u.below(mass / exit_mass if exit_mass > 0.0 else 1.0):
            return Verdict(tuple(range(tau)), stream.categorical(residual if mass > 0.0 else p, index=tau))
    raise AssertionError("row 0 always yields a token")


def _weights(draft: Draft, probs: Probs, q: Tensor) -> list[float]:
    """Returns w_0, w_1, ... in float64, up to the first that is 0, exclusive."""
    w = [1.0]
    q_drawn = q[range(len(draft)), draft.ids].tolist() if len(draft) else []
    for p_x, q_x in zip(chances(probs, range(len(draft)), draft.ids), q_drawn, strict=True):
        weight = min(1.0, w[-1] * ratio(p_x, q_x))
        if weight == 0.0:
            break
        w.append(weight)
    return w

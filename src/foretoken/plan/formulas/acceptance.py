"""What each verification rule accepts, from the laws themselves: p the target's, q the one the draft was drawn from.

Rows are torch or numpy, [..., V], with any leading dimensions in common; answers are float64 tensors [...]. A rule's
acceptance is the chance that at least one of a node's children is accepted; one-hot rows give temperature 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.checks import integer, number
from foretoken.core.errors import InvalidRequest
from foretoken.verify.typical import DELTA, EPSILON

Law = Tensor | NDArray[np.floating[Any]]

_TOLERANCE = 1e-2  # how far from 1 the sum of a law in half precision may be
_BRANCHES = 1 << 24  # numbers held at once when drawn siblings are enumerated
_NODES = 128  # of the quadrature over the winner's waiting time


def law(rows: Law) -> Tensor:
    """``rows`` [..., V] in float64, each over its own sum. Raises InvalidRequest for what are no probabilities."""
    found = torch.as_tensor(rows).double()
    sums = found.sum(-1, keepdim=True)
    if found.ndim == 0 or not bool(((found >= 0).all(-1, keepdim=True) & ((sums - 1).abs() < _TOLERANCE)).all()):
        raise InvalidRequest(
            "rows must be probabilities, none negative and each row summing to 1: softmax logits first"
        )
    return found / sums


def total_variation(p: Law, q: Law) -> Tensor:
    """TV = sum |p - q| / 2, which is D_LK = sum |p - (p+q)/2| (2211.17192, definition 3.2), as |p - (p+q)/2| halves."""
    return 0.5 * (law(p) - law(q)).abs().sum(-1)


def token(p: Law, q: Law) -> Tensor:
    """Token rejection, one drawn token: sum min(p, q) = 1 - TV (2211.17192, theorem 3.5). No rule does better."""
    return torch.minimum(law(p), law(q)).sum(-1)


def walk(p: Law, candidates: Tensor) -> Tensor:
    """Fixed candidates [..., k]: p of the distinct ones. Over a tree, E[accepted] is the sum of path probabilities.

    With a draft's argmax as the one candidate this is greedy drafting.
    """
    rows = law(p)
    marked = torch.zeros_like(rows).scatter(-1, candidates.expand(*rows.shape[:-1], candidates.shape[-1]), 1.0)
    return (rows * marked).sum(-1)


def coupled(p: Law, q: Law, children: int = 1) -> Tensor:
    """The trajectory grade: the target's argmax(log p + G) is among the top ``children`` of log q + G (2408.07978).

    One child: sum_x 1 / sum_y max(p_y/p_x, q_y/q_x), in V log V. More: let x win p's exponential race at time s. In
    q's race y overtakes it with chance 1 - exp(-s (q_y p_x/q_x - p_y)+), independently, and fewer than ``children``
    may. The integral over s is a double-exponential quadrature, in V^2 children: for small vocabularies.
    """
    integer("children", children, 1)
    p, q = _both(p, q)
    if children > 1:
        each = zip(p.reshape(-1, p.shape[-1]), q.reshape(-1, q.shape[-1]), strict=True)
        return torch.stack([_among(*pair, children) for pair in each]).reshape(p.shape[:-1])
    # max(p_y/p_x, q_y/q_x) is p's where p_y/q_y is larger than p_x/q_x, else q's: sorted by p/q, cumulative sums.
    order = torch.where(p > 0, p / q, 0.0).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    below = (q.flip(-1).cumsum(-1).flip(-1) - q).clamp(min=0.0)
    matched = p * q / (q * p.cumsum(-1) + p * below)
    return torch.where((p > 0) & (q > 0), matched, 0.0).sum(-1)


def recursive(p: Law, q: Law, siblings: int, replace: bool = False) -> Tensor:
    """Recursive rejection over drawn siblings, i.i.d. (2305.09781) or without replacement (2402.12374).

    After a rejection p <- norm((p - q)+), and without replacement q[x] <- 0, renormalised. One level of traversal
    verification is the same. Without replacement q depends on what was drawn, so all V^(siblings - 1) ways are
    enumerated: for small vocabularies. Raises InvalidRequest where that is too much.
    """
    integer("siblings", siblings, 1)
    p, q = _both(p, q)
    p, q = p.unsqueeze(-2), q.unsqueeze(-2)  # [..., ways, V]
    if not replace and q.numel() * q.shape[-1] ** (siblings - 1) > _BRANCHES:
        raise InvalidRequest(
            f"{siblings} siblings without replacement over {q.shape[-1]} tokens are too many ways to enumerate: "
            "ask for fewer siblings, for one row at a time, or count what real rounds accept"
        )
    accepted = torch.zeros(p.shape[:-2], dtype=p.dtype, device=p.device)
    weight = torch.ones(p.shape[:-1], dtype=p.dtype, device=p.device)
    for left in range(siblings - 1, -1, -1):
        overlap = torch.minimum(p, q).sum(-1)
        accepted = accepted + (weight * overlap).sum(-1)
        if left and replace:
            weight, p = weight * (1.0 - overlap), _rest(p, q)
        elif left:
            weight = (weight.unsqueeze(-1) * (q - p).clamp(min=0.0)).flatten(-2)
            p, q = (
                _each(_rest(p, q)),
                _normalised(_each(q) * ~torch.eye(q.shape[-1], dtype=torch.bool, device=q.device)),
            )
            p, q = p.flatten(-3, -2), q.flatten(-3, -2)
    return accepted


def greedy_multi(p: Law, q: Law, siblings: int) -> Tensor:
    """The top ``siblings`` - 1 tokens T of q and one drawn from q' = q outside T (2502.18779).

    p(T) + sum over the rest of min(p, q'): the optimal-transport bound, which the rule attains.
    """
    integer("siblings", siblings, 1, law(q).shape[-1])
    p, q = _both(p, q)
    fixed = torch.zeros_like(q, dtype=torch.bool).scatter(-1, q.topk(siblings - 1, dim=-1).indices, True)
    rest = _normalised(q.masked_fill(fixed, 0.0))
    return torch.where(fixed, p, torch.minimum(p, rest)).sum(-1)


def lenient(p: Law, q: Law, lenience: float) -> Tensor:
    """LOSSY. Accept x with min(1, p / (l q)), l from 0 to 1: sum min(p/l, q) (2211.17192, appendix A.5).

    Naive, as what is emitted no longer has the target's law; l = 1 is token rejection.
    """
    number("lenience", lenience, math.ulp(0.0), 1.0)
    return torch.minimum(law(p) / lenience, law(q)).sum(-1)


def typical(p: Law, q: Law, epsilon: float = EPSILON, delta: float = DELTA) -> Tensor:
    """LOSSY. q of the tokens with p > min(epsilon, delta exp(-H(p))) (Medusa, 2401.10774, section 2.3.1)."""
    p, q = _both(p, q)
    threshold = (delta * torch.exp(-torch.special.entr(p).sum(-1, keepdim=True))).clamp(max=epsilon)
    return torch.where(p > threshold, q, 0.0).sum(-1)


def chain(p: Sequence[Law], q: Sequence[Law], rule: str = "block") -> Tensor:
    """E[accepted] of a chain, exactly, for laws that depend on the tokens before: all paths are enumerated.

    p, q: for depth i = 1, 2, ... the rows [V, ..., V] with i dimensions, or fewer where earlier tokens do not matter;
    the last is the token, those before it the path. rule: "token" sum_i sum_x prod min(p, q); "block" sum_i E_q[w_i],
    w_i = min(1, w_{i-1} p_i/q_i) (2403.10444, section 4); "ideal" sum_i (1 - TV of the laws of the first i tokens),
    which no verifier of one path exceeds.
    """
    if rule not in ("token", "block", "ideal"):
        raise InvalidRequest(f"rule must be 'token', 'block' or 'ideal', got {rule!r}")
    kept = drafted = target = torch.ones((), dtype=torch.float64)  # by path: W_i = w_i prod q, prod q, prod p
    total = torch.zeros((), dtype=torch.float64)
    for p_row, q_row in zip(map(law, p), map(law, q), strict=True):
        before, drafted, target = kept[..., None], drafted[..., None] * q_row, target[..., None] * p_row
        if rule == "token":
            kept = before * torch.minimum(p_row, q_row)
        elif rule == "block":  # w_i prod q = min(prod_{j<=i} q, w_{i-1} prod_{j<i} q * p_i)
            kept = torch.minimum(drafted, before * p_row)
        else:
            kept = torch.minimum(drafted, target)
        total = total + kept.sum()
    return total


def block_weights(ratios: Tensor) -> Tensor:
    """w_1, w_2, ... [..., depth] from the ratios p/q of drafted tokens; the sum's mean is block's E[accepted].

    ratios: [..., depth], along continuations that the draft drew itself (2403.10444). For token rejection the mean of
    ``ratios.clamp(max=1).cumprod(-1).sum(-1)`` is the same thing, so logged ratios tell the gain of one over the other.
    """
    weights, w = [], torch.ones(ratios.shape[:-1], dtype=torch.float64, device=ratios.device)
    for ratio in ratios.double().unbind(-1):
        w = (w * ratio).clamp(max=1.0)
        weights.append(w)
    return torch.stack(weights, dim=-1)


def _both(p: Law, q: Law) -> tuple[Tensor, Tensor]:
    """As ``law``, with their leading dimensions in common."""
    one, other = torch.broadcast_tensors(law(p), law(q))
    return one, other


def _normalised(rows: Tensor) -> Tensor:
    """Each row over its sum; rows of zeros, which can draw nothing, stay."""
    sums = rows.sum(-1, keepdim=True)
    return torch.where(sums > 0, rows / sums, 0.0)


def _rest(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+); p itself where nothing is left, which is never reached."""
    rest = (p - q).clamp(min=0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, _normalised(rest), p)


def _each(rows: Tensor) -> Tensor:
    """A copy of each row for every token: [..., V, V]."""
    return rows.unsqueeze(-2).expand(*rows.shape, rows.shape[-1])


def _among(p: Tensor, q: Tensor, children: int) -> Tensor:
    """``coupled`` for one pair of rows [V] and several children."""
    t = torch.linspace(-3.6, 3.6, _NODES, dtype=p.dtype, device=p.device)
    s = torch.exp(0.5 * math.pi * t.sinh())
    weight = s * torch.exp(-s) * 0.5 * math.pi * t.cosh() * (t[1] - t[0])  # ds exp(-s)
    possible = (p > 0) & (q > 0)
    p_x, q_x = p[possible], q[possible]
    rates = (q[:, None] * (p_x / q_x) - p[:, None]).clamp(min=0.0)  # [V, x]
    state = torch.zeros(children, len(p_x), _NODES, dtype=p.dtype, device=p.device)  # chances of 0, 1, ... overtaking
    state[0] = 1.0
    for rate in rates[rates.sum(-1) > 0]:
        overtaken = -torch.expm1(-rate[:, None] * s)
        moved = state * overtaken
        state = state - moved
        state[1:] += moved[:-1]
    return (p_x[:, None] * state.sum(0) * weight).sum()

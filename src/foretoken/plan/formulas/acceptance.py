"""Acceptance of each verification rule, from the distributions: p of the target, q that the draft was sampled from.

Rows are torch or numpy, [..., V], with broadcastable leading dimensions. Results are float64 tensors [...]: the
probability that at least one of a node's children is accepted. One-hot rows give temperature 0.
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

Rows = Tensor | NDArray[np.floating[Any]]

_TOLERANCE = 1e-2  # largest deviation from 1 of the sum of a row in half precision
_MAX_BRANCHES = 1 << 24  # largest number of values held at once when sampled siblings are enumerated
_QUADRATURE_NODES = 128  # nodes of the quadrature over the winner's waiting time


def normalized(rows: Rows) -> Tensor:
    """Returns ``rows`` [..., V] in float64, each divided by its sum. Raises InvalidRequest unless rows sum to 1."""
    probs = torch.as_tensor(rows).double()
    sums = probs.sum(-1, keepdim=True)
    if probs.ndim == 0 or not bool(((probs >= 0).all(-1, keepdim=True) & ((sums - 1).abs() < _TOLERANCE)).all()):
        raise InvalidRequest(
            "rows must be probabilities, none negative and each row summing to 1: softmax logits first"
        )
    return probs / sums


def total_variation(p: Rows, q: Rows) -> Tensor:
    """Total variation, sum |p - q| / 2. Equals D_LK = sum |p - (p+q)/2| (2211.17192, definition 3.2)."""
    return 0.5 * (normalized(p) - normalized(q)).abs().sum(-1)


def token(p: Rows, q: Rows) -> Tensor:
    """Token rejection of one sampled token: sum min(p, q) = 1 - TV (2211.17192, theorem 3.5), the optimum."""
    return torch.minimum(normalized(p), normalized(q)).sum(-1)


def walk(p: Rows, candidates: Tensor) -> Tensor:
    """Fixed candidates [..., k]: the probability under p of the distinct ones.

    Over a tree, E[accepted] is the sum of path probabilities. The draft's argmax as the only candidate is greedy
    drafting.
    """
    rows = normalized(p)
    marked = torch.zeros_like(rows).scatter(-1, candidates.expand(*rows.shape[:-1], candidates.shape[-1]), 1.0)
    return (rows * marked).sum(-1)


def coupled(p: Rows, q: Rows, children: int = 1) -> Tensor:
    """Coupled verification: the target's argmax(log p + G) is among the top ``children`` of log q + G (2408.07978).

    One child: sum_x 1 / sum_y max(p_y/p_x, q_y/q_x), in O(V log V). Several: let x win p's exponential race at time s.
    In q's race each y overtakes it independently with probability 1 - exp(-s (q_y p_x/q_x - p_y)+), and x is among the
    top if fewer than ``children`` do. The integral over s is a double-exponential quadrature, in O(V^2 children), so
    for small vocabularies.
    """
    integer("children", children, 1)
    p, q = _both(p, q)
    if children > 1:
        pairs = zip(p.reshape(-1, p.shape[-1]), q.reshape(-1, q.shape[-1]), strict=True)
        return torch.stack([_coupled_children(*pair, children) for pair in pairs]).reshape(p.shape[:-1])
    # max(p_y/p_x, q_y/q_x) is p_y/p_x where p_y/q_y > p_x/q_x, else q_y/q_x: cumulative sums in the order of p/q.
    order = torch.where(p > 0, p / q, 0.0).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    below = (q.flip(-1).cumsum(-1).flip(-1) - q).clamp(min=0.0)
    matched = p * q / (q * p.cumsum(-1) + p * below)
    return torch.where((p > 0) & (q > 0), matched, 0.0).sum(-1)


def recursive(p: Rows, q: Rows, siblings: int, replace: bool = False) -> Tensor:
    """Recursive rejection over sampled siblings, i.i.d. (2305.09781) or without replacement (2402.12374).

    After a rejection p <- norm((p - q)+), and without replacement q[x] <- 0, renormalized. One level of traversal
    verification accepts the same. Without replacement q depends on the earlier siblings, so all V^(siblings - 1)
    branches are enumerated: for small vocabularies. Raises InvalidRequest for too many of them.
    """
    integer("siblings", siblings, 1)
    p, q = _both(p, q)
    p, q = p.unsqueeze(-2), q.unsqueeze(-2)  # [..., branches, V]
    if not replace and q.numel() * q.shape[-1] ** (siblings - 1) > _MAX_BRANCHES:
        raise InvalidRequest(
            f"{siblings} siblings without replacement over {q.shape[-1]} tokens are too many branches to enumerate: "
            "ask for fewer siblings, for one row at a time, or count what real steps accept"
        )
    accepted = torch.zeros(p.shape[:-2], dtype=p.dtype, device=p.device)
    weight = torch.ones(p.shape[:-1], dtype=p.dtype, device=p.device)
    for left in range(siblings - 1, -1, -1):
        overlap = torch.minimum(p, q).sum(-1)
        accepted = accepted + (weight * overlap).sum(-1)
        if left and replace:
            weight, p = weight * (1.0 - overlap), _residual(p, q)
        elif left:
            weight = (weight.unsqueeze(-1) * (q - p).clamp(min=0.0)).flatten(-2)
            others = ~torch.eye(q.shape[-1], dtype=torch.bool, device=q.device)
            p, q = _per_token(_residual(p, q)), _safely_normalized(_per_token(q) * others)
            p, q = p.flatten(-3, -2), q.flatten(-3, -2)
    return accepted


def greedy_multi(p: Rows, q: Rows, siblings: int) -> Tensor:
    """Greedy multi-draft: the top ``siblings`` - 1 tokens T of q and one sampled from q' = q outside T (2502.18779).

    p(T) + sum over the other tokens of min(p, q'): the optimal-transport bound, which the rule attains.
    """
    integer("siblings", siblings, 1, normalized(q).shape[-1])
    p, q = _both(p, q)
    fixed = torch.zeros_like(q, dtype=torch.bool).scatter(-1, q.topk(siblings - 1, dim=-1).indices, True)
    drawn = _safely_normalized(q.masked_fill(fixed, 0.0))
    return torch.where(fixed, p, torch.minimum(p, drawn)).sum(-1)


def lenient(p: Rows, q: Rows, lenience: float) -> Tensor:
    """LOSSY. Accepts x with probability min(1, p / (l q)), 0 < l <= 1: sum min(p/l, q) (2211.17192, appendix A.5).

    The output does not have the target's distribution unless l = 1, which is token rejection.
    """
    number("lenience", lenience, math.ulp(0.0), 1.0)
    return torch.minimum(normalized(p) / lenience, normalized(q)).sum(-1)


def typical(p: Rows, q: Rows, epsilon: float = EPSILON, delta: float = DELTA) -> Tensor:
    """LOSSY. q of the tokens with p > min(epsilon, delta exp(-H(p))) (Medusa, 2401.10774, section 2.3.1)."""
    p, q = _both(p, q)
    threshold = (delta * torch.exp(-torch.special.entr(p).sum(-1, keepdim=True))).clamp(max=epsilon)
    return torch.where(p > threshold, q, 0.0).sum(-1)


def chain(p: Sequence[Rows], q: Sequence[Rows], rule: str = "block") -> Tensor:
    """E[accepted] of a chain for distributions that depend on the earlier tokens, by enumerating all paths.

    Args:
        p: The target's rows at depths 1, 2, ...: [V, ..., V] with one dimension per depth, or fewer where earlier
            tokens do not matter. The last dimension is the token, those before it the path.
        q: The draft's rows, likewise.
        rule: "token": sum_i sum_x prod min(p, q). "block": sum_i E_q[w_i] with w_i = min(1, w_{i-1} p_i/q_i)
            (2403.10444, section 4). "ideal": sum_i (1 - TV of the distributions of the first i tokens), the maximum
            over all verifiers of one path.
    """
    if rule not in ("token", "block", "ideal"):
        raise InvalidRequest(f"rule must be 'token', 'block' or 'ideal', got {rule!r}")
    kept = drafted = target = torch.ones((), dtype=torch.float64)  # per path: w_i prod q, prod q, prod p
    total = torch.zeros((), dtype=torch.float64)
    for p_row, q_row in zip(map(normalized, p), map(normalized, q), strict=True):
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
    """Weights w_1, w_2, ... of block verification (2403.10444), [..., depth]. The mean of their sum is E[accepted].

    For token rejection the mean of ``ratios.clamp(max=1).cumprod(-1).sum(-1)`` is E[accepted], so logged ratios compare
    the two rules. ratios: p/q of draft tokens, [..., depth], along continuations that the draft sampled itself.
    """
    weights, w = [], torch.ones(ratios.shape[:-1], dtype=torch.float64, device=ratios.device)
    for ratio in ratios.double().unbind(-1):
        w = (w * ratio).clamp(max=1.0)
        weights.append(w)
    return torch.stack(weights, dim=-1)


def _both(p: Rows, q: Rows) -> tuple[Tensor, Tensor]:
    """Normalizes both and broadcasts their leading dimensions."""
    one, other = torch.broadcast_tensors(normalized(p), normalized(q))
    return one, other


def _safely_normalized(rows: Tensor) -> Tensor:
    """Divides each row by its sum. Rows of zeros, from which nothing can be sampled, stay."""
    sums = rows.sum(-1, keepdim=True)
    return torch.where(sums > 0, rows / sums, 0.0)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+). Where p = q, so that nothing is ever rejected, p."""
    residual = (p - q).clamp(min=0.0)
    return torch.where(residual.sum(-1, keepdim=True) > 0, _safely_normalized(residual), p)


def _per_token(rows: Tensor) -> Tensor:
    """Repeats each row for every token: [..., V, V]."""
    return rows.unsqueeze(-2).expand(*rows.shape, rows.shape[-1])


def _coupled_children(p: Tensor, q: Tensor, children: int) -> Tensor:
    """``coupled`` for one pair of rows [V] and several children."""
    t = torch.linspace(-3.6, 3.6, _QUADRATURE_NODES, dtype=p.dtype, device=p.device)
    s = torch.exp(0.5 * math.pi * t.sinh())
    weight = s * torch.exp(-s) * 0.5 * math.pi * t.cosh() * (t[1] - t[0])  # ds exp(-s)
    possible = (p > 0) & (q > 0)
    p_x, q_x = p[possible], q[possible]
    rates = (q[:, None] * (p_x / q_x) - p[:, None]).clamp(min=0.0)  # [V, x]
    # state[i]: probability that i tokens have overtaken x by time s
    state = torch.zeros(children, len(p_x), _QUADRATURE_NODES, dtype=p.dtype, device=p.device)
    state[0] = 1.0
    for rate in rates[rates.sum(-1) > 0]:
        overtaken = -torch.expm1(-rate[:, None] * s)
        moved = state * overtaken
        state = state - moved
        state[1:] += moved[:-1]
    return (p_x[:, None] * state.sum(0) * weight).sum()

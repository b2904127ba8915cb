"""Tokens per step and speedup: the formulas of the papers, and their forms for acceptance that varies.

A step drafts ``depth`` tokens (the papers' gamma) and verifies them in one target pass. It emits N tokens: the accepted
ones and the recovered or bonus token, so 1 <= N <= depth + 1 and N - 1 draft tokens are accepted. A *chance* is the
conditional acceptance rate of a position, given that those before it were accepted; alpha is a chance that is the same
everywhere. *Survival* S_k is the probability that at least k draft tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from foretoken.core.checks import integer, number
from foretoken.core.errors import InvalidRequest
from foretoken.core.positions import PositionCounts

Curve = Callable[[int], float]
"""Time of one target pass by its rows, in any unit. A pass has one row more than draft tokens."""


def flat(rows: int) -> float:
    """A pass whose cost does not depend on its rows: the papers' assumption, and true while memory-bound."""
    return 1.0


def tokens_per_pass(alpha: float, depth: int) -> float:
    """E[N] = (1 - alpha^(depth+1)) / (1 - alpha), the bonus or recovered token included (2211.17192, equation 1)."""
    return expected_tokens(_same(alpha, depth))


def tokens_variance(alpha: float, depth: int) -> float:
    """Var[N] = [a - (2g+1) a^(g+1) (1-a) - a^(2g+2)] / (1-a)^2 for a = alpha, g = depth (N is a capped geometric).

    Computed by sums, which lose no digits near alpha = 1.
    """
    return variance(_same(alpha, depth))


def survival(chances: Sequence[float]) -> list[float]:
    """Returns S_1, S_2, ...: the products of the first 1, 2, ... ``chances``."""
    for position, chance in enumerate(chances, 1):
        number(f"the chance of position {position}", chance, 0.0, 1.0)
    return list(accumulate(chances, mul))


def expected_tokens(chances: Sequence[float]) -> float:
    """E[N] = 1 + sum_k prod_{j<=k} a_j for chances a_1, a_2, ... that differ by position."""
    return 1.0 + sum(survival(chances))


def variance(chances: Sequence[float]) -> float:
    """Var[N] = sum_k (2k+1) S_k - E[N]^2, k from 0 and S_0 = 1."""
    reach = [1.0, *survival(chances)]
    return max(0.0, sum((2 * k + 1) * s for k, s in enumerate(reach)) - sum(reach) ** 2)


def speedup(tokens: float, depth: int, draft_cost: float, curve: Curve = flat) -> float:
    """S = E[N] / (depth c + T(depth+1) / T(1)), over plain decoding (2211.17192, theorem 3.8, where T is flat).

    Throughput is E[N] / E[T]. For steps of varying length use means here, never ratios of single steps.

    Args:
        tokens: E[N].
        depth: Draft length.
        draft_cost: c, the time of a draft pass over that of a target pass of one row.
        curve: T.
    """
    number("tokens", tokens, 0.0)
    integer("depth", depth, 0)
    number("draft_cost", draft_cost, 0.0)
    single, verified = curve(1), curve(depth + 1)
    if not single > 0.0 or not verified > 0.0:
        raise InvalidRequest(f"passes of 1 and {depth + 1} rows must take positive time, got {single} and {verified}")
    return tokens / (depth * draft_cost + verified / single)


def min_speedup(alpha: float, draft_cost: float) -> float:
    """Lower bound on the best depth's speedup: (1 + alpha) / (1 + c) if alpha > c, else 1 (2211.17192, corollary 3.9).

    Under a flat curve no depth helps where alpha <= c.
    """
    number("alpha", alpha, 0.0, 1.0)
    number("draft_cost", draft_cost, 0.0)
    return (1.0 + alpha) / (1.0 + draft_cost) if alpha > draft_cost else 1.0


def operations(alpha: float, depth: int, draft_operations: float = 0.0) -> float:
    """Operations over plain decoding's: (1 - a)(g c + g + 1) / (1 - a^(g+1)) (2211.17192, theorem 3.11).

    a is ``alpha``, g ``depth``, and c ``draft_operations``, the draft's operations per token over the target's.
    """
    number("draft_operations", draft_operations, 0.0)
    return (depth * draft_operations + depth + 1) / tokens_per_pass(alpha, depth)


@dataclass(frozen=True, slots=True)
class Depth:
    """A draft length, 0 for plain decoding, with E[N] and the speedup over plain decoding."""

    depth: int
    tokens: float
    speedup: float


def depths(chances: Sequence[float], draft_cost: float, curve: Curve = flat) -> list[Depth]:
    """Returns every depth from 0 to ``len(chances)``. draft_cost, curve: see ``speedup``.

    chances: by position, ``[alpha] * limit`` where all are the same.
    """
    tokens = [expected_tokens(chances[:depth]) for depth in range(len(chances) + 1)]
    return [Depth(depth, mean, speedup(mean, depth, draft_cost, curve)) for depth, mean in enumerate(tokens)]


def best_depth(chances: Sequence[float], draft_cost: float, curve: Curve = flat) -> Depth:
    """Returns the fastest depth, the shallowest of equals. All are checked, because measured curves are jagged."""
    return max(depths(chances, draft_cost, curve), key=lambda depth: depth.speedup)


def conditional_acceptance(accepted: Sequence[int], drafted: Sequence[int]) -> float | None:
    """Estimates alpha as accepted tokens / (accepted tokens + rejections).

    A step rejects once at most: tokens after a rejection are not verified. accepted / drafted would count them as
    rejected, and falls with the depth for the same alpha. None if no token was verified. Arguments: one per step.
    """
    verified = sum(min(length, kept + 1) for kept, length in _steps(accepted, drafted))
    return sum(accepted) / verified if verified else None


def acceptance_by_position(accepted: Sequence[int], drafted: Sequence[int]) -> list[float | None]:
    """Returns the chances a_1, a_2, ...: of the steps that verified position k, the fraction that accepted it.

    One per position of the longest draft, None if no step verified it. Arguments: one per step.
    """
    counts = PositionCounts()
    for kept, length in _steps(accepted, drafted):
        counts.add(min(length, kept + 1), kept)
    return [*counts.rates, *[None] * (max(drafted, default=0) - len(counts.rates))]


def text_survival(p: Tensor, q: Tensor, depth: int, block: bool = False) -> Tensor:
    """Returns S_k of a sampled chain for steps that begin at each token of a text that the target sampled.

    Entry (t, k-1) is the probability, given the text, that a step beginning at t accepts at least k tokens. Token
    rejection: prod_j min(1, q_j/p_j). Block verification: w_k prod_j q_j/p_j with w_k = min(1, w_{k-1} p_k/q_k). Its
    mean over texts is the probability itself, for acceptance that varies and is correlated. 0 beyond the text's end.

    Args:
        p: The target's probabilities of the text's tokens, [n].
        q: The draft's, [n].
        depth: Draft length.
        block: Block verification instead of token rejection.

    Returns:
        [n, depth] in float64.
    """
    integer("depth", depth, 1)
    p, q = (torch.as_tensor(chance).double() for chance in (p, q))
    if p.ndim != 1 or p.shape != q.shape:
        raise InvalidRequest(f"p and q must be one probability a token, [n], got {tuple(p.shape)} and {tuple(q.shape)}")
    end = p.new_zeros(depth)
    share = torch.cat([torch.where(p > 0, q / p, 0.0), end])[: len(p) + depth - 1].unfold(0, depth, 1)  # [n, depth]
    if not block:
        return share.clamp(max=1.0).cumprod(-1)
    # With Q_k = prod_{j<=k} q_j/p_j, w_k Q_k = min(Q_k, w_{k-1} Q_{k-1}), the minimum of 1, Q_1, ..., Q_k.
    return share.log().cumsum(-1).clamp(max=0.0).exp().cummin(-1).values


def text_steps(reach: Tensor) -> float:
    """Returns the expected number of steps that emit a text of n tokens, given the text: sum_t pi_t.

    It is exact for this text. An average over all beginnings would weight them equally. reach: see ``step_starts``.
    """
    return float(step_starts(reach)[0].sum())


def step_starts(reach: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the probability pi_t that a step begins at each token, [n], and P(N = 1), P(N = 2), ..., [n, depth + 1].

    A step that begins at t is followed by one at t + N: pi_0 = 1 and pi_{t+m} += pi_t (S_{m-1} - S_m).

    Args:
        reach: Survival of a step that begins at each token, [n, depth], from ``text_survival``.
    """
    length, depth = reach.shape
    one, zero = reach.new_ones(length, 1), reach.new_zeros(length, 1)
    lengths = -torch.cat([one, reach, zero], dim=1).diff(dim=1)
    begins = reach.new_zeros(length + depth + 1)
    begins[0] = 1.0
    for t in range(length):
        begins[t + 1 : t + depth + 2] += begins[t] * lengths[t]
    return begins[:length], lengths


def _same(alpha: float, depth: int) -> list[float]:
    number("alpha", alpha, 0.0, 1.0)
    integer("depth", depth, 0)
    return [alpha] * depth


def _steps(accepted: Sequence[int], drafted: Sequence[int]) -> list[tuple[int, int]]:
    if len(accepted) != len(drafted):
        raise InvalidRequest(f"one count each for every step is needed, got {len(accepted)} and {len(drafted)}")
    steps = list(zip(accepted, drafted, strict=True))
    for kept, length in steps:
        if not 0 <= kept <= length:
            raise InvalidRequest(f"a step cannot accept {kept} of {length} drafted tokens")
    return steps

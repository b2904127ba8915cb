"""What a round yields and what it costs: the formulas of the papers, and their forms for acceptance that varies.

A round drafts ``depth`` tokens, the papers' gamma, and verifies them in one target pass. N is what it emits: the
accepted tokens and the one that the target always adds, so 1 <= N <= depth + 1 and accepted drafts are N - 1. A
*chance* is the conditional acceptance of a position, those before it having been accepted; alpha is a chance that is
the same everywhere. *Survival* S_k is the chance that at least k drafts are accepted.
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

Curve = Callable[[int], float]
"""The time of one target pass by its rows, which are one more than the drafted tokens; any unit."""


def flat(rows: int) -> float:
    """A pass that costs the same whatever its rows: the papers' assumption, and memory-bound hardware's promise."""
    return 1.0


def tokens_per_pass(alpha: float, depth: int) -> float:
    """E[N] = (1 - alpha^(depth+1)) / (1 - alpha), the bonus or correction included (2211.17192, equation 1)."""
    return expected_tokens(_same(alpha, depth))


def tokens_variance(alpha: float, depth: int) -> float:
    """Var[N] = [a - (2g+1) a^(g+1) (1-a) - a^(2g+2)] / (1-a)^2 for a = alpha and g = depth: N is a capped geometric.

    Computed by sums, which lose no digits near alpha = 1.
    """
    return variance(_same(alpha, depth))


def survival(chances: Sequence[float]) -> list[float]:
    """S_1, S_2, ... = the products of the first 1, 2, ... ``chances``."""
    for position, chance in enumerate(chances, 1):
        number(f"the chance of position {position}", chance, 0.0, 1.0)
    return list(accumulate(chances, mul))


def expected_tokens(chances: Sequence[float]) -> float:
    """E[N] = 1 + sum_k prod_{j<=k} a_j for conditional chances a_1, a_2, ... that differ by position."""
    return 1.0 + sum(survival(chances))


def variance(chances: Sequence[float]) -> float:
    """Var[N] = sum_k (2k+1) S_k - E[N]^2, k from 0 and S_0 = 1."""
    reach = [1.0, *survival(chances)]
    return max(0.0, sum((2 * k + 1) * s for k, s in enumerate(reach)) - sum(reach) ** 2)


def speed_up(tokens: float, depth: int, draft_cost: float, curve: Curve = flat) -> float:
    """S = E[N] / (depth c + T(depth+1) / T(1)), over plain decoding (2211.17192, theorem 3.8, where T is flat).

    tokens: E[N]. draft_cost: c, a step of the draft over a target pass of one row. Throughput is E[N] / E[T], so that
    for rounds of varying length means go in here, never ratios of single rounds.
    """
    number("tokens", tokens, 0.0)
    integer("depth", depth, 0)
    number("draft_cost", draft_cost, 0.0)
    single, verified = curve(1), curve(depth + 1)
    if not single > 0.0 or not verified > 0.0:
        raise InvalidRequest(f"passes of 1 and {depth + 1} rows must take positive time, got {single} and {verified}")
    return tokens / (depth * draft_cost + verified / single)


def least_speed_up(alpha: float, draft_cost: float) -> float:
    """What the best depth gains at least: (1 + alpha) / (1 + c) if alpha > c, else 1: do not draft.

    2211.17192, corollary 3.9. Under a flat curve no depth at all helps where alpha <= c.
    """
    number("alpha", alpha, 0.0, 1.0)
    number("draft_cost", draft_cost, 0.0)
    return (1.0 + alpha) / (1.0 + draft_cost) if alpha > draft_cost else 1.0


def operations(alpha: float, depth: int, draft_operations: float = 0.0) -> float:
    """Arithmetic over plain decoding's: (1 - a)(g c + g + 1) / (1 - a^(g+1)) (2211.17192, theorem 3.11).

    draft_operations: the draft's operations for a token over the target's.
    """
    number("draft_operations", draft_operations, 0.0)
    return (depth * draft_operations + depth + 1) / tokens_per_pass(alpha, depth)


@dataclass(frozen=True, slots=True)
class Depth:
    """A number of tokens to draft, 0 for plain decoding, with what it yields: E[N], and the speed-up over plain."""

    depth: int
    tokens: float
    speed_up: float


def depths(chances: Sequence[float], draft_cost: float, curve: Curve = flat) -> list[Depth]:
    """Every depth from 0 to ``len(chances)``. chances: by position; ``[alpha] * limit`` where all are the same."""
    found = []
    for depth in range(len(chances) + 1):
        tokens = expected_tokens(chances[:depth])
        found.append(Depth(depth, tokens, speed_up(tokens, depth, draft_cost, curve)))
    return found


def best_depth(chances: Sequence[float], draft_cost: float, curve: Curve = flat) -> Depth:
    """The fastest of all depths, the least among equals. Every one is checked, as measured curves are jagged."""
    return max(depths(chances, draft_cost, curve), key=lambda found: found.speed_up)


def conditional_acceptance(accepted: Sequence[int], drafted: Sequence[int]) -> float | None:
    """alpha, estimated as accepted tokens / (accepted tokens + rejections), one count for each round.

    A round rejects once at most: what follows a rejection was never judged. accepted / drafted would count it as
    rejected, and falls with the depth for the same alpha. None where nothing was judged.
    """
    total, rejections = sum(accepted), 0
    for kept, length in _rounds(accepted, drafted):
        rejections += kept < length
    return total / (total + rejections) if total + rejections else None


def acceptance_by_position(accepted: Sequence[int], drafted: Sequence[int]) -> list[float | None]:
    """Conditional acceptance a_1, a_2, ...: of the rounds that judged position k, those that accepted it.

    None where no round did.
    """
    counted = list(_rounds(accepted, drafted))
    found: list[float | None] = []
    for position in range(1, max(drafted, default=0) + 1):
        judged = [kept >= position for kept, length in counted if length >= position and kept >= position - 1]
        found.append(sum(judged) / len(judged) if judged else None)
    return found


def text_survival(p: Tensor, q: Tensor, depth: int, block: bool = False) -> Tensor:
    """S_k of a drawn chain for rounds that begin at every token of a text which the target wrote: [n, depth].

    p, q: [n], the probabilities that target and draft gave to the text's own tokens. Entry (t, k-1) is the chance,
    given the text, that a round which begins at t accepts at least k tokens: by token rejection prod_j min(1, q_j/p_j);
    by block verification w_k prod_j q_j/p_j, w_k = min(1, w_{k-1} p_k/q_k). Its mean over texts is the chance itself,
    so acceptance need be neither the same everywhere nor independent. 0 where the text ends.
    """
    integer("depth", depth, 1)
    p, q = (torch.as_tensor(chance).double() for chance in (p, q))
    if p.ndim != 1 or p.shape != q.shape:
        raise InvalidRequest(f"p and q must be one probability a token, [n], got {tuple(p.shape)} and {tuple(q.shape)}")
    end = p.new_zeros(depth)
    share = torch.cat([torch.where(p > 0, q / p, 0.0), end])[: len(p) + depth - 1].unfold(0, depth, 1)  # [n, depth]
    if not block:
        return share.clamp(max=1.0).cumprod(-1)
    # With Q_k = prod_{j<=k} q_j/p_j, w_k Q_k = min(Q_k, w_{k-1} Q_{k-1}): the least of 1, Q_1, ..., Q_k.
    return share.log().cumsum(-1).clamp(max=0.0).exp().cummin(-1).values


def text_rounds(reach: Tensor) -> float:
    """E[rounds] that emit a text of n tokens, given the text: tokens per pass are n over it.

    reach: [n, depth], the survival of a round that begins at each token, as ``text_survival`` gives it. A round begins
    at t + N after one at t, so with pi_0 = 1 and pi_{t+m} += pi_t (S_{m-1} - S_m) the answer is sum_t pi_t. It is exact
    for this text, where an average over all beginnings would weigh them alike.
    """
    length, depth = reach.shape
    one, zero = reach.new_ones(length, 1), reach.new_zeros(length, 1)
    law = -torch.cat([one, reach, zero], dim=1).diff(dim=1)  # [n, depth + 1]: column m is the chance of N = m + 1
    begins = reach.new_zeros(length + depth + 1)
    begins[0] = 1.0
    for t in range(length):
        begins[t + 1 : t + depth + 2] += begins[t] * law[t]
    return float(begins[:length].sum())


def _same(alpha: float, depth: int) -> list[float]:
    number("alpha", alpha, 0.0, 1.0)
    integer("depth", depth, 0)
    return [alpha] * depth


def _rounds(accepted: Sequence[int], drafted: Sequence[int]) -> list[tuple[int, int]]:
    if len(accepted) != len(drafted):
        raise InvalidRequest(f"one count each for every round is needed, got {len(accepted)} and {len(drafted)}")
    for kept, length in zip(accepted, drafted, strict=True):
        if not 0 <= kept <= length:
            raise InvalidRequest(f"a round cannot accept {kept} of {length} drafted tokens")
    return list(zip(accepted, drafted, strict=True))

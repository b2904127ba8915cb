"""Loss and evaluation of heads: the target's distribution at every depth of a chain."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.train.lessons import Drafted, Head, Lesson, Lessons

_FLOOR = 1e-6


def head_loss(head: Head, lesson: Lesson, discount: float, acceptance: Tensor) -> Tensor:
    """Returns the loss of a head on the distribution of its target; see ``drafted_loss``."""
    law = known_columns(lesson.law(), head)
    return drafted_loss(head.drafted(lesson), law, discount, acceptance)


def drafted_loss(drafted: Drafted, law: Tensor, discount: float, acceptance: Tensor) -> Tensor:
    """Returns sum_j discount^j [(1 - acceptance) CE(p, q_j) - acceptance log sum min(p, q_j)], mean over positions.

    A head's estimates of its acceptance add their cross-entropy with sum min(p, q_j).

    Args:
        drafted: Output of the head.
        law: The target's probabilities of the tokens in the head's vocabulary, [B, T, Vd]. A position with little
            probability there counts less.
        discount: Factor per depth.
        acceptance: Weight of the acceptance loss, a scalar tensor from 0 to 1.
    """
    total = torch.zeros((), device=law.device)
    for depth, rows in enumerate(drafted.logits):
        loss, overlap = depth_loss(rows, _rows(law, depth, drafted), acceptance)
        total = total + discount**depth * loss
        if drafted.confidence is not None:
            estimate = drafted.confidence[depth].float()
            total = total + discount**depth * F.binary_cross_entropy_with_logits(
                estimate, overlap.detach().clamp(max=1.0)
            )
    return total


def depth_loss(logits: Tensor, p: Tensor, acceptance: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the loss at one depth, and sum min(p, q) of every row; see ``drafted_loss``."""
    log_q = logits.float().log_softmax(-1)
    entropy = -(p * log_q).sum(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1).clamp_min(_FLOOR)
    return ((1 - acceptance) * entropy - acceptance * overlap.log()).mean(), overlap


def _rows(law: Tensor, depth: int, drafted: Drafted) -> Tensor:
    """Returns the distributions [B, R, V] of the tokens at ``depth``, from those of all rows [B, T, V]."""
    if drafted.roots is None:
        return law[:, 1 + depth : 1 + depth + drafted.logits[depth].shape[1]]
    return law[:, drafted.roots[depth] + 1 + depth]


def known_columns(law: Tensor, head: Head) -> Tensor:
    """Returns the columns of ``law`` [..., V] that are in the head's vocabulary."""
    return law if head.vocabulary is None else law[..., head.vocabulary.to(law.device)]


@torch.no_grad()
def chain_acceptance(head: Head, lessons: Lessons, greedy: bool, skip: int) -> list[float]:
    """Returns the probabilities that the first 1, 2, ... tokens of a chain are all accepted, along the target's text.

    Args:
        head: The head.
        lessons: Text that the target sampled.
        greedy: Temperature 0: the share of chains whose argmaxes all equal the target's. Otherwise the product of
            sum min(p, q) for heads that sample, or of the target's p at the argmax for heads that do not.
        skip: Positions to skip at the beginning of each window.

    Returns:
        One probability per depth, means over positions.
    """
    sums, count = torch.zeros(head.depths, dtype=torch.float64), 0
    for lesson in lessons.in_order():
        accepted = _acceptance(head, lesson, greedy, skip)
        sums += accepted.cumprod(-1).sum((0, 1)).double().cpu()
        count += accepted.shape[0] * accepted.shape[1]
    return [value / max(count, 1) for value in sums.tolist()]


def _acceptance(head: Head, lesson: Lesson, greedy: bool, skip: int) -> Tensor:
    """Returns the acceptance at each depth given the depths above, [B, roots, depths], from row ``skip`` on."""
    with torch.autocast(lesson.ids.device.type, torch.bfloat16):
        drafted = head.drafted(lesson)
        law = lesson.law()
    own, columns = known_columns(law, head), []
    for depth, logits in enumerate(drafted.logits):
        best = logits.argmax(-1)
        if greedy:
            ids = best if head.vocabulary is None else head.vocabulary.to(best.device)[best]
            columns.append((ids == _rows(law, depth, drafted).argmax(-1)).float())
        elif head.drawn:
            columns.append(torch.minimum(_rows(own, depth, drafted), logits.float().softmax(-1)).sum(-1))
        else:
            columns.append(_rows(own, depth, drafted).gather(-1, best[..., None])[..., 0])
    first = skip if drafted.roots is None else int((drafted.roots[0] < skip).sum())
    return torch.stack(columns, dim=-1)[:, first:]


def figures(greedy: list[float], drawn: list[float]) -> dict[str, float]:
    """Returns expected acceptance lengths (tokens per target pass) at temperatures 0 and 1, and acceptance by position.

    ``greedy_k`` and ``drawn_k`` are the acceptance of position k given that all before it were accepted.
    """
    result = {"length_greedy": 1 + sum(greedy), "length_drawn": 1 + sum(drawn)}
    for name, chances in (("greedy", greedy), ("drawn", drawn)):
        for k, chance in enumerate(chances):
            before = chances[k - 1] if k else 1.0
            result[f"{name}_{k + 1}"] = chance / before if before > 0 else 0.0
    return result

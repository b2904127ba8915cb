"""What a head is asked for, and how it is judged: the target's law at every depth of a chain."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.train.lessons import Head, Lesson, Lessons

_FLOOR = 1e-6


def head_loss(logits: list[Tensor], law: Tensor, discount: float, acceptance: Tensor) -> Tensor:
    """sum_j discount^j [(1 - acceptance) CE(p, q_j) - acceptance log sum min(p, q_j)], means over positions.

    logits: as ``Head.forward`` gives them. law [B, T, Vd]: the target's probabilities of the tokens that the head
    knows, so that a position whose mass lies elsewhere teaches less. ``acceptance`` a scalar tensor, 0 to 1.
    """
    total = torch.zeros((), device=law.device)
    for depth, guess in enumerate(logits):
        p = law[:, 1 + depth : 1 + depth + guess.shape[1]]
        log_q = guess.float().log_softmax(-1)
        entropy = -(p * log_q).sum(-1)
        overlap = torch.minimum(p, log_q.exp()).sum(-1).clamp_min(_FLOOR)
        total = total + discount**depth * ((1 - acceptance) * entropy - acceptance * overlap.log()).mean()
    return total


def known(law: Tensor, head: Head) -> Tensor:
    """The columns of ``law`` [..., V] that the head has a logit for."""
    return law if head.vocabulary is None else law[..., head.vocabulary.to(law.device)]


@torch.no_grad()
def chain_acceptance(head: Head, lessons: Lessons, greedy: bool, skip: int) -> list[float]:
    """Chances that the first 1, 2, ... guesses of a chain all stand, means over roots from position ``skip`` on.

    Along text that the target wrote itself. Greedy: the share of chains whose argmaxes are all the target's, which
    is what decoding at temperature 0 meets. Otherwise the product of sum min(p, q) for guesses that are drawn in
    turn, of the target's p at the argmax for guesses that are fixed.
    """
    sums, count = torch.zeros(head.depths, dtype=torch.float64), 0
    for lesson in lessons.in_order():
        stands = _stands(head, lesson, greedy)[:, skip:]
        sums += stands.cumprod(-1).sum((0, 1)).double().cpu()
        count += stands.shape[0] * stands.shape[1]
    return [value / max(count, 1) for value in sums.tolist()]


def _stands(head: Head, lesson: Lesson, greedy: bool) -> Tensor:
    """[B, roots, depths]: the chance that each guess stands if those above it do."""
    with torch.autocast(lesson.ids.device.type, torch.bfloat16):
        logits = head(lesson)
        law = lesson.law()
    own, columns = known(law, head), []
    for depth, guess in enumerate(logits):
        rows = slice(1 + depth, 1 + depth + guess.shape[1])
        best = guess.argmax(-1)
        if greedy:
            ids = best if head.vocabulary is None else head.vocabulary.to(best.device)[best]
            columns.append((ids == law[:, rows].argmax(-1)).float())
        elif head.drawn:
            columns.append(torch.minimum(own[:, rows], guess.float().softmax(-1)).sum(-1))
        else:
            columns.append(own[:, rows].gather(-1, best[..., None])[..., 0])
    return torch.stack(columns, dim=-1)


def figures(greedy: list[float], drawn: list[float]) -> dict[str, float]:
    """Expected acceptance lengths (tokens per target pass) at temperatures 0 and 1, and acceptance by position.

    ``greedy_k``, ``drawn_k``: the chance that the k-th guess stands if all before it did.
    """
    found = {"length_greedy": 1 + sum(greedy), "length_drawn": 1 + sum(drawn)}
    for name, chances in (("greedy", greedy), ("drawn", drawn)):
        for k, chance in enumerate(chances):
            before = chances[k - 1] if k else 1.0
            found[f"{name}_{k + 1}"] = chance / before if before > 0 else 0.0
    return found

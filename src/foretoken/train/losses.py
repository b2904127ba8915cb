"""Losses of drafts and heads that are distilled from a target, and their evaluation.

All of them change from a divergence from the target's distribution p to -log sum_x min(p(x), q(x)), the negative log of
the probability that a token sampled from q is accepted. Drafts minimize the forward KL divergence (2310.08461), heads
the cross-entropy, whose gradient is the same.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.train.frozen_target import HiddenStateDataset, TrainBatch
from foretoken.train.head import Drafted, Head

_MIN_PROB = 1e-6
TopLogprobs = tuple[Tensor, Tensor]
"""Token ids and log-probabilities of the k most likely tokens, [B, T, k] each."""


def distillation_loss(
    logits: Tensor, target: Tensor | TopLogprobs, acceptance: Tensor, counted: Tensor | None = None
) -> Tensor:
    """Returns (1 - acceptance) KL(p||q) - acceptance log sum min(p, q), mean over positions.

    Args:
        logits: The draft's, [B, T, V].
        target: The target's logits, [B, T, V], or its most likely tokens. The others then count as one token, which
            bounds the KL from below and the overlap from above.
        acceptance: Weight of the acceptance loss, a scalar tensor from 0 to 1.
        counted: Mask of the positions that count, [B, T]. None counts all.
    """
    logits = logits.float()
    if isinstance(target, Tensor):
        log_p, log_q = target.float().log_softmax(-1), logits.log_softmax(-1)
    else:
        ids, log_p = target
        log_q = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
        log_p, log_q = _with_others(log_p), _with_others(log_q)
    p = log_p.exp()
    loss, _ = _acceptance_loss((p * (log_p - log_q)).sum(-1), p, log_q, acceptance)
    return loss.mean() if counted is None else (loss * counted).sum() / counted.sum()


def _with_others(log_probs: Tensor) -> Tensor:
    """Appends the probability of all tokens that are not listed, [..., k + 1]."""
    others = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp_min(_MIN_PROB).log()
    return torch.cat((log_probs, others), dim=-1)


def _acceptance_loss(divergence: Tensor, p: Tensor, log_q: Tensor, acceptance: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the loss of every row, and sum min(p, q) of every row."""
    overlap = torch.minimum(p, log_q.exp()).sum(-1).clamp_min(_MIN_PROB)
    return (1 - acceptance) * divergence - acceptance * overlap.log(), overlap


def acceptance_weight(progress: float, share: float) -> Tensor:
    """Returns the weight of the acceptance loss, a scalar: 0, then rising over a third of ``share``, then 1.

    ``share`` is the last fraction of the run, ``progress`` the finished one.
    """
    into = 0.0 if share <= 0 else (progress - (1 - share)) / (share / 3)
    return torch.tensor(min(1.0, max(0.0, into)))


def weighted_means(figures: Iterable[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Returns the means of figures of batches, by name, from the weight and the figures of each batch."""
    sums, total = dict[str, float](), 0
    for weight, batch in figures:
        total += weight
        for name, value in batch.items():
            sums[name] = sums.get(name, 0.0) + weight * value
    return {name: value / total for name, value in sums.items()}


def agreement(target_logits: Tensor, draft_logits: Tensor) -> dict[str, float]:
    """Returns "overlap" and "argmax_agreement" of logits [..., V]: the acceptance rates at temperatures 1 and 0.

    The overlap is sum_x min(p(x), q(x)) = 1 - TV(p, q) over the whole vocabulary. Both are means over positions.
    """
    p, q = target_logits.float().softmax(-1), draft_logits.float().softmax(-1)
    overlap = torch.minimum(p, q).sum(-1).mean().item()
    equal = (target_logits.argmax(-1) == draft_logits.argmax(-1)).float().mean().item()
    return {"overlap": overlap, "argmax_agreement": equal}


def head_loss(head: Head, batch: TrainBatch, discount: float, acceptance: Tensor) -> Tensor:
    """Returns sum_j discount^j [(1 - acceptance) CE(p, q_j) - acceptance log sum min(p, q_j)], mean over positions.

    p is the target's distribution over the head's vocabulary; a position with little probability there counts less.
    A head's estimates of its acceptance add their cross-entropy with sum min(p, q_j).
    """
    probs, drafted = draft_columns(batch.target_probs(), head), head(batch)
    total = torch.zeros((), device=probs.device)
    for depth, logits in enumerate(drafted.logits):
        p, log_q = _rows(probs, depth, drafted), logits.float().log_softmax(-1)
        loss, overlap = _acceptance_loss(-(p * log_q).sum(-1), p, log_q, acceptance)
        total = total + discount**depth * loss.mean()
        if drafted.confidence is not None:
            estimate, accepted = drafted.confidence[depth].float(), overlap.detach().clamp(max=1.0)
            total = total + discount**depth * F.binary_cross_entropy_with_logits(estimate, accepted)
    return total


def _rows(probs: Tensor, depth: int, drafted: Drafted) -> Tensor:
    """Returns the distributions [B, R, V] of the tokens at ``depth``, from those of all rows [B, T, V]."""
    if drafted.roots is None:
        return probs[:, 1 + depth : 1 + depth + drafted.logits[depth].shape[1]]
    return probs[:, drafted.roots[depth] + 1 + depth]


def draft_columns(probs: Tensor, head: Head) -> Tensor:
    """Returns the columns of ``probs`` [..., V] that are in the head's vocabulary."""
    return probs if head.vocabulary is None else probs[..., head.vocabulary.to(probs.device)]


@torch.no_grad()
def chain_acceptance(head: Head, dataset: HiddenStateDataset, greedy: bool, skip: int) -> list[float]:
    """Returns the probabilities that the first 1, 2, ... tokens of a chain are all accepted, along the target's text.

    They are means over positions, from ``skip`` on in each window. With ``greedy``, at temperature 0, the probability
    is the fraction of chains whose argmaxes all equal the target's. Otherwise it is the product of sum min(p, q) for
    heads that sample, or of the target's p at the argmax for heads that do not.
    """
    sums, count = torch.zeros(head.depths, dtype=torch.float64), 0
    for batch in dataset.in_order():
        accepted = _acceptance(head, batch, greedy, skip)
        sums += accepted.cumprod(-1).sum((0, 1)).double().cpu()
        count += accepted.shape[0] * accepted.shape[1]
    return [value / max(count, 1) for value in sums.tolist()]


def _acceptance(head: Head, batch: TrainBatch, greedy: bool, skip: int) -> Tensor:
    """Returns the acceptance at each depth given the depths above, [B, roots, depths], from row ``skip`` on."""
    with torch.autocast(batch.ids.device.type, torch.bfloat16):
        drafted, probs = head(batch), batch.target_probs()
    draft_probs, columns = draft_columns(probs, head), []
    for depth, logits in enumerate(drafted.logits):
        best = logits.argmax(-1)
        if greedy:
            ids = best if head.vocabulary is None else head.vocabulary.to(best.device)[best]
            columns.append((ids == _rows(probs, depth, drafted).argmax(-1)).float())
        elif head.samples:
            columns.append(torch.minimum(_rows(draft_probs, depth, drafted), logits.float().softmax(-1)).sum(-1))
        else:
            columns.append(_rows(draft_probs, depth, drafted).gather(-1, best[..., None])[..., 0])
    first = skip if drafted.roots is None else int((drafted.roots[0] < skip).sum())
    return torch.stack(columns, dim=-1)[:, first:]


def evaluated(head: Head, greedy: HiddenStateDataset, sampled: HiddenStateDataset, skip: int) -> dict[str, float]:
    """Returns expected acceptance lengths (tokens per target pass) at temperatures 0 and 1, and acceptance by position.

    ``greedy_k`` and ``drawn_k`` are the acceptance of position k given that all before it were accepted, on text that
    the target sampled at temperatures 0 and 1, without the first ``skip`` positions of each window.
    """
    chains = {
        "greedy": chain_acceptance(head, greedy, True, skip),
        "drawn": chain_acceptance(head, sampled, False, skip),
    }
    result = {f"length_{name}": 1 + sum(accepted) for name, accepted in chains.items()}
    for name, accepted in chains.items():
        for k, (before, now) in enumerate(zip([1.0, *accepted], accepted, strict=False)):
            result[f"{name}_{k + 1}"] = now / before if before > 0 else 0.0
    return result

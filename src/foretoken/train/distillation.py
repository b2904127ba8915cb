"""Losses of a draft that is distilled from a target.

The loss is the forward KL divergence from the target's distribution at every position (2310.08461), and in the last
part of the run -log sum_x min(p(x), q(x)), the negative log of the probability that a sampled token is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foretoken.core.checks import number

_FLOOR = 1e-6
TopLogprobs = tuple[torch.Tensor, torch.Tensor]
"""Token ids and log-probabilities of the k likeliest tokens, [B, T, k] each."""


@dataclass(frozen=True)
class DistillConfig:
    """Settings of the target's distributions and of the loss.

    Args:
        top: Likeliest tokens kept per position. The probability of the others is one bucket.
        acceptance_share: Last share of the run, which changes from KL to the acceptance loss.
        teacher_share: Greatest share of ``minutes`` for the pass over the target.
        disk_gigabytes: Disk space for the target's distributions.
        generated_share: Share of the windows that the target samples (2310.08461, on-policy data).
    """

    top: int = 64
    acceptance_share: float = 0.3
    teacher_share: float = 0.3
    disk_gigabytes: float = 2.0
    generated_share: float = 0.0

    def __post_init__(self) -> None:
        number("generated_share", self.generated_share, 0, 1)
        number("acceptance_share", self.acceptance_share, 0, 1)

    def arguments(self) -> str:
        """Returns the command line options that give these settings."""
        share = f"--acceptance-share {self.acceptance_share:g} --generated-share {self.generated_share:g}"
        return f"--top {self.top} {share} --disk-gigabytes {self.disk_gigabytes:g}"


DISTILL = DistillConfig()


def distillation_loss(logits: torch.Tensor, law: TopLogprobs, acceptance: torch.Tensor) -> torch.Tensor:
    """Returns (1 - acceptance) KL(p||q) - acceptance log sum min(p, q), mean over positions, of the likeliest tokens.

    Tokens outside of the top k count as one bucket, which bounds the KL from below and the overlap from above.

    Args:
        logits: The draft's, [B, T, V].
        law: The target's distribution, as ``teacher.top_law`` returns it.
        acceptance: Weight of the acceptance loss, a scalar tensor from 0 to 1.
    """
    ids, log_p = law
    logits = logits.float()
    log_q = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    p, q = log_p.exp(), log_q.exp()
    p_rest = (1 - p.sum(-1)).clamp_min(_FLOOR)
    q_rest = (1 - q.sum(-1)).clamp_min(_FLOOR)
    divergence = (p * (log_p - log_q)).sum(-1) + p_rest * (p_rest.log() - q_rest.log())
    overlap = torch.minimum(p, q).sum(-1) + torch.minimum(p_rest, q_rest)
    return ((1 - acceptance) * divergence - acceptance * overlap.clamp_min(_FLOOR).log()).mean()


def full_distillation_loss(
    logits: torch.Tensor, target_logits: torch.Tensor, acceptance: torch.Tensor, counted: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns (1 - acceptance) KL(p||q) - acceptance log sum min(p, q) over the whole vocabulary, mean over positions.

    Args:
        logits: The draft's, [B, T, V].
        target_logits: The target's, [B, T, V].
        acceptance: Weight of the acceptance loss, a scalar tensor from 0 to 1.
        counted: Mask of the positions that count, [B, T]. None counts all.
    """
    log_p, log_q = target_logits.float().log_softmax(-1), logits.float().log_softmax(-1)
    p = log_p.exp()
    divergence = (p * (log_p - log_q)).sum(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1).clamp_min(_FLOOR)
    loss = (1 - acceptance) * divergence - acceptance * overlap.log()
    return loss.mean() if counted is None else (loss * counted).sum() / counted.sum()


def agreement(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> tuple[float, float]:
    """Returns overlap and argmax agreement of logits [B, T, V]: the acceptance rates at temperatures 1 and 0.

    The overlap is sum_x min(p(x), q(x)) = 1 - TV(p, q) over the whole vocabulary. Both are means over positions.
    """
    p, q = target_logits.float().softmax(-1), draft_logits.float().softmax(-1)
    overlap = torch.minimum(p, q).sum(-1).mean().item()
    equal = (target_logits.argmax(-1) == draft_logits.argmax(-1)).float().mean().item()
    return overlap, equal


def acceptance_weight(progress: float, share: float) -> torch.Tensor:
    """Returns the weight of the acceptance loss, a scalar: 0, then rising over a third of ``share``, then 1.

    Args:
        progress: Finished share of the run.
        share: Last share of the run, which changes to the acceptance loss.
    """
    into = 0.0 if share <= 0 else (progress - (1 - share)) / (share / 3)
    return torch.tensor(min(1.0, max(0.0, into)))

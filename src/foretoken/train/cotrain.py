"""``--unfreeze``: trains head and target together, with a penalty on changes of the target (Medusa-2, 2401.10774)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.train.acceptance import head_loss
from foretoken.train.lessons import Head, Lesson, Teacher
from foretoken.train.progress import quiet_transformers
from foretoken.train.target import next_token_loss

TARGET_RATE = 0.05  # factor of the target's learning rate


class CoTrained(nn.Module):
    """A head, and a copy of the target that is trained with it.

    The penalty is ``hold`` times KL(p || p'), p the target's distribution before and p' the present one.
    """

    def __init__(self, head: Head, teacher: Teacher, hold: float) -> None:
        super().__init__()
        self.head, self.hold = head, hold
        self.target = copy.deepcopy(teacher.model).float().requires_grad_(True)
        self.softcap = teacher.softcap

    def live(self, teacher: Teacher) -> Teacher:
        """Returns a ``teacher`` with the present target."""
        now = copy.copy(teacher)
        now.adopt(self.target)
        return now

    def loss(self, frozen: Lesson, discount: float, acceptance: Tensor) -> Tensor:
        """Returns the head's loss on the present target plus the penalty. frozen: the lesson of the original target."""
        output: Any = self.target.base_model(frozen.ids, use_cache=False, output_hidden_states=True)
        states = torch.stack([output.hidden_states[layer] for layer in frozen.layers], dim=2)
        vectors = self.target.get_input_embeddings().weight, self.target.get_output_embeddings().weight
        now = Lesson(frozen.ids, states, frozen.layers, *vectors, self.softcap)
        loss = head_loss(self.head, now, discount, acceptance)
        before, after = (lesson.read(lesson.last()).float().log_softmax(-1) for lesson in (frozen, now))
        return loss + self.hold * (before.exp() * (before - after)).sum(-1).mean()

    def save(self, source: Path, folder: Path) -> None:
        """Writes the changed target in bfloat16, with the tokenizer of ``source``."""
        with quiet_transformers():
            copy.deepcopy(self.target).bfloat16().save_pretrained(folder)
            load_tokenizer(source).save_pretrained(folder)


@torch.no_grad()
def text_loss(teacher: Teacher, windows: Tensor) -> float:
    """Returns the target's loss on ``windows`` [N, T] of the corpus, in nats per token."""
    losses = []
    for part in windows.split(4):
        ids = part.to(teacher.device)
        losses.append(next_token_loss(teacher.model(ids, use_cache=False).logits, ids).item())
    return sum(losses) / len(losses)

"""``--unfreeze``: head and target trained together, the target held near where it was (Medusa-2, 2401.10774, 2.2)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.train.acceptance import head_loss, known
from foretoken.train.lessons import Head, Lesson, Teacher
from foretoken.train.progress import quiet_transformers
from foretoken.train.target import next_token_loss

TARGET_RATE = 0.05  # of the head's learning rate: the target has little to learn and much to lose


class CoTrained(nn.Module):
    """The head, and a copy of the target that learns with it.

    The penalty is ``hold`` times KL(p || p'), of the target's law before and now: no text of a new target can be told
    from the old one's where it is 0, and the loss on any text moves by no more than the penalty allows.
    """

    def __init__(self, head: Head, teacher: Teacher, hold: float) -> None:
        super().__init__()
        self.head, self.hold = head, hold
        self.target = copy.deepcopy(teacher.model).float().requires_grad_(True)
        self.softcap = teacher.softcap

    def live(self, teacher: Teacher) -> Teacher:
        """``teacher`` with the target as it is now."""
        now = copy.copy(teacher)
        now.adopt(self.target)
        return now

    def loss(self, frozen: Lesson, discount: float, acceptance: Tensor) -> Tensor:
        """The head's loss on the target as it is now, and the penalty; ``frozen`` is what the old target says."""
        output: Any = self.target.base_model(frozen.ids, use_cache=False, output_hidden_states=True)
        states = torch.stack([output.hidden_states[layer] for layer in frozen.layers], dim=2)
        vectors = self.target.get_input_embeddings().weight, self.target.get_output_embeddings().weight
        now = Lesson(frozen.ids, states, frozen.layers, *vectors, self.softcap)
        wanted = head_loss(self.head(now), known(now.law(), self.head), discount, acceptance)
        before, after = (lesson.read(lesson.last()).float().log_softmax(-1) for lesson in (frozen, now))
        return wanted + self.hold * (before.exp() * (before - after)).sum(-1).mean()

    def save(self, source: Path, folder: Path) -> None:
        """The changed target in bfloat16, with the tokenizer of ``source``."""
        with quiet_transformers():
            copy.deepcopy(self.target).bfloat16().save_pretrained(folder)
            load_tokenizer(source).save_pretrained(folder)


@torch.no_grad()
def text_loss(teacher: Teacher, windows: Tensor) -> float:
    """Nats per token of ``windows`` [N, T], which the target did not write."""
    losses = [next_token_loss(teacher.model(w.to(teacher.device), use_cache=False).logits, w.to(teacher.device)).item()
              for w in windows.split(4)]  # fmt: skip
    return sum(losses) / len(losses)

"""Windows of text for a draft that is trained on a GPU, where the target's distributions are computed in every step.

A pass of the target then costs less than reading its distributions from a disk, so they are neither kept nor cut off.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.train.generated import PROMPTS, Prompts
from foretoken.train.progress import Reporter, quiet_transformers
from foretoken.train.teacher import fixed_windows, shuffled

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

_BATCH = 2048  # sequences that are sampled at once
_FLOOR = 1e-6


@dataclass(frozen=True)
class LiveWindows:
    """Windows of text on the device.

    Args:
        ids: Token ids, int64 [N, T].
        seconds: Time in which the target wrote its share of them.
    """

    ids: Tensor
    seconds: float

    def batches(self, batch: int, seed: int, start: int = 0) -> Iterator[Tensor]:
        """Yields endless ids [batch, T], reshuffled each epoch. Batch i depends on (seed, i) alone."""
        for rows in shuffled(len(self.ids), batch, seed, start):
            yield self.ids[torch.from_numpy(rows).to(self.ids.device)]


def live_windows(
    teacher: LlamaForCausalLM, stream: Tensor, length: int, seed: int, share: float, limit_seconds: float | None
) -> LiveWindows:
    """Returns all windows of the corpus, and beside them windows that the target writes.

    Args:
        teacher: The target, on the device.
        stream: Token ids of the corpus, [N].
        length: Tokens of a window.
        seed: Seed of the windows and of what is sampled.
        share: Share of the windows that the target writes.
        limit_seconds: Time after which it begins no further batch of windows; None for no limit.

    Raises:
        InvalidRequest: The target would write them all.
    """
    if share >= 1:
        raise InvalidRequest(
            f"generated_share is {share:g}; on a GPU, which reads all of the corpus, it must be below 1"
        )
    cut, started = fixed_windows(stream, length, seed), time.monotonic()
    parts = [cut.to(teacher.device)]
    if count := round(len(cut) * share / (1 - share)):
        parts += _written(teacher, stream, count, length, seed, limit_seconds)
    return LiveWindows(torch.cat(parts), time.monotonic() - started)


@torch.no_grad()
def _written(
    teacher: LlamaForCausalLM, stream: Tensor, count: int, length: int, seed: int, limit: float | None
) -> list[Tensor]:
    """Returns batches of windows. Each continues prompts of one length, at one temperature (``generated.Prompts``)."""
    torch.manual_seed(seed)
    generate: Any = teacher.generate
    started, parts, done = time.monotonic(), list[Tensor](), 0
    with quiet_transformers(), Reporter("sampling text") as report:
        while done < count and (limit is None or time.monotonic() - started < limit):
            rng = np.random.default_rng([seed, 4, len(parts)])
            rows = min(_BATCH, count - done)
            prompt_length = min(int(rng.integers(PROMPTS.shortest, PROMPTS.longest, endpoint=True)), length - 1)
            heat = PROMPTS.temperatures(rng, 1)[0]
            cuts = Prompts(prompt_length, prompt_length).cuts(stream, rng, rows)
            prompt = torch.tensor(cuts, device=teacher.device)
            sampling = {"do_sample": True, "temperature": max(heat, 0.05), "top_k": 0, "top_p": 1.0}
            text = generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_length=length,
                eos_token_id=None,  # windows of the corpus continue past the end of a file, too
                pad_token_id=0,
                **(sampling if heat > 0 else {"do_sample": False}),
            )
            parts.append(text)
            done += rows
            report.update(done / count, f"{done * length / (time.monotonic() - started):,.0f} tok/s")
    return parts

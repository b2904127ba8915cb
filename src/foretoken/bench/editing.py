"""The editing workload: the prompt holds a function, the output is the same function with a rename and a fix.

The bundled target completes code and does not follow instructions, so the output is forced: the sampling distribution
is one-hot on the edited text, as under a grammar that allows one text. Passes, caches and verification cost the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.bench.edits import EDITS
from foretoken.core.distributions import Law
from foretoken.core.history import History
from foretoken.core.sampling import SamplingLaw


class EditingTask(NamedTuple):
    """Token ids of the prompt, of the client's prediction (the original code) and of the output."""

    prompt: list[int]
    reference: list[int]
    output: list[int]


def editing_tasks(tokenizer: Any) -> list[EditingTask]:
    """Returns ``EDITS`` as token ids of a tokenizer."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    return [EditingTask(ids(edit.prompt), ids(edit.source), ids(edit.edited)) for edit in EDITS]


@dataclass(frozen=True)
class Dictated(Law):
    """A sampling distribution that forces ``output`` [n]: one-hot by position; the last token repeats at the end.

    It reads the logits as greedy decoding does, so that a row costs the same.
    """

    output: Sequence[int]

    greedy = True
    needs_history = True

    def best(self, logits: Tensor, histories: Sequence[History]) -> list[int]:
        """See ``Law``."""
        SamplingLaw(temperature=0.0).best(logits, histories)
        return [self.output[min(h.generated, len(self.output) - 1)] for h in histories]

    def probs(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        """See ``Law``."""
        tokens = torch.tensor(self.best(logits, histories), device=logits.device)[:, None]
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, tokens, 1.0)

    def with_temperature(self, temperature: float) -> Dictated:
        """One-hot at every temperature."""
        return self

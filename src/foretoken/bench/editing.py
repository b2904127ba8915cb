"""The editing workload: a function in the prompt, and the same with a rename and a fix as the output to follow.

The bundled target completes code and does not take orders, so the output is dictated: its law is one-hot on the edited
text, as a grammar's would be that allows one text. Passes, rows, caches and verification cost what they always cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.bench.edits import EDITS
from foretoken.core.sampling import History, SamplingLaw


class EditingTask(NamedTuple):
    """Token ids: what is asked, the client's prediction (the code as it was), and what is to come out."""

    prompt: list[int]
    reference: list[int]
    output: list[int]


def editing_tasks(tokenizer: Any) -> list[EditingTask]:
    """``EDITS`` in a tokenizer's ids."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    return [EditingTask(ids(edit.prompt), ids(edit.source), ids(edit.edited)) for edit in EDITS]


@dataclass(frozen=True)
class Dictated:
    """The law that gives ``output`` [n] and nothing else, one-hot by position; after its end the last token repeats.

    It looks at the logits as greedy decoding does, so that what a row costs is what it costs there.
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

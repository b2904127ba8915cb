"""The target's laws as a verifier reads them: a tensor [n+1, V], or rows that are computed when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foretoken.core.sampling import Rows
from foretoken.core.streams import Stream

Probs = Tensor | Rows
"""[n+1, V]; ``probs[i]`` is the law [V] at the root for i = 0, else at node i - 1."""


def draw(probs: Probs, row: int, stream: Stream, index: int) -> int:
    """A token from row ``row``. Where only one is possible it needs neither a row nor a random number."""
    certain = probs.certain(row) if isinstance(probs, Rows) else None
    return stream.categorical(probs[row], index=index) if certain is None else certain


def chances(probs: Probs, rows: Sequence[int], tokens: Sequence[int]) -> Iterator[float]:
    """The probability of ``tokens[i]`` in row ``rows[i]``."""
    if isinstance(probs, Rows):
        return probs.chances(rows, tokens)
    return (float(probs[row, token]) for row, token in zip(rows, tokens, strict=True))


def dense(probs: Probs) -> Tensor:
    """All rows, for rules that look at all of them."""
    return probs if isinstance(probs, Tensor) else torch.stack([probs[row] for row in range(probs.shape[0])])

"""The target's laws as a verifier reads them: a tensor [n+1, V], or rows that are computed when asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foretoken.core.errors import NoTokenAllowed
from foretoken.core.sampling import Rows
from foretoken.core.streams import Stream

Probs = Tensor | Rows
"""[n+1, V]; ``probs[i]`` is the law [V] at the root for i = 0, else at node i - 1.

A row where no token can come is NaN. It counts as a law whose only outcome is the end of the request: it gives every
token probability 0, and a verdict that reaches it raises ``NoTokenAllowed``.
"""


def draw(probs: Probs, row: int, stream: Stream, index: int) -> int:
    """A token from row ``row``. Where only one is possible it needs neither a row nor a random number.

    Raises NoTokenAllowed where no token can come.
    """
    certain = probs.certain(row) if isinstance(probs, Rows) else None
    if certain is None:
        return stream.categorical(reached(probs, row), index=index)
    if certain < 0:
        raise NoTokenAllowed(row)
    return certain


def reached(probs: Probs, row: int) -> Tensor:
    """The law [V] of a row that the verdict has reached. Raises NoTokenAllowed where no token can come."""
    if not possible(probs, row):
        raise NoTokenAllowed(row)
    return probs[row]


def possible(probs: Probs, row: int) -> bool:
    """Whether any token can come at row ``row``."""
    return not math.isnan(probs[row][0])


def chances(probs: Probs, rows: Sequence[int], tokens: Sequence[int]) -> Iterator[float]:
    """The probability of ``tokens[i]`` in row ``rows[i]``, NaN where no token can come."""
    if isinstance(probs, Rows):
        return probs.chances(rows, tokens)
    return (float(probs[row, token]) for row, token in zip(rows, tokens, strict=True))


def dense(probs: Probs) -> Tensor:
    """All rows, for rules that look at all of them."""
    return probs if isinstance(probs, Tensor) else torch.stack([probs[row] for row in range(probs.shape[0])])

"""The target's distributions as a verifier reads them: a tensor [n+1, V], or lazily computed rows."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foretoken.core.distributions import NodeDistributions
from foretoken.core.errors import NoTokenAllowed
from foretoken.core.streams import PrivateStream, SharedStream, Stream

Probs = Tensor | NodeDistributions
"""[n+1, V]. ``probs[i]`` is the distribution [V] at the root for i = 0, else at node i - 1.

A row where no token is possible is NaN. Its only outcome is the end of the request: every token has probability 0, and
a verdict that reaches it raises ``NoTokenAllowed``.
"""


def draw(probs: Probs, row: int, stream: Stream, index: int) -> int:
    """Samples a token from row ``row``. A greedy law needs neither the row nor a random number.

    Raises NoTokenAllowed if no token is possible at the row.
    """
    certain = probs.certain(row) if isinstance(probs, NodeDistributions) else None
    if certain is None:
        if isinstance(probs, NodeDistributions) and isinstance(stream, PrivateStream | SharedStream):
            token = probs.draw(row, stream.noise(index))
            if token >= 0:
                return token
        return stream.categorical(reached(probs, row), index=index)
    if certain < 0:
        raise NoTokenAllowed(row)
    return certain


def reached(probs: Probs, row: int) -> Tensor:
    """Returns the distribution [V] of a row that the verdict has reached. Raises NoTokenAllowed for a row of NaN."""
    if not possible(probs, row):
        raise NoTokenAllowed(row)
    return probs[row]


def possible(probs: Probs, row: int) -> bool:
    """Returns whether any token is possible at row ``row``."""
    return not math.isnan(probs[row][0])


def chances(probs: Probs, rows: Sequence[int], tokens: Sequence[int]) -> Iterator[float]:
    """Yields the probability of ``tokens[i]`` in row ``rows[i]``, NaN if no token is possible."""
    if isinstance(probs, NodeDistributions):
        return probs.chances(rows, tokens)
    return (float(probs[row, token]) for row, token in zip(rows, tokens, strict=True))


def dense(probs: Probs) -> Tensor:
    """Returns all rows as a tensor [n+1, V]."""
    return probs if isinstance(probs, Tensor) else torch.stack([probs[row] for row in range(probs.shape[0])])

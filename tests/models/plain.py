"""Plain decoding, one row a pass: the reference of every test of bit-equal rows; and texts to decode."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.models.tiny import VOCAB
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.base import Model


def one_by_one(model: Model, prompt: Sequence[int], continuation: Sequence[int]) -> list[Tensor]:
    """Returns the logits of each token of ``continuation``, from a sequence that is decoded alone."""
    handle, rows = model.open(prompt), []
    for token in continuation:
        rows.append(model.score([handle], [Draft.empty()])[0].logits[0])
        model.commit([handle], [[token]])
    model.close(handle)
    return rows


def text(length: int, seed: int) -> list[int]:
    """Returns random token ids of the tiny models."""
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB) for _ in range(length)]

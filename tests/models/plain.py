"""Plain decoding, one row a pass: the reference of every test of bit-equal rows."""

from __future__ import annotations

from collections.abc import Sequence

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

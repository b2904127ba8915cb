"""Sequences that wait to be gone on with are found by texts that begin like them, of the same source and salt."""

from __future__ import annotations

import pytest

from foretoken.core.draft import Draft
from foretoken.models.base import Handle
from foretoken.models.resumable import Resumable
from foretoken.models.toy import ToyModel


def left_behind(model: Resumable, cache_salt: str | None) -> Handle:
    handle = model.open([1, 2, 3], cache_salt=cache_salt)
    model.score([handle], [Draft.empty()])
    with model.aside(7):
        model.close(handle)
    return handle


@pytest.mark.parametrize("salt, other", [("a", "b"), ("a", None), (None, "a")])
def test_a_waiting_sequence_is_found_with_its_own_salt_alone(salt: str | None, other: str | None) -> None:
    model = Resumable(ToyModel(vocab_size=5, order=2, seed=3))
    handle = left_behind(model, salt)
    assert model.open([1, 2, 3, 4], cache_salt=other).cached == 0
    assert model.open([1, 2, 3, 4], cache_salt=salt) is handle
    assert handle.cached > 0

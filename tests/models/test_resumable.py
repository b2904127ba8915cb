"""Parked sequences are resumed by texts with a common prefix, the same source and the same salt."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.draft import Draft
from foretoken.models.base import Handle
from foretoken.models.resumable import Resumable
from foretoken.models.toy import ToyModel


def left_behind(model: Resumable, cache_salt: str | None) -> Handle:
    handle = model.open([1, 2, 3], cache_salt=cache_salt)
    model.score([handle], [Draft.empty()])
    with model.parked(7):
        model.close(handle)
    return handle


@pytest.mark.parametrize("salt, other", [("a", "b"), ("a", None), (None, "a")])
def test_a_parked_sequence_is_resumed_only_with_its_own_salt(salt: str | None, other: str | None) -> None:
    model = Resumable(ToyModel(vocab_size=5, order=2, seed=3))
    handle = left_behind(model, salt)
    assert model.open([1, 2, 3, 4], cache_salt=other).cached == 0
    assert model.open([1, 2, 3, 4], cache_salt=salt) is handle
    assert handle.cached > 0


@pytest.mark.parametrize("text, shared", [([1, 2, 3, 4, 5, 6], 4), ([1, 2, 3], 2), ([1, 2, 0, 4, 5], 1), ([6, 2], 0)])
def test_a_resumed_sequence_keeps_the_rows_before_the_last_shared_token(text: list[int], shared: int) -> None:
    toy = ToyModel(vocab_size=7, order=3, seed=2)
    model = Resumable(toy)
    first = model.open([1, 2, 3, 4, 5])
    model.score([first], [Draft.chain([6, 0])])
    with model.parked(1):
        model.close(first)
    again = model.open(text)
    assert (again.tokens, again.cached, again.nodes) == (text, shared, [])
    (scores,) = model.score([again], [Draft.chain([0])])
    assert scores.first == shared
    assert torch.equal(scores.logits, torch.stack([toy.logits(text), toy.logits([*text, 0])]))
    model.close(again)
    model.release(1)
    assert [toy.open([1]).slot for _ in range(3)] == [0, 1, 2]

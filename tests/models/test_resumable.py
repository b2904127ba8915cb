"""Sequences that wait to be gone on with are found by texts that begin like them, of the same source and salt."""

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


@pytest.mark.parametrize("text, found", [([1, 2, 3, 4, 5, 6], 4), ([1, 2, 3], 2), ([1, 2, 0, 4, 5], 1), ([6, 2], 0)])
def test_a_text_that_begins_like_a_closed_one_keeps_the_rows_before_the_last_shared_token(
    text: list[int], found: int
) -> None:
    toy = ToyModel(vocab_size=7, order=3, seed=2)
    model = Resumable(toy)
    first = model.open([1, 2, 3, 4, 5])
    model.score([first], [Draft.chain([6, 0])])
    with model.aside(1):
        model.close(first)
    again = model.open(text)
    assert (again.tokens, again.cached, again.nodes) == (text, found, [])
    (scores,) = model.score([again], [Draft.chain([0])])
    assert scores.first == found
    assert torch.equal(scores.logits, torch.stack([toy.logits(text), toy.logits([*text, 0])]))
    model.close(again)
    model.release(1)
    assert not toy._open

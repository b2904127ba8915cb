"""A sequence's cached rows: which are kept when tokens are committed, and when a parked sequence is resumed."""

import pytest
import torch

from foretoken.core.draft import Draft
from foretoken.models.base import Handle, growing
from foretoken.models.resumable import Resumable
from foretoken.models.toy import ToyModel

from .trees import repeating

TREE = repeating((-1, 0, -1, 0, 2, 4))


def scored(draft: Draft) -> Handle:
    """A handle after a pass over a text of three tokens and ``draft``."""
    return Handle(0, [1, 2, 3], 3, list(draft.ids), list(draft.parents))


def test_the_tree_repeats_tokens() -> None:
    assert repeating((-1, 0, -1)).ids == (5, 6, 6)
    assert TREE.ids == (5, 6, 6, 7, 6, 7)


@pytest.mark.parametrize("node", range(-1, len(TREE)))
def test_tokens_match_the_nodes_of_their_own_path(node: int) -> None:
    tokens = [TREE.ids[i] for i in TREE.path(node)]
    assert scored(TREE).match(tokens) == list(TREE.path(node))
    assert scored(TREE).match([*tokens, 99]) == list(TREE.path(node))


def test_a_token_elsewhere_in_the_tree_does_not_match() -> None:
    assert scored(TREE).match([7]) == []
    assert scored(TREE).match([5, 5]) == [0]
    assert scored(TREE).match([5, 6, 7]) == [0, 1]


def test_advance_returns_the_rows_of_the_path_and_drops_the_draft() -> None:
    handle = scored(repeating((-1, 0, -1)))
    assert handle.advance([6, 9]) == (3, [5])
    assert (handle.tokens, handle.cached, handle.pending) == ([1, 2, 3, 6, 9], 4, [9])
    assert not handle.nodes and not handle.parents


def test_a_draft_grows_on_rows_of_the_same_tokens_below_the_same_parents() -> None:
    chain = Draft.chain([5, 6])
    handle = scored(chain)
    handle.cached = 3
    assert growing(handle, Draft.chain([5, 6, 7])) == 2
    assert growing(scored(chain), repeating((-1, -1, 1))) == 0
    assert growing(scored(chain), Draft.chain([5, 7, 7])) == 0


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

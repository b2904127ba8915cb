"""A sequence's cached rows: which of them are kept when tokens are committed."""

from __future__ import annotations

import pytest

from foretoken.core.draft import Draft
from foretoken.models.base import Handle, growing

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

"""Plain decoding, one row a pass: the reference of tests of bit-equal rows, with common checks and texts."""

import random
from collections.abc import Sequence

import torch
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


def check_chains(
    model: Model, prompt: Sequence[int], tokens: Sequence[int], depths: Sequence[int], beside: Sequence[int]
) -> None:
    """Checks that chains, alone and beside sequences of other lengths, have the bits of plain decoding."""
    expected = one_by_one(model, prompt, tokens)
    others = [model.open(text(length, length)) for length in beside]
    for depth in depths:
        for open_ in ([], others):
            handle = model.open(prompt)
            drafts = [Draft.chain(text(i, i)) if i else Draft.empty() for i in range(len(open_))]
            scores = model.score([*open_, handle], [*drafts, Draft.chain(tokens[:depth])])[-1].logits
            model.commit(open_, [()] * len(open_))
            model.close(handle)
            for row in range(depth + 1):
                assert torch.equal(scores[row], expected[row]), (depth, len(open_), row)


def check_tree(model: Model, prompt: Sequence[int], draft: Draft, leaf: int) -> None:
    """Checks that nodes of a tree, and the row after the accepted path to ``leaf``, have the bits of plain decoding."""
    handle = model.open(prompt)
    scores = model.score([handle], [draft])[0].logits
    for node in range(len(draft)):
        other = model.open([*prompt, *(draft.ids[i] for i in draft.path(node))])
        assert torch.equal(model.score([other], [Draft.empty()])[0].logits[0], scores[node + 1]), node
        model.close(other)
    path = [draft.ids[i] for i in draft.path(leaf)]
    model.commit([handle], [[*path, 7]])
    again = model.score([handle], [Draft.empty()])[0].logits[0]
    assert torch.equal(again, one_by_one(model, [*prompt, *path, 7], [3])[0])


def check_prefix_cache_hits(model: Model, prompt: Sequence[int]) -> None:
    """Checks that a cached prefix gives the bits of the first pass over a prompt."""
    first = model.open(prompt)
    expected = model.score([first], [Draft.empty()])[0].logits
    model.commit([first], [()])
    model.close(first)
    assert model.enable_prefix_cache(2**24)
    for _ in range(2):
        handle = model.open(prompt)
        assert torch.equal(model.score([handle], [Draft.empty()])[0].logits, expected)
        model.commit([handle], [()])
        cached = handle.cached
        model.close(handle)
    assert cached
    model.check()


def text(length: int, seed: int) -> list[int]:
    """Returns random token ids of the tiny models."""
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB) for _ in range(length)]

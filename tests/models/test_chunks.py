"""Attention in chunks (Llama 4): trees that cross the edge of a chunk have the bits of plain decoding."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.base import Model
from foretoken.models.loading import load_model

from .test_native import needs_kernels
from .tiny import ARCHITECTURES, VOCAB
from .trees import repeating

# The chunk ends within the draft, and the last rows of a tile all follow its end.
TREE = repeating((-1, 0, 1, 2, 3, 3, *range(4, 25)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    tiny = ARCHITECTURES["llama4"]
    path = replace(tiny, config={**tiny.config, "attention_chunk_size": 16}).save(tmp_path_factory.mktemp("llama4"))
    return load_model(path, "float32", "cpu", "native")


def prompt(length: int) -> list[int]:
    chance = random.Random(length)
    return [chance.randrange(3, VOCAB) for _ in range(length)]


def alone(model: Model, tokens: list[int]) -> Tensor:
    handle = model.open(tokens)
    logits = model.score([handle], [Draft.empty()])[0].logits[0]
    model.close(handle)
    return logits


@needs_kernels
@pytest.mark.parametrize("length", [13, 61])
def test_nodes_behind_the_edge_of_a_chunk_have_the_bits_of_chains(length: int, model: Model) -> None:
    handle = model.open(prompt(length))
    scores = model.score([handle], [TREE])[0].logits
    for node in range(len(TREE)):
        expected = alone(model, [*prompt(length), *(TREE.ids[i] for i in TREE.path(node))])
        assert torch.equal(scores[node + 1], expected), node


@needs_kernels
def test_trees_that_grow_over_the_edge_of_a_chunk_have_the_same_bits(model: Model) -> None:
    """Each pass has one new node, so from the edge on all its rows are behind it."""
    handle = model.open(prompt(13))
    for size in range(1, len(TREE) + 1):
        (scores,) = model.score([handle], [Draft(TREE.ids[:size], TREE.parents[:size])])
        expected = alone(model, [*prompt(13), *(TREE.ids[i] for i in TREE.path(size - 1))])
        assert torch.equal(scores.logits[-1], expected), size

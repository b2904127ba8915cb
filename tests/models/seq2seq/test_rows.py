"""Batch invariance of encoder-decoders, bit for bit."""

import pytest
import torch
from tests.models.trees import repeating

from foretoken.core.draft import Draft
from foretoken.models.base import Model
from foretoken.models.runners.linear import can_pack

from .tiny import load, save

KINDS = [
    pytest.param(
        (family, dtype, quantization, kernels), marks=[] if kernels and not quantization else [pytest.mark.slow]
    )
    for kernels in (True, False)
    for family in ("t5-1.1", "bart")
    for dtype, quantization in (("float32", None), ("bfloat16", None), ("bfloat16", "int8"))
]
SOURCE = [5 + i % 90 for i in range(75)]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family, dtype, quantization, kernels = request.param
    if not kernels and not can_pack(getattr(torch, dtype), torch.device("cpu")):
        pytest.skip(f"this machine has no packed {dtype} products; its rows are not promised to be independent")
    torch.set_num_threads(2)
    folder = tmp_path_factory.mktemp("rows")
    save(family, folder)
    return load(folder, kernels, dtype=dtype, quantization=quantization)


@pytest.fixture(autouse=True)
def two_threads() -> None:
    """Rows are shared out among threads. ``conftest`` sets it back after each test."""
    torch.set_num_threads(2)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 101, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def one_by_one(
    model: Model, prompt: list[int], continuation: list[int], source: list[int] = SOURCE
) -> list[torch.Tensor]:
    """The reference: plain decoding, alone, one row a pass."""
    handle, rows = model.open(prompt, source), []
    for token in continuation:
        rows.append(model.score([handle], [Draft.empty()])[0].logits[0])
        model.commit([handle], [[token]])
    model.close(handle)
    return rows


@pytest.mark.parametrize("length", [1, 150])
def test_chains_equal_plain_decoding(model: Model, length: int) -> None:
    prompt, continuation = tokens(length), tokens(17, seed=9)
    expected = one_by_one(model, prompt, continuation)
    for depth in (1, 2, 3, 4, 7, 8, 16):
        handle = model.open(prompt, SOURCE)
        got = model.score([handle], [Draft.chain(continuation[:depth])])[0].logits
        model.close(handle)
        assert all(torch.equal(got[row], expected[row]) for row in range(depth + 1)), depth


def test_every_path_of_a_tree_equals_plain_decoding(model: Model) -> None:
    prompt = tokens(70)
    draft = repeating((-1, 0, -1, 0, 2, 4, 4, 6, 7))
    handle = model.open(prompt, SOURCE)
    got = model.score([handle], [draft])[0].logits
    for node in range(len(draft)):
        path = [draft.ids[i] for i in draft.path(node)]
        assert torch.equal(got[node + 1], one_by_one(model, prompt, [*path, 0])[-1]), node
    path = [draft.ids[i] for i in draft.path(5)]
    model.commit([handle], [[*path, 99]])
    after = model.score([handle], [Draft.chain([1])])[0].logits
    assert torch.equal(after[1], one_by_one(model, prompt, [*path, 99, 1, 0])[-1])
    model.close(handle)


@pytest.mark.parametrize("other", [1, 165])
def test_other_sequences_and_their_sources_change_no_bit(model: Model, other: int) -> None:
    prompt, continuation = tokens(20), tokens(5, seed=9)
    expected = one_by_one(model, prompt, continuation)
    drafts = [Draft.empty(), Draft.chain(tokens(5, 1)), repeating((-1, 0, -1, 1))]
    handles = [model.open(tokens(3 + i, 3), tokens(other * (i + 1), i)) for i in range(3)]
    last = model.open(prompt, SOURCE)
    got = model.score([*handles, last], [*drafts, Draft.chain(continuation[:4])])[-1].logits
    assert all(torch.equal(got[row], expected[row]) for row in range(5))
    for handle in (*handles, last):
        model.close(handle)

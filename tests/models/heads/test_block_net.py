"""Block drafters on our runners against their equations in plain torch."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.heads import blocks, tiny
from tests.models.heads.blocks import Reference
from tests.models.test_graphs import InTorch, Recorder
from tests.models.tiny import only_runner
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.chains import ScoredRows
from foretoken.models.heads import block_net
from foretoken.models.heads.block import read_block
from foretoken.models.heads.block_net import BlockHandle, BlockNet
from foretoken.models.runners.cuda import layout
from foretoken.models.runners.cuda.runner import CudaRunner

CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
HEADS = {
    "dflash": blocks.dflash(),
    "sliding": blocks.dflash(**WINDOWS),
    "sliding both ways": blocks.dflash(**WINDOWS, is_causal=False),
    "jetspec": blocks.jetspec(),
    "narrow": blocks.dflash(hidden=32, target_hidden=64, layers=1),
    "dspark": blocks.dspark(),
    "gated": blocks.dspark(gated=True, sure=False),
}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def made(
    written: tuple[dict[str, Any], tiny.Tensors], folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[BlockNet, Reference]:
    config, tensors = written
    hidden = config.get("transformer_layer_config", config)["hidden_size"]
    embedding = tensors.get("embed_tokens.weight", random(101, hidden))
    unembed = tensors.get("lm_head.weight", random(101, hidden))
    head = read_block(tiny.save(folder, config, tensors))
    net = BlockNet(head, embedding, dtype, CPU, 2048, lambda x: (x.float()[:, None] * unembed).sum(-1))
    return net, Reference(config, tensors, embedding, unembed)


def drawn(net: BlockNet, handle: BlockHandle, path: list[int]) -> Tensor:
    """Returns the logits along a chain of given tokens."""
    rows = net.catch_up([handle])
    for depth in range(1, len(path) + 1):
        rows += net.grow([handle], [Draft.chain(path[:depth])])
    return torch.cat(rows)


@pytest.mark.parametrize("runner", ["compiled", "torch", "graphs"])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.slow
def test_the_net_equals_the_published_equations(name, runner, tmp_path, monkeypatch):
    if runner == "graphs":  # as on CUDA, with a stand-in for its graphs
        monkeypatch.setattr(layout, "attention_kernels", lambda: InTorch)
        monkeypatch.setattr(block_net, "build_runner", partial(CudaRunner, capture=Recorder))
    with only_runner(runner):
        net, reference = made(HEADS[name], tmp_path)
    tokens = torch.randint(0, 99, (10,), generator=torch.Generator().manual_seed(3)).tolist()
    raw = random(9, 128)
    path = [5, 6] if net.head.depth == 3 else [5, 6, 7]

    # Two sequences that share passes; the second is shorter, and comes in two pieces.
    first, second = net.open(tokens), net.open(tokens[:4])
    net.extend(first, tokens[1:], net.features(raw))
    net.extend(second, tokens[1:4], net.features(raw[:3]))
    rows = net.catch_up([first, second])
    whole = reference.logits(tokens[-1], raw, path)
    torch.testing.assert_close(rows[0], whole[:1], **CLOSE)
    torch.testing.assert_close(rows[1], reference.logits(tokens[3], raw[:3], []), **CLOSE)
    states, tokens_before = first.states, torch.tensor([tokens[-1], *path])
    grown = [net.grow([first], [Draft.chain(path[:depth])])[0] for depth in range(1, len(path) + 1)]
    torch.testing.assert_close(torch.cat(grown), whole[1:], **CLOSE)
    if net.head.confident:
        scored = ScoredRows(whole, states[: len(path) + 1], tokens_before, torch.tensor(True))
        expected = reference.confidence(tokens[-1], raw, path)
        torch.testing.assert_close(net.confidence(scored), expected, rtol=0.0, atol=1e-4)

    # What was drafted is dropped for the truth, which the second sequence gets now.
    net.extend(first, [5], net.features(raw[:1]))
    net.extend(second, tokens[4:], net.features(raw[3:]))
    rows = net.catch_up([first, second])
    torch.testing.assert_close(rows[0], reference.logits(5, torch.cat([raw, raw[:1]]), []), **CLOSE)
    torch.testing.assert_close(rows[1], whole[:1], **CLOSE)


def test_nodes_of_a_tree_have_the_logits_of_their_paths(tmp_path: Path) -> None:
    net, reference = made(HEADS["dspark"], tmp_path)
    raw, handle = random(4, 128), net.open([1, 2, 3, 4, 9])
    net.extend(handle, [2, 3, 4, 9], net.features(raw))
    net.catch_up([handle])
    tree = Draft.tree([5, 6, 7, 8], (-1, -1, 1, 2))
    rows = net.grow([handle], [tree])[0]
    paths = ([5], [6], [6, 7], [6, 7, 8])
    expected = torch.stack([reference.logits(9, raw, list(path))[-1] for path in paths])
    torch.testing.assert_close(rows, expected, **CLOSE)


def test_a_reduced_vocabulary_is_mapped_to_the_targets(tmp_path: Path) -> None:
    config, tensors = blocks.speculators(*blocks.dspark())
    net, _ = made((config, tensors), tmp_path)
    ids = torch.arange(40) + tensors["d2t"]
    assert net.target_ids(torch.arange(40)).equal(ids)
    wide = net.to_target(torch.arange(40.0)[None])
    assert wide[0, ids].equal(torch.arange(40.0)) and int(wide.isinf().sum()) == 61
    whole, _ = made(blocks.dspark(), tmp_path / "whole")
    raw, rows = random(3, 128), []
    for each in (net, whole):
        handle = each.open([1, 2, 3, 4])
        each.extend(handle, [2, 3, 4], each.features(raw))
        rows.append(drawn(each, handle, [int(ids[3]), int(ids[0])]))
    torch.testing.assert_close(rows[0], rows[1][:, ids], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["sliding", "dspark"])
def test_rows_do_not_depend_on_what_shares_the_pass(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    net, _ = made(HEADS[name], tmp_path, dtype)
    if not net.batch_invariant:
        pytest.skip("no compiled kernels here")
    raw = [random(n, 128) for n in (3, 11, 40, 300)]

    def opened() -> list[BlockHandle]:
        handles = [net.open(list(range(len(part) + 1))) for part in raw]
        for handle, part in zip(handles, raw, strict=True):
            net.extend(handle, [i % 99 for i in range(1, len(part) + 1)], net.features(part))
        return handles

    alone = [net.catch_up([handle])[0] for handle in opened()]
    assert all(one.equal(other) for one, other in zip(net.catch_up(opened()), alone, strict=True))


def test_the_prefix_cache_serves_a_sequence_with_a_common_prefix(tmp_path: Path) -> None:
    net, _ = made(HEADS["dspark"], tmp_path)
    net.enable_prefix_cache(2**24)
    if not net.keeps:
        pytest.skip("no compiled kernels here")
    tokens, features = [(3 * i) % 99 for i in range(150)], net.features(random(149, 128))
    first = net.open(tokens)
    assert first.cached == 0
    net.extend(first, tokens[1:], features)
    expected = drawn(net, first, [5, 6])
    net.close(first)

    second = net.open(tokens)
    assert second.cached == 128 and second.tokens == tokens[1:129]
    net.extend(second, tokens[129:], features[128:])
    assert drawn(net, second, [5, 6]).equal(expected)
    # Row i is made of the tokens up to i, so that another token 128 changes no row before it.
    assert net.open([*tokens[:128], 7, *tokens[129:]]).cached == 128
    assert net.open([*tokens[:127], 7, *tokens[128:]]).cached == 64
    assert net.open([9, *tokens[1:]]).cached == 0
    assert net.open(tokens, "another salt").cached == 0
    assert net.open(tokens[:1]).cached == 0 and net.open(tokens[:65]).cached == 64

"""Heads for a widened target guess there what the narrow ones guess on the narrow target."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.heads import blocks, tiny
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Model
from foretoken.models.heads.loading import load_block, load_eagle
from foretoken.models.heads.medusa import BlockwiseNet, MedusaNet, read_blockwise, read_medusa
from foretoken.models.loading import load_model
from foretoken.train.shapes import LlamaShape
from foretoken.train.widen import checkpoint as up
from foretoken.train.widen.heads import widen_head
from foretoken.train.widen.llama import WideShape

from .test_widen import source

IDS = list(range(2, 40))
F32 = torch.float32


@pytest.fixture(scope="module")
def folders(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A narrow target and the same, wider."""
    folder = tmp_path_factory.mktemp("targets")
    source(folder / "narrow", tokenizer, LlamaShape(32, 48, 3, 4, 2, 16, 128))
    up.widen_checkpoint(folder / "narrow", folder / "wide", WideShape(96, 160, 7, 12, 3))
    return folder / "narrow", folder / "wide"


def states(target: Model, taps: tuple[int, ...]) -> dict[int, Tensor]:
    handle = target.open(IDS)
    return target.score([handle], [Draft.empty()], taps)[0].taps


@pytest.mark.parametrize("embedding", [True, False])
def test_a_widened_eagle3_head_drafts_as_before(embedding: bool, folders: tuple[Path, Path], tmp_path: Path) -> None:
    targets = [load_model(folder, F32, "cpu") for folder in folders]
    written = tiny.eagle3(hidden=32, target_hidden=32, vocab=targets[0].vocab_size, embedding=embedding, taps=(0, 2, 3))
    head = tiny.save(tmp_path / "head", *written)
    scaled = widen_head(head, *folders)
    assert scaled == folders[1] / "heads" / "eagle3"
    predicted = []
    for target, folder, model in zip(targets, folders, (head, None), strict=True):
        loaded = load_eagle(target, None, model, folder)
        seen = states(target, loaded.taps)
        assert loaded.convention is None  # what was widened says what it taps
        features = loaded.net.features(torch.cat([seen[i] for i in loaded.taps], dim=-1)[:-1])
        predicted.append(loaded.net.teacher_forced(IDS[1:], features))
    torch.testing.assert_close(*predicted, rtol=1e-3, atol=2e-3)
    assert json.loads((scaled / "config.json").read_text())["foretoken_taps"] == [0, 4, 7]


def test_a_widened_p_eagle_head_has_the_mask_feature_of_the_narrow_one(folders, tmp_path):
    targets = [load_model(folder, F32, "cpu") for folder in folders]
    written = tiny.eagle3(hidden=32, target_hidden=32, vocab=targets[0].vocab_size, taps=(0, 2, 3), mask=5)
    head = tiny.save(tmp_path / "head", *written)
    widen_head(head, *folders)
    nets = [load_eagle(t, None, m, f).net for t, f, m in zip(targets, folders, (head, None), strict=True)]
    assert [net.head.mask_token for net in nets] == [5, 5]
    torch.testing.assert_close(*(net.mask_row().features for net in nets), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["dflash", "jetspec", "dspark"])
def test_a_widened_block_drafter_drafts_as_before(method: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    targets = [load_model(folder, F32, "cpu") for folder in folders]
    written = getattr(blocks, method)(hidden=32, target_hidden=32, vocab=targets[0].vocab_size, taps=(0, 2, 3))
    head = tiny.save(tmp_path / "head", *written)
    assert widen_head(head, *folders) == folders[1] / "heads" / method
    predicted = []
    for target, folder, model in zip(targets, folders, (head, None), strict=True):
        loaded = load_block(method, target, model, folder)
        seen = states(target, loaded.taps)
        handle = loaded.net.open(IDS)
        loaded.net.extend(handle, IDS[1:], loaded.net.features(torch.cat([seen[i] for i in loaded.taps], dim=-1)[:-1]))
        predicted.append(loaded.net.catch_up([handle])[0])
    torch.testing.assert_close(*predicted, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.slow
def test_widened_medusa_heads_draft_as_before(own, layers, folders, tmp_path):
    targets = [load_model(folder, F32, "cpu") for folder in folders]
    config, tensors = tiny.medusa(hidden=32, vocab=targets[0].vocab_size, own=own, layers=layers)
    head = tiny.save(tmp_path / "head", config | {"original_lm_head": own < 3}, tensors)
    predicted = []
    for target, folder in zip(targets, (head, widen_head(head, *folders)), strict=True):
        heads = read_medusa(folder)
        assert heads.hidden == target.hidden_size
        net = MedusaNet(heads, F32, torch.device("cpu"), target.unembed)
        predicted.append(net(states(target, (target.num_layers,))[target.num_layers]))
    torch.testing.assert_close(*predicted, rtol=1e-3, atol=5e-3)


def test_widened_blockwise_heads_draft_as_before(folders: tuple[Path, Path], tmp_path: Path) -> None:
    targets = [load_model(folder, F32, "cpu") for folder in folders]
    head = tiny.save(tmp_path / "head", *tiny.blockwise(hidden=32))
    predicted = []
    for target, folder in zip(targets, (head, widen_head(head, *folders)), strict=True):
        net = BlockwiseNet(read_blockwise(folder), F32, torch.device("cpu"), target.unembed)
        predicted.append(net(states(target, (target.num_layers,))[target.num_layers]))
    torch.testing.assert_close(*predicted, rtol=1e-3, atol=5e-3)


def test_the_same_heads_are_widened_once(folders: tuple[Path, Path], tmp_path: Path) -> None:
    out = widen_head(tiny.save(tmp_path / "one", *tiny.blockwise(hidden=32)), *folders)
    made = (out / "model.safetensors").stat().st_mtime_ns
    assert widen_head(tmp_path / "one", *folders) == out
    assert (out / "model.safetensors").stat().st_mtime_ns == made
    widen_head(tiny.save(tmp_path / "two", *tiny.blockwise(hidden=32, seed=1)), *folders)
    assert (out / "model.safetensors").stat().st_mtime_ns != made


def test_heads_that_do_not_fit_raise(folders: tuple[Path, Path], tmp_path: Path) -> None:
    narrow, wide = folders
    blockwise = tiny.save(tmp_path / "b", *tiny.blockwise(hidden=32))
    with pytest.raises(InvalidRequest, match="foretoken widen"):
        widen_head(blockwise, narrow, narrow)
    with pytest.raises(InvalidRequest, match="another model"):
        widen_head(blockwise, wide, wide)
    up.widen_checkpoint(narrow, tmp_path / "little", WideShape(48, 48, 3, 6, 3))
    medusa = tiny.save(tmp_path / "m", *tiny.medusa(hidden=32))
    with pytest.raises(InvalidRequest, match="twice"):
        widen_head(medusa, narrow, tmp_path / "little")
    assert not (tmp_path / "little" / "heads").exists()
    with pytest.raises(InvalidRequest, match="EAGLE-3"):
        widen_head(tiny.save(tmp_path / "e", *tiny.eagle1(hidden=32)), narrow, wide)
    with pytest.raises(InvalidRequest, match="made for"):
        widen_head(tiny.save(tmp_path / "w", *tiny.blockwise(hidden=40)), narrow, wide)

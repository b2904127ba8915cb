"""A trained MTP layer is put into its target's checkpoint, and the whole then drafts with it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.core.errors import InvalidRequest
from foretoken.core.files import write_json
from foretoken.core.schema import read_object
from foretoken.models.heads.mtp import HIDDEN_KEY, has_mtp
from foretoken.train.hybrid import HybridModel
from foretoken.train.mtp import merge_mtp

from .test_hybrid import SMALL


@pytest.fixture
def target(tmp_path: Path) -> Path:
    config = SMALL.config(64, 0)
    return written(tmp_path / "target", HybridModel(config).state_dict(), config)


def written(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", config)
    write_json(folder / "provenance.json", {"command": f"train {folder.name}"})
    return folder


def layer_of(folder: Path, name: str, width: int = 32) -> Path:
    model = HybridModel(replace(SMALL, hidden_size=width).config(64, 0))
    tensors = {n: t for n, t in model.state_dict().items() if n.startswith("mtp.")}
    return written(folder / name, tensors, model.config | {HIDDEN_KEY: {"normed": True, "chained_normed": True}})


def test_the_layer_replaces_the_targets_own(target: Path, tmp_path: Path) -> None:
    (target / "tokenizer.json").write_text("{}")
    layer = layer_of(tmp_path, "layer")
    merge_mtp(layer, target, tmp_path / "out")
    whole, before, own = (load_file(f / "model.safetensors") for f in (tmp_path / "out", target, layer))
    assert set(whole) == set(before)
    assert all(torch.equal(whole[n], own[n] if n.startswith("mtp.") else before[n]) for n in whole)
    assert has_mtp(tmp_path / "out") and (tmp_path / "out" / "tokenizer.json").exists()
    assert read_object(tmp_path / "out" / "config.json")[HIDDEN_KEY]["normed"] is True
    facts = read_object(tmp_path / "out" / "provenance.json")
    assert facts == {"command": "train target", "mtp": {"command": "train layer"}}


def test_layers_of_other_shapes_and_targets_of_other_families_are_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no MTP layer of the shape"):
        merge_mtp(layer_of(tmp_path, "wide", 64), target, tmp_path / "out")
    write_json(target / "config.json", read_object(target / "config.json") | {"model_type": "llama"})
    with pytest.raises(InvalidRequest, match="is a 'llama' model"):
        merge_mtp(layer_of(tmp_path, "layer"), target, tmp_path / "out")
    assert not (tmp_path / "out").exists()

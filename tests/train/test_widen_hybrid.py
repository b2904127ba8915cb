"""A widened hybrid computes what the source computes, its MTP layer drafts the same, and routers choose as before."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from foretoken.core.errors import InvalidRequest
from foretoken.core.files import write_json
from foretoken.train.hybrid import HybridModel
from foretoken.train.shapes import HybridShape
from foretoken.train.widen import checkpoint as up
from foretoken.train.widen.hybrid import expected_parameters, like

from .test_cli import invoke
from .test_hybrid import SMALL

NARROW = replace(SMALL, num_hidden_layers=8)
WIDE = replace(
    NARROW,
    hidden_size=96,
    num_hidden_layers=16,
    num_attention_heads=8,
    num_key_value_heads=2,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    num_experts=12,
    moe_intermediate_size=40,
    shared_expert_intermediate_size=35,
)
IDS = torch.arange(2, 66).view(2, 32)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = NARROW.config(128, 0) | {"dtype": "float32"}
    model, folder = HybridModel(config), tmp_path_factory.mktemp("narrow")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand_like(parameter) - 0.5)
            elif parameter.ndim > 1 and "conv1d" not in name:
                parameter.mul_(6)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", config)
    return folder


@pytest.fixture(scope="module")
def wide(narrow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wide") / "wide"
    result = up.widen_checkpoint(narrow, out, WIDE)
    model = trained(out)
    assert result.parameters == sum(p.numel() for p in model.parameters()) + 128 * 96
    return out


def trained(folder: Path) -> HybridModel:
    """The training model with a checkpoint's weights; its own vocabulary head is the embedding."""
    model = HybridModel(json.loads((folder / "config.json").read_text()))
    model.load_state_dict({n: t for n, t in load_file(folder / "model.safetensors").items() if n != "lm_head.weight"})
    return model.eval()


def outputs(folder: Path) -> Any:
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(IDS, output_router_logits=True)


def test_a_widened_hybrid_computes_the_same(narrow: Path, wide: Path) -> None:
    before, after = outputs(narrow).logits, outputs(wide).logits
    assert (before - after).abs().max() < 1e-4 * before.abs().max()
    assert torch.equal(before.argmax(-1), after.argmax(-1))
    config = json.loads((wide / "config.json").read_text())
    assert HybridShape.of(config) == WIDE
    assert config["rms_norm_eps"] == 1e-6


def test_routers_choose_the_same_experts_within_one_group(narrow: Path, wide: Path) -> None:
    before, after = outputs(narrow).router_logits, outputs(wide).router_logits
    groups = set()
    for layer, scores in enumerate(before):
        own, best = scores.topk(2).indices, after[layer if layer < 4 else 8 + layer - 4].topk(2).indices
        assert torch.equal(own, best % 4)
        assert torch.equal(best[:, 0] // 4, best[:, 1] // 4)
        groups |= set((best // 4).flatten().tolist())
    assert groups == {0, 1, 2}  # which one depends on the token


def test_the_mtp_layer_drafts_the_same(narrow: Path, wide: Path) -> None:
    drafted = []
    for folder in (narrow, wide):
        model, weights = trained(folder), load_file(folder / "model.safetensors")
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        with torch.no_grad():
            hidden, _ = model.model(IDS)
            out, _ = model.mtp(model.model.embedded(IDS[:, 1:]), hidden[:, :-1])
            drafted.append(out @ head.T)
    assert (drafted[0] - drafted[1]).abs().max() < 1e-3 * drafted[0].abs().max()


def test_without_more_experts_nothing_is_added_to_the_stream(narrow: Path, tmp_path: Path) -> None:
    same = replace(WIDE, num_experts=4, hidden_size=32)
    up.widen_checkpoint(narrow, tmp_path / "wide", same)
    before, after = outputs(narrow).logits, outputs(tmp_path / "wide").logits
    assert (before - after).abs().max() < 1e-4 * before.abs().max()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": 16}, "hidden_size 16 is less"),
        ({"num_experts": 10}, "10 is not a multiple of 4 experts"),
        ({"num_hidden_layers": 10}, "10 is not a multiple of 4 layers"),
        ({"hidden_size": 33}, "leaves no dimensions"),
        ({"linear_num_value_heads": 4, "linear_num_key_heads": 4}, "fewer than the source's 2"),
        ({"num_key_value_heads": 8}, "fewer than the source's 2"),
    ],
)
def test_sizes_that_cannot_work_are_refused(narrow: Path, tmp_path: Path, change: dict[str, int], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        up.widen_checkpoint(narrow, tmp_path / "wide", replace(WIDE, **change))
    assert not list(tmp_path.iterdir())


def test_the_command_takes_the_sizes_of_hybrids(narrow: Path, tmp_path: Path) -> None:
    sizes = ("--hidden", "64", "--layers", "8", "--heads", "8", "--kv-heads", "2", "--experts", "8")
    invoke("widen", narrow, tmp_path / "wide", "--size", "0.5b-a0.1b", *sizes, "--intermediate", "32")
    assert HybridShape.of(json.loads((tmp_path / "wide" / "config.json").read_text())).num_experts == 8
    with pytest.raises(InvalidRequest, match="heads are widened for a Llama"):
        invoke("widen", narrow, tmp_path / "x", "--head", narrow)


def test_presets_have_the_size_they_are_named_after() -> None:
    config = HybridShape().config(4096, 0)
    for name, billions in (("0.5b-a0.1b", 0.5), ("3b-a0.5b", 3.0)):
        assert expected_parameters(config, like(name, 64), True) / 1e9 == pytest.approx(billions, rel=0.07)

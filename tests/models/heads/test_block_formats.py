"""Layouts of block drafters, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.heads import blocks, tiny

from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.heads.block import BlockHead, read_block
from foretoken.models.heads.dialects import BLOCK_DIALECTS, write_block
from foretoken.models.heads.eagle import read_eagle


def test_layouts_are_read_into_one_form(tmp_path: Path) -> None:
    zlab = read_block(tiny.save(tmp_path / "zlab", *blocks.dflash(taps=(2, 3))))
    assert (zlab.method, zlab.taps, zlab.block, zlab.depth, zlab.mask_token) == ("dflash", (2, 3), 4, 3, 100)
    assert not zlab.from_newest and zlab.ordered == (False, False) and zlab.draft_vocab == 101
    jetspec = read_block(tiny.save(tmp_path / "jetspec", *blocks.jetspec(taps=(2, 3))))
    assert (jetspec.method, jetspec.taps, jetspec.depth, jetspec.ordered) == ("jetspec", (2, 3), 3, (True, True))
    written = blocks.dspark(taps=(0, 2))  # layer -1 are the embeddings
    deepseek = read_block(tiny.save(tmp_path / "deepseek", *written))
    assert (deepseek.method, deepseek.taps, deepseek.depth, deepseek.markov_rank) == ("dspark", (0, 2), 4, 8)
    assert deepseek.from_newest and deepseek.confident and deepseek.confident_of and not deepseek.gated
    other = read_block(tiny.save(tmp_path / "speculators", *blocks.speculators(*written)))
    assert (other.method, other.taps, other.depth, other.draft_vocab) == ("dspark", (0, 2), 4, 40)
    assert other.layer["hidden_size"] == 64 and len(other.ids()) == 40


def test_the_block_size_may_stand_beside_the_mask_token(tmp_path: Path) -> None:
    config, tensors = blocks.dflash()
    config["dflash_config"]["block_size"] = config.pop("block_size")
    assert read_block(tiny.save(tmp_path, config, tensors)).block == 4


def test_use_swa_gives_all_layers_a_window(tmp_path: Path) -> None:
    def head(name: str, **extra: Any) -> BlockHead:
        return read_block(tiny.save(tmp_path / name, *blocks.dflash(**extra)))

    explicit = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "sliding_window_non_causal": True}
    expected, one = head("a", **explicit), {"layer_types": ["sliding_attention", "full_attention"]}
    for number, extra in enumerate(({"sliding_window": 5}, {"swa_window_size": 5, "sliding_window": 9})):
        found = head(f"b{number}", use_swa=True, **extra)
        assert (found.layer, found.ordered) == (expected.layer, expected.ordered) == (expected.layer, (False, False))
    assert head("c", use_swa=True, causal=True, sliding_window=5).ordered == (True, True)
    assert head("d", use_swa=True, sliding_window=5, **one).layer["layer_types"] == one["layer_types"]
    with pytest.raises(ModelLoadError, match="should say 'swa_window_size'"):
        head("e", use_swa=True)
    with pytest.raises(ModelLoadError, match="attention_sink_bias = True"):
        head("f", attention_sink_bias=True)


def test_rows_of_sliding_layers_see_none_behind_them_unless_config_json_says_so(tmp_path: Path) -> None:
    windows: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    assert read_block(tiny.save(tmp_path / "a", *blocks.dflash(**windows))).ordered == (True, False)
    config, tensors = blocks.dflash(**windows, is_causal=False)
    assert read_block(tiny.save(tmp_path / "b", config, tensors)).ordered == (False, False)
    config, tensors = blocks.dflash(**windows)
    config["dflash_config"]["causal"] = True
    assert read_block(tiny.save(tmp_path / "c", config, tensors)).ordered == (True, True)
    config, tensors = blocks.speculators(*blocks.dspark(**windows))
    config["sliding_window_non_causal"] = True
    assert read_block(tiny.save(tmp_path / "d", config, tensors)).ordered == (False, False)


def test_the_names_of_deepseeks_checkpoints_are_read(tmp_path: Path) -> None:
    """Names of deepseek-ai/dspark_qwen3_4b_block7, as vLLM's and SGLang's loaders document them."""
    layer = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm")
    layer += ("self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm")
    layer += ("post_attention_layernorm",)
    ends = ("embed_tokens.weight", "lm_head.weight", "norm.weight", "fc.weight", "hidden_norm.weight")
    heads = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight")
    names = {f"layers.{i}.{part}.weight" for i in range(2) for part in layer}
    names |= {*ends, *heads, "confidence_head.proj.bias"}
    config, tensors = blocks.dspark()
    assert set(tensors) == names
    assert set(read_block(tiny.save(tmp_path, config, tensors)).tensors) == names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "lacks mask_token_id"),
        ({"dflash_config": {"mask_token_id": 3}}, "lacks target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 101, "target_layer_ids": [0, 1]}}, "beyond its vocabulary of 101"),
        ({"dflash_config": {"mask_token_id": -1, "target_layer_ids": [0, 1]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": ["a"]}}, "target_layer_ids"),
        ({"block_size": None}, "should say 'block_size'"),
        ({"block_size": 1}, "predict nothing"),
        ({"output_multiplier": 0.5}, "output_multiplier"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "sigmoid"}, "activation 'sigmoid'"),
        ({"speculators_model_type": "eagle3"}, "speculator of the kind 'eagle3'"),
        ({"hidden_size": 32}, "has the shape"),
    ],
)
def test_settings_that_are_not_computed_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config, tensors = blocks.dflash()
    with pytest.raises(ModelLoadError, match=message):
        read_block(tiny.save(tmp_path, {**config, **changes}, tensors))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("fc.weight", torch.tensor(1.0)),
        ("fc.weight", torch.ones(64)),
        ("t2d", torch.tensor(True)),
        ("markov_head.markov_w1.weight", torch.ones(101)),
        ("lm_head.weight", torch.tensor(1.0)),
        ("layers.0.self_attn.q_proj.bias", torch.ones(3)),
        ("confidence_head.proj.bias", torch.ones(2)),
    ],
)
def test_tensors_of_wrong_shapes_are_refused(name: str, tensor: torch.Tensor, tmp_path: Path) -> None:
    config, tensors = blocks.dspark()
    biases = {f"layers.0.self_attn.{p}_proj.bias": torch.ones(n) for p, n in zip("qkv", (64, 32, 32), strict=True)}
    assert read_block(tiny.save(tmp_path / "a", config, {**tensors, **biases})).layers == 2
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.") + ".* has the shape"):
        read_block(tiny.save(tmp_path / "b", config, {**tensors, **biases, name: tensor}))


@pytest.mark.parametrize(("name", "shape"), [("fc.weight", ()), ("midlayer.self_attn.k_proj.bias", (3,))])
def test_tensors_of_wrong_shapes_are_refused_in_eagle_heads(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    config, tensors = tiny.eagle3()
    biases = {f"midlayer.self_attn.{p}_proj.bias": torch.ones(n) for p, n in zip("qkv", (64, 32, 32), strict=True)}
    assert read_eagle(tiny.save(tmp_path / "a", config, {**tensors, **biases})).version == 3
    with pytest.raises(ModelLoadError, match=r"(fc\.weight|k_proj\.bias) in .* has the shape"):
        read_eagle(tiny.save(tmp_path / "b", config, {**tensors, **biases, name: torch.ones(shape)}))


def test_heads_of_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"lacks hidden_norm\.weight or its layers"):
        read_block(tiny.save(tmp_path / "eagle", *tiny.eagle3()))
    config, tensors = blocks.dspark()
    with pytest.raises(ModelLoadError, match="Markov head of the type 'rnn'"):
        read_block(tiny.save(tmp_path / "rnn", {**config, "markov_head_type": "rnn"}, tensors))
    config, tensors = blocks.dflash()
    further = {"candidate_selector.hidden_projection": "DFlash 2", "lilicorr.out_head": "LiLiCorr"}
    for name, kind in further.items():
        with pytest.raises(ModelLoadError, match=f"is a {kind} head"):
            read_block(tiny.save(tmp_path / kind, config, {**tensors, f"{name}.weight": torch.zeros(2, 64)}))
    config, tensors = blocks.speculators(*blocks.dspark())
    del tensors["d2t"]
    with pytest.raises(ModelLoadError, match="lacks d2t"):
        read_block(tiny.save(tmp_path / "map", config, tensors))


WRITTEN = {
    "dflash": blocks.dflash(),
    "jetspec": blocks.jetspec(),
    "dspark": blocks.dspark(),
    "speculators": blocks.speculators(*blocks.dspark()),
}


@pytest.mark.parametrize("layout", WRITTEN)
@pytest.mark.parametrize("dialect", BLOCK_DIALECTS)
def test_every_layout_keeps_what_is_computed(layout: str, dialect: str, tmp_path: Path) -> None:
    written = WRITTEN[layout]
    head = read_block(tiny.save(tmp_path / "a", *written))
    if (layout, dialect) == ("jetspec", "speculators"):
        with pytest.raises(InvalidRequest, match="write it for original"):
            write_block(head, dialect, torch.zeros(101, 64))
        return
    borrowed = torch.randn(101, 64) if "lm_head.weight" not in head.tensors else None
    again = read_block(tiny.save(tmp_path / "b", *write_block(head, dialect, borrowed, "target")))
    names = ("method", "causal", "block", "mask_token", "from_newest", "taps", "ordered", "vocab", "draft_vocab")
    for name in (*names, "gated", "confident_of", "target_hidden"):
        assert getattr(again, name) == getattr(head, name), name
    assert all(again.tensors[name].equal(tensor) for name, tensor in head.tensors.items())


def test_layouts_without_a_key_for_the_setting_are_refused(tmp_path: Path) -> None:
    head = read_block(tiny.save(tmp_path / "a", *blocks.dflash()))
    with pytest.raises(InvalidRequest, match="--target"):
        write_block(head, "speculators")
    with pytest.raises(InvalidRequest, match="not of 5 x 5"):
        write_block(head, "speculators", torch.zeros(5, 5))
    with pytest.raises(InvalidRequest, match="original, vllm, sglang, speculators"):
        write_block(head, "medusa")
    config, tensors = blocks.speculators(*blocks.dspark())
    shifted = read_block(tiny.save(tmp_path / "b", {**config, "sample_from_anchor": False}, tensors))
    with pytest.raises(InvalidRequest, match="sample_from_anchor"):
        write_block(shifted, "original")

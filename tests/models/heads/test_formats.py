"""Checkpoints of heads: every format is read, round trips keep every bit, and wrong files are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.models.heads import tiny

from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.heads.dialects import EAGLE_DIALECTS, Written, write_eagle
from foretoken.models.heads.eagle import read_eagle
from foretoken.models.heads.medusa import read_blockwise, read_medusa, write_blockwise, write_medusa


def _same(one: tiny.Tensors, other: tiny.Tensors) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


def _bfloat16(written: Written) -> Written:
    config, tensors = written
    return config, {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}


@pytest.mark.parametrize("first", EAGLE_DIALECTS)
@pytest.mark.parametrize("second", EAGLE_DIALECTS)
def test_eagle_round_trips_keep_every_bit(first: str, second: str, tmp_path: Path) -> None:
    settings = {"norm_before_residual": True, "fc_norm": True, "norm_output": True}
    windows = {"layer_types": ["sliding_attention"], "sliding_window": 9}
    original = read_eagle(tiny.save(tmp_path / "0", *_bfloat16(tiny.eagle3(**settings, **windows))))
    once = read_eagle(tiny.save(tmp_path / "1", *write_eagle(original, first, verifier="org/name")))
    back = read_eagle(tiny.save(tmp_path / "2", *write_eagle(once, second)))
    for head in (once, back):
        _same(original.tensors, head.tensors)
        assert head.window == 9
        for key in ("layer", "taps", "exact", "vocab", "draft_vocab", "target_hidden", *settings):
            assert getattr(head, key) == getattr(original, key), key


@pytest.mark.parametrize("dialect", EAGLE_DIALECTS)
def test_heads_that_predict_all_positions_keep_their_mask(dialect: str, tmp_path: Path) -> None:
    original = read_eagle(tiny.save(tmp_path / "0", *tiny.eagle3(mask=9, norm_before_residual=True)))
    config, tensors = write_eagle(original, dialect)
    assert config["pard_token"] == 9
    assert config.get("speculators_model_type") == ("peagle" if dialect == "speculators" else None)
    back = read_eagle(tiny.save(tmp_path / "1", config, tensors))
    _same(original.tensors, back.tensors)
    assert original.mask_token == back.mask_token == 9


def test_a_mask_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="pard_token"):
        read_eagle(tiny.save(tmp_path, *tiny.eagle3(mask=101)))


def test_names_and_keys_are_those_of_each_engine(tmp_path: Path) -> None:
    head = read_eagle(tiny.save(tmp_path, *tiny.eagle3()))
    config, tensors = write_eagle(head, "sglang")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "midlayer.self_attn.q_proj.weight" in tensors
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 1]  # it adds 1
    config, tensors = write_eagle(head, "vllm")
    assert config["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert "layers.0.self_attn.q_proj.weight" in tensors
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 2]
    config, _ = write_eagle(head, "speculators", verifier="org/name")
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/name"
    assert config["transformer_layer_config"]["num_attention_heads"] == 4


def test_ids_without_our_key_are_open_and_absent_ones_are_not(tmp_path: Path) -> None:
    config, tensors = tiny.eagle3()
    del config["foretoken_taps"]
    assert read_eagle(tiny.save(tmp_path / "a", config, tensors)).exact
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}
    head = read_eagle(tiny.save(tmp_path / "b", config, tensors))
    assert (head.taps, head.exact) == ((1, 2, 2), False)
    del config["eagle_config"]
    head = read_eagle(tiny.save(tmp_path / "c", config | {"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}, tensors))
    assert (head.taps, head.exact) == ((1, 2, 2), False)


@pytest.mark.parametrize("dialect", EAGLE_DIALECTS)
def test_no_maps_are_written_between_equal_vocabularies(dialect: str, tmp_path: Path) -> None:
    """vLLM refuses a head with such maps, which some trainers write."""
    config, tensors = tiny.eagle3(vocab=60, draft_vocab=60)
    maps = {"d2t": torch.zeros(60, dtype=torch.int64), "t2d": torch.ones(60, dtype=torch.bool)}
    head = read_eagle(tiny.save(tmp_path, config, tensors | maps))
    _, written = write_eagle(head, dialect, verifier="org/name")
    assert not maps.keys() & written.keys()


def test_offsets_become_ids(tmp_path: Path) -> None:
    config, tensors = tiny.eagle3()
    head = read_eagle(tiny.save(tmp_path, config, tensors))
    assert torch.equal(head.ids(), tensors["t2d"].nonzero()[:, 0])


@pytest.mark.parametrize("own", [1, 3])
def test_medusa_round_trips_keep_every_bit(own: int, tmp_path: Path) -> None:
    config, tensors = tiny.medusa(own=3, layers=2)
    config["original_lm_head"] = False
    if own == 1:
        tensors |= {f"lm_heads.{i}.weight": tensors["lm_heads.0.weight"].clone() for i in range(3)}
    heads = read_medusa(tiny.save(tmp_path / "0", config, tensors))
    assert len(heads.vocabulary) == own
    original = tiny.save(tmp_path / "1", *write_medusa(heads, "medusa"))
    assert {"0.0.linear.weight", "2.1.linear.bias", "2.2.weight"} <= load_file(original / "model.safetensors").keys()
    back = tiny.save(tmp_path / "2", *write_medusa(read_medusa(original), "vllm"))
    written = load_file(back / "model.safetensors")
    if own == 1:  # one that all share is stored once, as vLLM loads it
        assert json.loads((back / "config.json").read_text())["original_lm_head"]
        written |= {f"lm_heads.{i}.weight": written["lm_head.weight"] for i in range(3)}
        del written["lm_head.weight"]
    _same(tensors, written)
    assert json.loads((back / "config.json").read_text())["medusa_fc_bias"]


def test_medusa_heads_without_a_vocabulary_head_need_the_targets_to_be_written(tmp_path: Path) -> None:
    heads = read_medusa(tiny.save(tmp_path, *tiny.medusa()))
    assert heads.vocabulary == ()
    with pytest.raises(InvalidRequest, match="--target"):
        write_medusa(heads, "vllm")
    matrix = torch.randn(101, 64)
    _, tensors = write_medusa(heads.with_vocabulary(matrix), "vllm")
    assert torch.equal(tensors["lm_head.weight"], matrix)


def test_blockwise_round_trip(tmp_path: Path) -> None:
    config, tensors = tiny.blockwise()
    written = write_blockwise(read_blockwise(tiny.save(tmp_path, config, tensors)))
    assert written[0] == config
    _same(written[1], tensors)


def _eagle_without(name: str) -> Written:
    config, tensors = tiny.eagle3()
    return config, {n: t for n, t in tensors.items() if n != name}


def _changed(kind: Written, config: dict[str, Any], tensors: tiny.Tensors) -> Written:
    return kind[0] | config, kind[1] | tensors


DAMAGED = {
    "fc": (_eagle_without("fc.weight"), "not an EAGLE head"),
    "map": (_eagle_without("d2t"), "lack the tensor 'd2t'"),
    "norm": (_eagle_without("norm.weight"), "lack the tensor 'norm.weight'"),
    "size": (_changed(tiny.eagle3(), {"intermediate_size": 56}, {}), r"config.json says \(56, 64\)"),
    "odd": (_changed(tiny.eagle3(), {}, {"midlayer.self_attn.q_norm.weight": torch.ones(16)}), "not computed here"),
    "ids": (_changed(tiny.eagle3(), {}, {"d2t": torch.full((40,), 99)}), "outside the vocabulary"),
    "no number": (_changed(tiny.eagle3(), {"hidden_size": "many"}, {}), "positive integer"),
    "window": (_changed(tiny.eagle3(), {"layer_types": ["sliding_attention"]}, {}), "should say 'sliding_window'"),
    "mixed": (_changed(tiny.eagle3(layers=2), {"layer_types": ["sliding_attention", "full_attention"]}, {}), "window"),
    "kind": (_changed(tiny.eagle3(), {"speculators_model_type": "dflash"}, {}), "'dflash'"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_eagle_heads_are_refused(name: str, tmp_path: Path) -> None:
    written, message = DAMAGED[name]
    with pytest.raises(ModelLoadError, match=message) as raised:
        read_eagle(tiny.save(tmp_path, *written))
    assert "\n" not in str(raised.value)


def test_other_damaged_heads_are_refused(tmp_path: Path) -> None:
    path = tiny.save(tmp_path / "cut", *tiny.medusa())
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="truncated"):
        read_medusa(path)
    path = tiny.save(tmp_path / "pickle", *tiny.medusa())
    (path / "model.safetensors").rename(path / "medusa_lm_head.pt")
    with pytest.raises(ModelLoadError, match=r"pickle .* save_file"):
        read_medusa(path)
    with pytest.raises(ModelLoadError, match="no Medusa heads"):
        read_medusa(tiny.save(tmp_path / "other", tiny.medusa()[0], tiny.blockwise()[1]))
    with pytest.raises(ModelLoadError, match="model_type"):
        read_blockwise(tiny.save(tmp_path / "third", *tiny.medusa()))
    with pytest.raises(ModelLoadError, match=r"num_heads"):
        read_medusa(tiny.save(tmp_path / "none", {**tiny.medusa()[0], "num_heads": None}, tiny.medusa()[1]))


def test_dialects_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    head = read_eagle(tiny.save(tmp_path / "1", *tiny.eagle1()))
    with pytest.raises(InvalidRequest, match="speculators"):
        write_eagle(head, "speculators")
    with pytest.raises(InvalidRequest, match="one layer"):
        write_eagle(read_eagle(tiny.save(tmp_path / "2", *tiny.eagle3(layers=2))), "sglang")
    with pytest.raises(InvalidRequest, match="no dialect 'sglang'"):
        write_medusa(read_medusa(tiny.save(tmp_path / "3", *tiny.medusa(own=3))), "sglang")


def test_eagle1_is_supported(tmp_path: Path) -> None:
    config, tensors = tiny.eagle1()
    head = read_eagle(tiny.save(tmp_path, config, tensors))
    assert (head.version, head.taps, head.target_hidden) == (1, None, 64)
    _same(head.tensors, tensors)

"""Architectures of config.json files, old and new, and of the metadata of GGUF files; refusals with their reasons."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as K
from transformers import CONFIG_MAPPING

from foretoken.core.errors import ModelLoadError
from foretoken.models.families.architecture import Architecture, supports, unsupported
from foretoken.models.families.table import FAMILIES
from foretoken.models.formats.checkpoint import load_config, open_weights

from .gguf_files import finish
from .tiny import ARCHITECTURES

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Files of the others are incomplete without rotary settings, or transformers has no configuration of that name.
SILENT = sorted(set(FAMILIES) - {"ministral3", "glm4v_text", "exaone4_5_text", "mimo"})


def bare(family: str, **more: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **more}


@pytest.mark.parametrize("family", SILENT)
def test_missing_fields_have_transformers_defaults(family: str) -> None:
    """A file of sizes alone means the same as the full file that transformers writes."""
    kind, aliases = CONFIG_MAPPING[family], FAMILIES[family].aliases
    known = vars(kind())
    own = {name: alias if (alias := aliases.get(name, name)) in known else name for name in SIZES}
    sizes = {own[name]: value for name, value in SIZES.items() if own[name] in known}
    if family == "gptj":
        sizes["rotary_dim"] = 8  # the default, 64, is wider than these heads
    if family == "gemma4_text":
        sizes["vocab_size_per_layer_input"] = sizes["vocab_size"]  # the default is that of its own tokenizer
    if family == "gpt_neo":
        sizes |= {"num_layers": 8, "attention_types": [[["global", "local"], 4]]}
    silent, full = {"model_type": family, **sizes}, json.loads(kind(**sizes).to_json_string(use_diff=False))
    assert supports(silent) and supports(full | {"model_type": family})
    one, other = Architecture.of(silent), Architecture.of(full | {"model_type": family})
    for name in Architecture.__slots__:
        if name != "frequencies":
            assert getattr(one, name) == getattr(other, name), name
    assert len(one.frequencies) == len(other.frequencies)
    assert all(torch.allclose(a, b) for a, b in zip(one.frequencies, other.frequencies, strict=True))


def test_the_old_form_of_gemma_3_is_supported() -> None:
    old = bare(
        "gemma3_text", rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling={"rope_type": "linear", "factor": 8}
    )
    a = Architecture.of(old | {"sliding_window_pattern": 3, "sliding_window": 16})
    assert a.windows == (16, 16, 0, 16, 16, 0, 16) and a.rope == (1, 1, 0, 1, 1, 0, 1)
    exponents = torch.arange(0, 256, 2).float() / 256
    assert torch.allclose(a.frequencies[0], 1 / (5e5**exponents) / 8)
    assert torch.allclose(a.frequencies[1], 1 / (2e4**exponents))


def test_only_deepseek_v2_reads_how_groups_of_experts_are_chosen() -> None:
    greedy = {"topk_method": "greedy", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 4}
    for family, groups in (("deepseek_v2", 1), ("deepseek_v3", 8)):
        experts = Architecture.of({**bare(family), **greedy}).stack[-1].experts
        assert experts is not None and experts.groups == groups


def test_older_files_of_llama_4_have_a_number_for_true() -> None:
    config = {**CONFIG_MAPPING["llama4_text"](num_hidden_layers=4).to_dict(), "attn_temperature_tuning": 4}
    assert Architecture.of(config).query_growth is not None
    assert Architecture.of({**config, "attn_temperature_tuning": 0}).query_growth is None


def test_windows_and_rotary_tables_by_layer() -> None:
    assert Architecture.of(bare("llama", sliding_window=8)).windows == (0,) * 7  # Llama has no windows
    assert Architecture.of(bare("mistral", sliding_window=None)).windows == (0,) * 7
    assert Architecture.of(bare("qwen2", sliding_window=8)).windows == (0,) * 7
    some = bare("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=5)
    assert Architecture.of(some).windows == (0, 0, 0, 0, 0, 8, 8)
    assert Architecture.of(bare("gemma2", sliding_window=8)).windows == (8, 0, 8, 0, 8, 0, 8)
    assert Architecture.of(bare("smollm3")).rope == (0, 0, 0, -1, 0, 0, 0)
    assert Architecture.of(bare("llama"), max_length=50).max_length == 50
    assert Architecture.of(bare("llama"), max_length=500).max_length == 128


@pytest.mark.parametrize(
    "config",
    [
        bare("mamba"),
        bare("llama", hidden_act="quick_gelu"),
        bare("llama", rope_scaling={"rope_type": "unheard", "factor": 2.0}),
        bare("gemma3_text", use_bidirectional_attention=True),
        bare("opt", ffn_dim=96, do_layer_norm_before=False),
        bare("opt", ffn_dim=96, word_embed_proj_dim=32),
        bare("gpt2", scale_attn_by_inverse_layer_idx=True),
        bare("bloom", apply_residual_connection_post_layernorm=True),
        bare("mpt", attn_config={"qk_ln": True}),
        bare("qwen3", layer_types=["chunked_attention"] * 7),
        bare("deepseek_v2", topk_method="noaux_tc"),
    ],
    ids=lambda c: str(c["model_type"]),
)
def test_unsupported_architectures_are_left_to_transformers(config: dict[str, Any]) -> None:
    assert not supports(config) and unsupported(config)


def test_a_missing_field_is_named_as_the_file_names_it() -> None:
    config = {"model_type": "gpt2", "vocab_size": 100, "n_head": 4, "n_layer": 2, "n_positions": 64}
    with pytest.raises(ModelLoadError, match=r"config\.json lacks 'n_embd'"):
        Architecture.of(config)
    with pytest.raises(ModelLoadError, match=r"config\.json has n_embd = -1"):
        Architecture.of(config | {"n_embd": -1, "n_inner": 8})


def test_longrope_takes_its_factors_by_the_maximum_length() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = bare("phi3", rope_scaling=scaling, original_max_position_embeddings=64)
    short, long = Architecture.of(config, 64), Architecture.of(config)
    assert torch.allclose(short.frequencies[0] / 2, long.frequencies[0])
    assert short.rotary_scales == long.rotary_scales == (math.sqrt(1 + math.log(2) / math.log(64)),)
    with pytest.raises(ModelLoadError, match="7 numbers in short_factor; expected 8"):
        Architecture.of(config | {"rope_scaling": scaling | {"short_factor": [1.0] * 7}})


@pytest.mark.parametrize("missing", ["hidden_size", "num_attention_heads", "vocab_size", "rms_norm_eps"])
def test_a_missing_size_is_named(missing: str) -> None:
    with pytest.raises(ModelLoadError, match=f"config.json lacks '{missing}'"):
        Architecture.of({k: v for k, v in bare("llama").items() if k != missing})


def test_shapes_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    from foretoken.models.loading import load_model

    path = ARCHITECTURES["llama"].save(tmp_path / "llama")
    config = json.loads((path / "config.json").read_text())
    for change in ({"intermediate_size": 50}, {"num_key_value_heads": 4}, {"vocab_size": 99}):
        (path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelLoadError, match=r"have the shape .* but config.json says"):
            load_model(path, "float32", "cpu")


Change = Callable[[Any], None]


def written(path: Path, architecture: str, change: Change, layers: int = 2, heads: int = 4) -> Path:
    """Writes a file with the settings of a tiny model and its embedding alone."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(48)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(64)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((16, 48), np.float32))
    change(writer)
    finish(writer)
    return path


def nothing(writer: Any) -> None:
    """Changes nothing."""


def test_missing_keys_take_llama_cpps_defaults(tmp_path: Path) -> None:
    config = load_config(written(tmp_path / "model.gguf", "llama", nothing))
    assert config["head_dim"] == 12 and config["rope_theta"] == 10000.0 and config["vocab_size"] == 16
    assert config["rms_norm_eps"] == 1e-6 and config["tie_word_embeddings"] and supports(config)


def linear(writer: Any) -> None:
    writer.add_string(f"{writer.arch}.rope.scaling.type", "linear")
    writer.add_float32(f"{writer.arch}.rope.scaling.factor", 8.0)


def test_linear_scaling_divides_the_frequencies(tmp_path: Path) -> None:
    plain = Architecture.of(load_config(written(tmp_path / "plain.gguf", "qwen2", nothing)))
    scaled = Architecture.of(load_config(written(tmp_path / "linear.gguf", "qwen2", linear)))
    assert (plain.frequencies[0] / 8 == scaled.frequencies[0]).all()


def test_linear_scaling_of_gemma3_leaves_its_sliding_layers(tmp_path: Path) -> None:
    plain = Architecture.of(load_config(written(tmp_path / "plain.gguf", "gemma3", nothing)))
    scaled = Architecture.of(load_config(written(tmp_path / "linear.gguf", "gemma3", linear)))
    assert (plain.frequencies[0] / 8 == scaled.frequencies[0]).all()
    assert (plain.frequencies[1] == scaled.frequencies[1]).all()


def test_a_pattern_of_windows_may_be_listed(tmp_path: Path) -> None:
    def listed(writer: Any) -> None:
        writer.add_sliding_window(16)
        writer.add_sliding_window_pattern([True, False, True, False])

    architecture = Architecture.of(load_config(written(tmp_path / "model.gguf", "gemma3", listed, layers=4)))
    assert architecture.windows == (16, 0, 16, 0)


@pytest.mark.parametrize("architecture, layers", [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_by_its_width(architecture: str, layers: int, tmp_path: Path) -> None:
    def wide(writer: Any) -> None:
        writer.add_key_length(32)
        writer.add_value_length(32)

    small = Architecture.of(load_config(written(tmp_path / "small.gguf", architecture, wide)))
    large = Architecture.of(load_config(written(tmp_path / "large.gguf", architecture, wide, layers=layers)))
    assert small.scale == 32**-0.5 and large.scale == (48 / 4) ** -0.5


def key(name: str, value: Any) -> Change:
    """Returns a change that adds a number to the architecture's keys."""

    def change(writer: Any) -> None:
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{writer.arch}.{name}", value)

    return change


def scaling(kind: str) -> Change:
    return lambda writer: writer.add_string(f"{writer.arch}.rope.scaling.type", kind)


def tensor(name: str, kind: K = K.F32, shape: tuple[int, ...] = (4,)) -> Change:
    def change(writer: Any) -> None:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = np.zeros((*shape[:-1], shape[-1] // block * size), np.uint8)
        writer.add_tensor(name, data.view(np.float32) if kind == K.F32 else data, raw_dtype=kind)

    return change


@pytest.mark.parametrize(
    "architecture, change, message",
    [
        ("mamba", nothing, "architecture 'mamba'.*llama, mistral"),
        ("llama", key("expert_count", 8), "lacks the key llama.expert_used_count"),
        ("llama", key("attention.clamp_kqv", 3.0), "clamp_kqv"),
        ("mistral3", key("attention.temperature_scale", 0.1), "temperature_scale"),
        ("llama4", key("attention.sliding_window", 0), "no chunks of attention or no experts"),
        ("llama", key("attention.value_length", 16), "different lengths"),
        ("qwen2", scaling("yarn"), "lacks the key qwen2.rope.scaling.original_context_length"),
        ("qwen2", scaling("su"), "'su', which is not computed"),
        ("phi3", scaling("longrope"), "'longrope', which is not computed"),
        ("phi3", tensor("rope_factors_long.weight"), r"rope_factors_long.weight \(4,\)"),
        ("lfm2moe", key("expert_gating_func", 1), "lacks the key|expert_gating_func = 1"),
        ("qwen35", nothing, "lacks the key qwen35.ssm.inner_size"),
        ("llama", tensor("rope_freqs.weight"), r"rope_freqs.weight \(4,\)"),
        ("llama", lambda writer: writer.add_uint16("split.count", 3), "one of 3 parts"),
        (
            "llama",
            lambda writer: writer.add_string("llama.attention.key_length", "x"),
            "key_length = 'x'; expected int",
        ),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused(architecture, change, message, tmp_path):
    with pytest.raises(ModelLoadError, match=message):
        load_config(written(tmp_path / "model.gguf", architecture, change))


@pytest.mark.parametrize(
    "change, message",
    [
        (tensor("blk.0.attn_sinks.weight"), "'blk.0.attn_sinks.weight', which its architecture does not have"),
        (tensor("blk.0.attn_q_norm.weight"), "attn_q_norm.weight"),
        (tensor("blk.01.attn_norm.weight"), "blk.01"),
        (tensor("blk.0.ffn_up.weight", K.IQ2_XXS, (4, 256)), "as IQ2_XXS; supported"),
        (tensor("blk.0.attn_norm.weight", K.Q8_0, (32,)), r"\(32,\) as Q8_0"),
        (tensor("blk.0.attn_k.weight", K.F32, (6, 48)), "which 2 heads do not divide"),
        (tensor("blk.0.attn_qkv.weight", K.F32, (95, 48)), r"attn_qkv.weight \(95, 48\), but its keys say 96 rows"),
        (tensor("blk.0.ffn_up.weight", K.F32, (2, 4, 48)), r"\(2, 4, 48\) as F32"),
    ],
)
def test_tensors_that_are_not_computed_are_refused(change: Change, message: str, tmp_path: Path) -> None:
    file = written(tmp_path / "model.gguf", "llama", change)
    with pytest.raises(ModelLoadError, match=message):
        open_weights(file)


def test_a_part_of_a_head_may_be_rotated(tmp_path: Path) -> None:
    config = load_config(written(tmp_path / "model.gguf", "phi3", key("rope.dimension_count", 6)))
    assert supports(config) and len(Architecture.of(config).frequencies[0]) == 3

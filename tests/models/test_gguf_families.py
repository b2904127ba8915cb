"""Metadata of GGUF files as a configuration, and refusals with their reasons."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as K

from foretoken.core.errors import ModelLoadError
from foretoken.models.families.architecture import Architecture, supports
from foretoken.models.formats.checkpoint import load_config, open_weights

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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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

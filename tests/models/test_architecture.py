"""The architecture of config.json files: old and new forms, and missing fields."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from foretoken.core.errors import ModelLoadError
from foretoken.models.families.architecture import Architecture, supports, unsupported
from foretoken.models.families.table import FAMILIES

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

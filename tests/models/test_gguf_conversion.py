"""Files of the architectures that llama.cpp's converter changes in many ways: the same tensors and logits come back."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType as K
from torch import Tensor
from transformers import CONFIG_MAPPING

from foretoken.core.draft import Draft
from foretoken.core.errors import ModelLoadError
from foretoken.models.base import Model
from foretoken.models.families.architecture import Architecture, unsupported
from foretoken.models.formats.checkpoint import open_weights
from foretoken.models.formats.gguf.families import FAMILIES, config_of
from foretoken.models.formats.gguf.header import Header
from foretoken.models.formats.gguf.weights import GGUFWeights
from foretoken.models.formats.quantize import Grouped
from foretoken.models.loading import load_model

from . import dense, gguf_files, tiny
from .adapters import load_adapter, save_adapter
from .gguf_converter import convert
from .test_native import needs_kernels

pytestmark = pytest.mark.slow

IDS = [3 + (17 * at) % 90 for at in range(24)]
DRAFT = Draft.chain([7, 8, 9])


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint: its architecture in GGUF, and the model type and settings of transformers."""

    architecture: str
    kind: str
    config: dict[str, Any]


def dense_case(architecture: str, name: str, **changes: Any) -> Case:
    kind, config = dense.CASES[name]
    return Case(architecture, kind, {**config, **changes})


def tiny_case(architecture: str, kind: str, config: dict[str, Any], **changes: Any) -> Case:
    return Case(architecture, kind, {**config, "vocab_size": 101, **changes})


HYBRID = {
    **tiny.QWEN_HYBRID,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MIXED = {name: value for name, value in HYBRID.items() if name != "intermediate_size"} | tiny.FEW_EXPERTS
LATENT = {**tiny.LATENT, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
LATENT_YARN = {**tiny.LATENT_YARN, "truncate": True, "mscale": 1.0, "mscale_all_dim": 1.0}
MAMBA = {name: value for name, value in tiny.MAMBA.items() if name != "mamba_proj_bias"} | {"mamba_d_head": 32}
FALCON_H1 = {name: value for name, value in tiny.FALCON_H1.items() if "bias" not in name} | {"head_dim": 16}
NEMOTRON_H = {name: value for name, value in tiny.NEMOTRON_H.items() if "bias" not in name}
SCOUT_ROPE = {**tiny.LLAMA3_ROPE, "high_freq_factor": 1.0}
LLAMA4 = {  # what a file does not say is as in Llama 4 Scout
    name: value
    for name, value in tiny.LLAMA4.items()
    if name
    not in ("moe_layers", "no_rope_layers", "attention_chunk_size", "floor_scale", "attn_scale", "rope_parameters")
}
CONVOLUTIONS = ["conv", "full_attention", "conv"]
CASES = {
    "qwen35": tiny_case("qwen35", "qwen3_5_text", HYBRID),
    "qwen35moe": tiny_case("qwen35moe", "qwen3_5_moe_text", MIXED),
    "qwen3next": tiny_case("qwen3next", "qwen3_next", MIXED),
    "glm": dense_case("chatglm", "glm", head_dim=16),
    "glm4": dense_case("glm4", "glm4"),
    "glm4moe": tiny_case("glm4moe", "glm4_moe", tiny.ARCHITECTURES["glm4-moe"].config),
    "deepseek2, softmax": tiny_case(
        "deepseek2", "deepseek_v2", LATENT, q_lora_rank=None, topk_method="greedy", routed_scaling_factor=1.0
    ),
    "deepseek2, sigmoid": tiny_case("deepseek2", "deepseek_v3", LATENT, rope_parameters=LATENT_YARN),
    "glm-4.7-flash": tiny_case(
        "deepseek2", "glm4_moe_lite", LATENT, first_k_dense_replace=1, mlp_layer_types=["dense", "sparse"]
    ),
    "minicpm3": dense_case(
        "minicpm3", "minicpm3", scale_depth=1.4, dim_model_base=256, v_head_dim=16, rope_parameters=None
    ),
    "lfm2": tiny_case(
        "lfm2", "lfm2", tiny.GROUPED, num_hidden_layers=3, layer_types=CONVOLUTIONS, block_multiple_of=16
    ),
    "lfm2moe": tiny_case(
        "lfm2moe",
        "lfm2_moe",
        tiny.EXPERTS,
        num_hidden_layers=3,
        layer_types=CONVOLUTIONS,
        num_dense_layers=1,
        tie_word_embeddings=True,
    ),
    "granite": dense_case("granite", "granite"),
    "granitemoe": tiny_case("granitemoe", "granitemoeshared", tiny.ARCHITECTURES["granitemoeshared"].config),
    "granitehybrid": tiny_case(
        "granitehybrid",
        "granitemoehybrid",
        MAMBA | tiny.GRANITE,
        num_local_experts=6,
        num_experts_per_tok=2,
        shared_intermediate_size=40,
        layer_types=HYBRID["layer_types"],
    ),
    "granitehybrid, dense": tiny_case(
        "granitehybrid",
        "granitemoehybrid",
        MAMBA | tiny.GRANITE,
        num_local_experts=0,
        shared_intermediate_size=72,
        layer_types=HYBRID["layer_types"],
    ),
    "falcon-h1": tiny_case("falcon-h1", "falcon_h1", FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False),
    "nemotron_h": tiny_case("nemotron_h_moe", "nemotron_h", NEMOTRON_H),
    "gemma4": dense_case("gemma4", "gemma4", vocab_size_per_layer_input=101),
    "gemma4, one matrix for keys and values": dense_case("gemma4", "gemma4, one matrix for keys and values"),
    "gemma4, experts": dense_case("gemma4", "gemma4, experts"),
    "olmo": dense_case("olmo", "olmo"),
    "olmo2": dense_case("olmo2", "olmo2"),
    "olmo3": dense_case("olmo2", "olmo3"),
    "command-r": dense_case("command-r", "cohere", tie_word_embeddings=True),
    "cohere2": dense_case("cohere2", "cohere2"),
    "exaone4": dense_case("exaone4", "exaone4"),
    "seed_oss": dense_case("seed_oss", "seed_oss"),
    "ernie4_5": dense_case("ernie4_5", "ernie4_5"),
    "hunyuan": dense_case(
        "hunyuan-dense", "hunyuan_v1_dense", rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    ),
    "ernie4_5-moe": tiny_case(
        "ernie4_5-moe", "ernie4_5_moe", tiny.ARCHITECTURES["ernie4-5-moe"].config, moe_layer_end_index=2
    ),
    "exaone-moe": tiny_case("exaone-moe", "exaone_moe", tiny.ARCHITECTURES["exaone-moe"].config),
    "starcoder2": dense_case("starcoder2", "starcoder2", sliding_window=None),
    "stablelm": dense_case("stablelm", "stablelm, parallel"),
    "nemotron": dense_case("nemotron", "nemotron", head_dim=16),
    "arcee": dense_case("arcee", "arcee"),
    "jais2": dense_case("jais2", "jais2"),
    "phi2": dense_case("phi2", "phi, no norms of heads", num_key_value_heads=4),
    "phi3, longrope": dense_case("phi3", "phi3, longrope"),
    "gpt2": dense_case("gpt2", "gpt2"),
    "starcoder": dense_case("starcoder", "gpt_bigcode"),
    "gptneox": dense_case("gptneox", "gpt_neox"),
    "bloom": dense_case("bloom", "bloom"),
    "mpt": dense_case("mpt", "mpt"),
    "falcon, one head of keys": dense_case("falcon", "falcon, one head of keys", bias=False),
    "falcon, two norms": dense_case("falcon", "falcon, two norms"),
    "llama, yarn": dense_case("llama", "llama, yarn and biases"),
    "ministral3": dense_case("mistral3", "ministral3"),
    "llama4": tiny_case("llama4", "llama4_text", LLAMA4, rope_parameters=SCOUT_ROPE),
    "llama4, experts in every second layer": tiny_case("llama4", "llama4_text", LLAMA4, interleave_moe_layer_step=2),
}


def module(case: Case, levels: bool = False) -> Any:
    """Returns a random module, the same every time; with ``levels`` its matrices hold what Q4_0 holds exactly."""
    torch.manual_seed(7)
    built = transformers.AutoModelForCausalLM.from_config(CONFIG_MAPPING[case.kind](**case.config)).float().eval()
    with torch.no_grad():
        buffers = [pair for pair in built.named_buffers() if pair[0].endswith(("_bias", "layer_scalar"))]
        for name, parameter in [*built.named_parameters(), *buffers]:
            noise = torch.randn_like(parameter)
            if parameter.ndim < 2 or "norm" in name:
                parameter.add_(noise * 0.1)
            elif "conv1d" in name or "conv.conv" in name:
                parameter.copy_(noise * 0.3)
            elif levels:
                codes = torch.randint(-8, 8, parameter.shape).float()
                codes[..., ::32] = codes[
                    ..., ::32, :
                ] = -8.0  # the largest number of a block, so that its scale is exact
                parameter.copy_(codes / 64)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return built


@dataclass(frozen=True)
class Saved:
    """A module, its checkpoint, and the file."""

    module: Any
    folder: Path
    file: Path


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Saved]:
    def save(case: Case, kind: K = K.F32, fuse_qkv: bool = False) -> Saved:
        built = module(case, levels=kind != K.F32)
        folder = tmp_path / "checkpoint"
        built.save_pretrained(folder)
        return Saved(
            built,
            folder,
            convert(
                folder,
                {**case.config, **built.config.to_dict()},
                case.architecture,
                tmp_path / "model.gguf",
                kind,
                fuse_qkv=fuse_qkv,
            ),
        )

    return save


def logits(model: Model, adapter: str | None = None) -> Tensor:
    handle = model.open(IDS, adapter=adapter)
    (scores,) = model.score([handle], [DRAFT])
    model.close(handle)
    return scores.logits.float()


def expected(built: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = built(torch.tensor([[*IDS, *DRAFT.ids]]), use_cache=False).logits[0, -4:]
    return result


def test_every_architecture_is_tested() -> None:
    known = {"mistral", "internlm2", "qwen2vl", "qwen3vl", "nemotron_h"}  # as others, under another name
    known |= {"hy_v3"}  # which the package gguf does not know yet
    tested = {case.architecture for case in CASES.values()} | set(gguf_files.FAMILIES)
    assert set(FAMILIES) - known <= tested


@needs_kernels
@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_checkpoint_that_was_converted(name: str, saved: Callable[..., Saved]) -> None:
    s = saved(CASES[name])
    file, reference = open_weights(s.file), open_weights(s.folder)
    common = set(file) & set(reference)
    assert len(common) > len(set(reference)) / 3
    for part in common:  # offsets of norms are rounded when they are added
        torch.testing.assert_close(
            file[part].flatten(), reference[part].flatten(), rtol=0, atol=0 if "norm" not in part else 3e-7, msg=part
        ) if "falcon" not in name else None
    ours = logits(load_model(s.file, dtype="float32"))
    torch.testing.assert_close(ours, logits(load_model(s.folder, dtype="float32")), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, expected(s.module), rtol=1e-4, atol=1e-4)


PACKED = (
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "glm4moe",
    "deepseek2, sigmoid",
    "lfm2moe",
    "granitehybrid",
    "gemma4, experts",
    "nemotron_h",
    "gpt2",
    "gptneox",
)


@needs_kernels
@pytest.mark.parametrize("name", PACKED)
def test_four_bit_matrices_are_read_as_they_are(name: str, saved: Callable[..., Saved]) -> None:
    """Matrices that Q4_0 holds exactly: what is read equals the checkpoint, whatever the converter moved."""
    s = saved(CASES[name], K.Q4_0)
    file, reference = open_weights(s.file), open_weights(s.folder)
    assert isinstance(file, GGUFWeights)
    packed = [part for part in file if isinstance(file.grouped(part), Grouped)]
    assert len(packed) >= 8
    for part in set(packed) & set(reference):
        assert torch.equal(file[part], reference[part]), part
        groups = file.grouped(part)
        assert groups is not None
        whole = file[part].t() if name == "gpt2" and ".c_" in part else file[part]  # groups have outputs first
        assert torch.equal(groups.dequantize().reshape(whole.shape), whole), part
    exact = expected(s.module)
    ours = logits(load_model(s.file, dtype="float32"))  # products quantize their inputs
    assert float((ours - exact).abs().max()) < 0.2 * float(exact.std())


@needs_kernels
@pytest.mark.parametrize("kind", [K.F32, K.Q4_0])
@pytest.mark.parametrize("name", ["qwen35moe", "glm4moe", "llama, yarn", "llama4", "lfm2moe"])
def test_joined_queries_keys_and_values_are_those_of_the_checkpoint(name, kind, saved):
    s = saved(CASES[name], kind, fuse_qkv=True)
    assert any("attn_qkv" in part for part in Header.read(s.file).tensors)
    file, reference = open_weights(s.file), open_weights(s.folder)
    parts = [part for part in reference if ".self_attn." in part and "norm" not in part]
    assert len(parts) >= 4 and all(torch.equal(file[part], reference[part]) for part in parts)
    ours = logits(load_model(s.file, dtype="float32"))
    tolerance = 1e-4 if kind == K.F32 else 0.2 * float(expected(s.module).std())
    assert float((ours - expected(s.module)).abs().max()) < tolerance


ADAPTED = {
    "qwen35moe": ["in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj", "gate_proj", "down_proj", "gate"],
    "qwen3next": ["in_proj_qkvz", "in_proj_ba", "out_proj"],
    "deepseek2, sigmoid": ["kv_b_proj", "q_a_proj", "q_b_proj", "o_proj"],
    "llama, yarn": ["q_proj", "k_proj"],
}


@needs_kernels
@pytest.mark.parametrize("name", ADAPTED)
def test_a_file_takes_the_adapters_of_its_checkpoint(name: str, saved: Callable[..., Saved], tmp_path: Path) -> None:
    s = saved(CASES[name])
    adapter = save_adapter(tmp_path / "adapter", s.folder, ADAPTED[name], size=0.05)
    models = [load_model(path, dtype="float32") for path in (s.file, s.folder)]
    for model in models:
        load_adapter(model, "x", adapter)
    ours, reference = (logits(model, "x") for model in models)
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)
    assert not torch.equal(ours, logits(models[0]))


@needs_kernels
def test_a_file_with_factors_in_its_weights_takes_no_adapter(saved: Callable[..., Saved], tmp_path: Path) -> None:
    s = saved(CASES["falcon-h1"])
    adapter = save_adapter(tmp_path / "adapter", s.folder, ["q_proj"])
    load_adapter(load_model(s.folder, dtype="float32"), "x", adapter)
    with pytest.raises(ModelLoadError, match="run the checkpoint instead of the GGUF file"):
        load_adapter(load_model(s.file, dtype="float32"), "x", adapter)


@pytest.mark.parametrize("name", [*PACKED, "falcon-h1", "gemma4", "mpt", "cohere2", "ministral3"])
def test_a_wrong_key_is_refused_or_computed(name: str, saved: Callable[..., Saved]) -> None:
    """No key of a file, missing or with whatever value, fails in another way than with an error that says so."""
    header = Header.read(saved(CASES[name]).file)
    for key in header.metadata:
        others = {other: value for other, value in header.metadata.items() if other != key}
        for value in (None, 0, 3, -5, 2**40, "x", True, -1.5, float("nan"), 1e30):
            changed = replace(header, metadata=others if value is None else others | {key: value})
            with contextlib.suppress(ModelLoadError):
                config = config_of(changed)
                assert unsupported(config) or Architecture.of(config).layers > 0, (key, value)

"""Int8: its numbers, its limits, checkpoints that other libraries quantized, and no second rounding without a word."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken import LLM
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.base import Model
from foretoken.models.formats.quantize import Int8, quantize, quantize_rows
from foretoken.models.loading import load_model
from foretoken.models.runners.linear import Int8Linear, Linear, can_multiply_int8, exact_product

from .families import tiny
from .gguf_files import K, tiny_checkpoint, write_both
from .test_packed import save_packed
from .tiny import ARCHITECTURES, only_runner

CPU = torch.device("cpu")
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS}},
    "ignore": ["lm_head"],
}
PER_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
TORCHAO: dict[str, Any] = {
    "quant_method": "torchao",
    "quant_type": {
        "default": {
            "_type": "Int8DynamicActivationInt8WeightConfig",
            "_version": 2,
            "_data": {
                "act_mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"},
                "granularity": PER_ROW,
                "weight_only_decode": False,
            },
        }
    },
    "include_input_output_embeddings": False,
}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return ARCHITECTURES["llama"].save(tmp_path / "llama")


def store(path: Path, settings: dict[str, Any], skip: tuple[str, ...] = ("lm_head",)) -> None:
    """Rewrite a checkpoint as compressed-tensors or torchao would have saved it."""
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight") or n == "lm_head.weight"]:
        module = name.removesuffix(".weight")
        if any(part in module for part in skip):
            continue
        int8 = quantize(tensors.pop(name))
        scales = int8.scales[:, None].contiguous()
        if settings["quant_method"] == "torchao":
            zeros = torch.zeros(scales.shape, dtype=torch.int8)
            tensors |= {f"{module}._weight_qdata": int8.values, f"{module}._weight_scale": scales}
            tensors[f"{module}._weight_zero_point"] = zeros
        else:
            tensors |= {f"{module}.weight": int8.values, f"{module}.weight_scale": scales}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def logits(model: Model) -> torch.Tensor:
    handle = model.open([5, 6, 7, 8])
    scores = model.score([handle], [Draft.chain([9, 10, 11])])[0].logits
    model.close(handle)
    return scores


# numbers


def test_channels_are_scaled_by_their_largest_weight() -> None:
    weight = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [254.0, 1.0, 3.0]])
    int8 = quantize(weight)
    assert int8.values.tolist() == [[64, -127, 32], [0, 0, 0], [127, 0, 2]]  # halves go to the even neighbour
    assert torch.allclose(int8.scales[[0, 2]], torch.tensor([2 / 127, 2.0]))
    assert torch.isfinite(int8.dequantize()).all()


def test_the_error_is_at_most_half_a_step() -> None:
    weight = numbers(2100, 33)  # more rows than are quantized at once
    int8 = quantize(weight)
    assert ((int8.dequantize() - weight).abs() <= int8.scales[:, None] * 0.5001).all()
    values, scales = quantize_rows(weight.bfloat16())
    assert values.dtype == torch.int8 and scales.shape == (2100, 1)


def test_stacking_keeps_each_channel() -> None:
    first, second = quantize(numbers(3, 8)), quantize(numbers(5, 8, seed=1))
    both = Int8.cat([first, second])
    assert both.shape == (8, 8)
    assert torch.equal(both.dequantize(), torch.cat([first.dequantize(), second.dequantize()]))


@pytest.mark.parametrize("shape", [(96, 64), (37, 50), (101, 2048), (64, 3000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_bit_equal_over_row_counts_and_kernels(shape: tuple[int, int], dtype: torch.dtype) -> None:
    if not can_multiply_int8(torch.zeros(8, 8, dtype=torch.int8)):
        pytest.skip("this machine has no exact int8 products")
    weight, bias = quantize(numbers(*shape) * 0.1), numbers(shape[0]).to(dtype)
    product, x = Int8Linear(weight, bias), numbers(70, shape[1], seed=3).to(dtype)
    whole = product(x)
    for rows in (1, 2, 3, 8, 17, 33, 64):
        assert torch.equal(product(x[:rows]), whole[:rows]), rows
    values, scales = quantize_rows(x)
    exact = torch.addcmul(bias.float(), exact_product(values, weight.values) * weight.scales, scales)
    assert torch.equal(exact.to(dtype), whole)
    plain = Linear(weight.dequantize().to(dtype), bias)(x)
    assert (plain.float() - whole.float()).abs().max() < 0.05 * plain.float().std()


@pytest.mark.slow
def test_sums_are_exact_if_onednn_may_not_use_the_processors_instructions() -> None:
    code = (
        "import torch; from foretoken.models.formats.quantize import quantize, quantize_rows\n"
        "from foretoken.models.runners.linear import Int8Linear, exact_product\n"
        "x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)); weight = quantize(x * 0.1)\n"
        "values, scales = quantize_rows(x)\n"
        "right = exact_product(values, weight.values) * weight.scales * scales\n"
        "assert torch.equal(Int8Linear(weight)(x), right)\n"
    )
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code], env=limited, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_exact_sums_do_not_round() -> None:
    """All products at their largest: a float32 sum over the whole row would not hold them."""
    x = torch.full((2, 4100), 127, dtype=torch.int8)
    x[:, 0] = 1
    assert exact_product(x, x).tolist() == [[float(4099 * 127 * 127 + 1)] * 2] * 2


# models


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "gemma2", "gemma3", "phi3"])
@pytest.mark.parametrize("runner", ["compiled", "torch"])
def test_a_quantized_model_is_near_the_float_one(name: str, runner: str, tmp_path: Path) -> None:
    path = ARCHITECTURES[name].save(tmp_path / name)
    with only_runner(runner):
        plain = logits(load_model(path, "float32", "cpu", "native"))
        int8 = logits(load_model(path, "float32", "cpu", "native", quantization="int8"))
    assert not torch.equal(plain, int8)
    assert (plain - int8).abs().mean() < 0.12 * plain.std()


def test_models_that_cannot_be_quantized_are_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"quantization 'int3' is not known; known: int8"):
        load_model(llama, "float32", "cpu", quantization="int3")
    with pytest.raises(InvalidRequest, match="needs the native decoder"):
        load_model(llama, "float32", "cpu", "hf", quantization="int8")
    other = tmp_path / "other"
    tiny("xglm").save_pretrained(other)
    with pytest.raises(InvalidRequest, match=r"needs the native decoder.*xglm"):
        load_model(other, "float32", "cpu", quantization="int8")


# checkpoints quantized before


@pytest.mark.parametrize("settings", [COMPRESSED, TORCHAO], ids=["compressed-tensors", "torchao"])
@pytest.mark.parametrize("skip", [(), ("lm_head",), ("lm_head", "layers.0")], ids=["all", "no-head", "some"])
@pytest.mark.parametrize("runner", ["compiled", "torch"])
def test_stored_int8_equals_quantizing_on_loading(llama, settings, skip, runner):
    """Quantizing on loading makes the other matrices int8 too, so both ways give one model, bit for bit."""
    with only_runner(runner):
        expected = logits(load_model(llama, "float32", "cpu", quantization="int8"))
        plain = logits(load_model(llama, "float32", "cpu"))
        store(llama, settings, skip)
        stored = logits(load_model(llama, "float32", "cpu"))
        finished = logits(load_model(llama, "float32", "cpu", quantization="int8"))
    assert torch.equal(finished, expected)
    assert torch.equal(stored, expected) == (not skip)
    assert (stored - plain).abs().mean() < 0.12 * plain.std()


@pytest.mark.parametrize(
    "group, reason",
    [
        ({"weights": {**WEIGHTS, "num_bits": 4}}, "weights with num_bits 4"),
        ({"weights": {**WEIGHTS, "strategy": "group"}}, "weights with strategy group"),
        ({"weights": {**WEIGHTS, "symmetric": False}}, "weights with symmetric False"),
        ({"weights": {**WEIGHTS, "type": "float"}}, "weights with type float"),
        ({"input_activations": None}, "input_activations with num_bits None"),
        ({"input_activations": {**ACTIVATIONS, "strategy": "tensor"}}, "input_activations with strategy tensor"),
        ({"format": "pack-quantized"}, "format pack-quantized"),
    ],
)
def test_other_compressed_tensors_are_refused(llama: Path, group: dict[str, Any], reason: str) -> None:
    base = COMPRESSED["config_groups"]["group_0"]
    store(llama, COMPRESSED | {"config_groups": {"group_0": {**base, **group}}})
    with pytest.raises(ModelLoadError, match=rf"{reason}.*supported are int8 weights"):
        load_model(llama, "float32", "cpu")


def test_other_quantizers_are_refused(llama: Path) -> None:
    store(llama, COMPRESSED)
    config = json.loads((llama / "config.json").read_text())
    weight_only = {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}
    for settings, reason in (
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        (TORCHAO | {"quant_type": weight_only}, "Int8WeightOnlyConfig"),
        (TORCHAO | {"include_input_output_embeddings": True}, "embedding"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (COMPRESSED | {"config_groups": {}}, "format int-quantized"),
    ):
        (llama / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        with pytest.raises(ModelLoadError, match=rf"{reason}.*supported are int8 weights") as error:
            load_model(llama, "float32", "cpu")
        assert "\n" not in str(error.value)


def test_zero_points_and_partly_quantized_products_are_refused(llama: Path) -> None:
    store(llama, TORCHAO)
    file = llama / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.down_proj"
    save_file({**tensors, f"{name}._weight_zero_point": torch.ones(64, 1, dtype=torch.int8)}, file)
    with pytest.raises(ModelLoadError, match=r"down_proj.*zero points"):
        load_model(llama, "float32", "cpu")
    save_file({**tensors, f"{name}._weight_scale": torch.ones(3, 1)}, file)
    with pytest.raises(ModelLoadError, match=r"down_proj.*one scale per channel"):
        load_model(llama, "float32", "cpu")
    name = "model.layers.1.self_attn.v_proj"
    whole = {n: t for n, t in tensors.items() if not n.startswith(name)}
    save_file({**whole, f"{name}.weight": numbers(32, 64)}, file)
    with pytest.raises(ModelLoadError, match=r"only some of .*v_proj are quantized"):
        load_model(llama, "float32", "cpu")


WARNING = "is quantized already, and quantization="


def warnings(caplog: pytest.LogCaptureFixture, path: Path, quantization: str | None) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "foretoken"):
        load_model(path, "float32", "cpu", quantization=quantization)
    return [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]


@pytest.mark.parametrize("kind", [K.Q4_1, K.Q8_0, K.Q4_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("quantization", ["int8", "int4", "int4-g64"])
def test_a_quantized_file_is_rounded_again_with_a_warning(kind, quantization, tmp_path, caplog):
    file, folder = write_both(tiny_checkpoint("llama", num_hidden_layers=1), "llama", tmp_path, kind)
    (said,) = warnings(caplog, file, quantization)
    assert str(file) in said and repr(quantization) in said and "leave it out" in said
    assert warnings(caplog, file, quantization) == []  # once for each checkpoint
    assert warnings(caplog, file, None) == warnings(caplog, folder, quantization) == []


@pytest.mark.parametrize("kind", [K.F16, K.BF16, K.F32], ids=lambda kind: kind.name)
def test_a_file_of_floats_is_rounded_once(kind: K, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, _ = write_both(tiny_checkpoint("llama", num_hidden_layers=1), "llama", tmp_path, kind)
    assert warnings(caplog, file, "int4") == []


@pytest.mark.parametrize("layout", ["awq", "gptq", "gptq 8 bits", "compressed w4 32 symmetric"])
def test_packed_folders_are_rounded_again_with_a_warning(layout, tmp_path, caplog):
    save_packed(layout, tmp_path / "dense", tmp_path / "packed", num_hidden_layers=1)
    assert len(warnings(caplog, tmp_path / "packed", "int8")) == 1
    assert warnings(caplog, tmp_path / "dense", "int8") == []


@pytest.mark.parametrize("settings", [COMPRESSED, TORCHAO], ids=["compressed-tensors", "torchao"])
def test_int8_stays_int8(settings: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = ARCHITECTURES["llama"].save(tmp_path / "llama")
    store(path, settings)
    assert warnings(caplog, path, "int8") == []
    with pytest.raises(InvalidRequest, match="is int8 already, so quantization='int4' would change nothing"):
        load_model(path, "float32", "cpu", quantization="int4")


def test_experts_of_four_bits_are_rounded_again_with_a_warning(tmp_path, caplog):
    file, _ = write_both(tiny_checkpoint("gpt-oss"), "gpt-oss", tmp_path, K.MXFP4)
    assert len(warnings(caplog, file, "int8")) == 1


@pytest.mark.real
@pytest.mark.slow
def test_a_real_file_is_rounded_again_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    from tests.real import real_model

    with caplog.at_level(logging.WARNING, "foretoken"):
        LLM(real_model("smollm2"), quantization="int4")
    assert any(WARNING in record.getMessage() for record in caplog.records)

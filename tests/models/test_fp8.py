"""FP8 checkpoints: weights and logits equal those that transformers dequantizes, and damaged ones are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.plain import text
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import ModelLoadError
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.formats.prequantized import read_int8, unpacked
from foretoken.models.loading import load_model
from foretoken.quantize import quantize_checkpoint

from .tiny import ARCHITECTURES

BLOCK = (8, 8)  # sizes that divide those of tiny models, which transformers asks for
KEPT = ("embed_tokens", "lm_head", "norm", "gate.weight", "conv", "in_proj_a", "in_proj_b", "shared_expert_gate")


def rounded(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns a matrix as numbers of e4m3, and the factors of its blocks."""
    rows, columns = block
    scales = torch.ones(*weight.shape[:-2], -(-weight.shape[-2] // rows), -(-weight.shape[-1] // columns))
    numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[-2]):
        for j in range(scales.shape[-1]):
            at = (..., slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            part = weight[at]
            scales[..., i, j] = part.abs().amax((-2, -1)) / 448
            numbers[at] = (part / scales[..., i, j, None, None]).to(torch.float8_e4m3fn)
    return numbers, scales


def as_fp8(model: Path, folder: Path, scales: torch.dtype = torch.float32) -> Path:
    """Saves a copy of a checkpoint with the matrices of its layers as DeepSeek-V3 stores them."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if tensor.ndim < 2 or any(part in name for part in KEPT):
            tensors[name] = tensor
            continue
        numbers, factors = rounded(tensor, BLOCK)
        stored = f"{name}_scale_inv"
        tensors[name], tensors[stored] = numbers, factors.to(scales)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["deepseek-v3", "qwen3.5-experts", "qwen3"])
def test_logits_equal_those_of_transformers_dequantized_module(architecture: str, tmp_path: Path) -> None:
    path = as_fp8(ARCHITECTURES[architecture].save(tmp_path / "float"), tmp_path / "fp8")
    model, prompt, draft = load_model(path, "float32", "cpu", "native"), text(30, 1), [7, 8, 9]
    (scores,) = model.score([model.open(prompt)], [Draft.chain(draft)])
    settings = transformers.FineGrainedFP8Config(weight_block_size=BLOCK, dequantize=True)
    module = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32", quantization_config=settings)
    with torch.no_grad():
        expected = module(torch.tensor([prompt + draft])).logits[0, -len(draft) - 1 :]
    assert (scores.logits - expected).abs().max() < 1e-4
    exact = load_model(tmp_path / "float", "float32", "cpu", "native")
    (other,) = exact.score([exact.open(prompt)], [Draft.chain(draft)])
    assert (scores.logits - other.logits).abs().max() > 1e-3  # it was rounded


@pytest.mark.parametrize("block", [(128, 128), (16, 40), (2**30, 2**30)])
@pytest.mark.parametrize("stack", [(), (3,)])
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks_need_not_divide_a_matrix(block, stack, scales, tmp_path):
    """576 rows, as DeepSeek-V3's ``kv_a_proj_with_mqa`` has, are four and a half blocks."""
    numbers = torch.randn(*stack, 576, 200, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    grid = (*stack, -(-576 // block[0]), -(-200 // block[1]))
    factors = (torch.rand(grid, generator=torch.Generator().manual_seed(1)) * 0.1).to(scales)
    name = "x.experts.down_proj" if stack else "x.weight"
    save_file({name: numbers, f"{name}_scale_inv": factors}, tmp_path / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": list(block)}
    weights = unpacked(open_weights(tmp_path), {"quantization_config": settings})
    rows, columns = (torch.arange(size) // of for size, of in zip((576, 200), block, strict=True))
    assert list(weights) == [name]
    assert torch.equal(weights[name], numbers.float() * factors.float()[..., rows[:, None], columns[None]])


FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}
# The scale's shape, its name, and quantization_config.
SCALES: dict[str, tuple[tuple[int, ...], str, dict[str, Any]]] = {
    "of a matrix": ((), "weight_scale_inv", {"quant_method": "fp8", "activation_scheme": "static"}),
    "of a matrix, compressed-tensors": ((1,), "weight_scale", {**FLOATS, "strategy": "tensor"}),
    "of outputs": ((24, 1), "weight_scale", {**FLOATS, "strategy": "channel"}),
    "of blocks": ((3, 2), "weight_scale", {**FLOATS, "strategy": "block", "block_structure": [8, 16]}),
}


@pytest.mark.parametrize("case", SCALES)
def test_scales_may_be_those_of_matrices_outputs_or_blocks(case: str, tmp_path: Path) -> None:
    shape, name, settings = SCALES[case]
    if "quant_method" not in settings:
        groups = {"group_0": {"weights": settings, "input_activations": {"num_bits": 8, "type": "float"}}}
        settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    numbers, scales = torch.randn(24, 32).to(torch.float8_e4m3fn), torch.rand(shape) + 0.1
    tensors = {"x.weight": numbers, f"x.{name}": scales, "x.input_scale": torch.ones(1), "y.weight": torch.ones(2, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = unpacked(open_weights(tmp_path), {"quantization_config": settings})
    assert set(weights) == {"x.weight", "y.weight"}
    factors = scales.repeat_interleave(8, 0).repeat_interleave(16, 1) if shape == (3, 2) else scales
    assert torch.equal(weights["x.weight"], numbers.float() * factors)


@pytest.mark.parametrize("scheme", ["int8", "bfloat16"])
def test_fp8_is_rounded_again_or_written_as_floats(scheme: str, tmp_path: Path) -> None:
    path = as_fp8(ARCHITECTURES["qwen3"].save(tmp_path / "float"), tmp_path / "fp8")
    quantize_checkpoint(path, tmp_path / scheme, scheme)
    read, written = (unpacked(open_weights(p), load_config(p)) for p in (path, tmp_path / scheme))
    name = "model.layers.0.mlp.down_proj"
    if scheme == "bfloat16":
        assert torch.equal(written[f"{name}.weight"], read[f"{name}.weight"].bfloat16())
    else:
        error = read_int8(written, name).dequantize() - read[f"{name}.weight"]
        assert error.abs().max() <= read[f"{name}.weight"].abs().max() / 200


Change = Callable[[dict[str, Tensor], dict[str, Any]], object]
NAME = "model.layers.0.mlp.down_proj.weight"
BROKEN: dict[str, tuple[Change, str]] = {
    "no scale": (lambda tensors, settings: tensors.pop(f"{NAME}_scale_inv"), "its scales are not there"),
    "other blocks": (
        lambda tensors, settings: settings.update(weight_block_size=[4, 4]),
        "scales of .* have the shape",
    ),
    "one scale of many": (
        lambda tensors, settings: tensors.update({f"{NAME}_scale_inv": torch.ones(1, 1)}),
        "scales of .* have the shape",
    ),
    "integers": (lambda tensors, settings: tensors.update({NAME: torch.ones(64, 48, dtype=torch.int8)}), "torch.int8"),
    "no scales": (
        lambda tensors, settings: [tensors.pop(name) for name in list(tensors) if name.endswith("_inv")],
        "fp8 without scales",
    ),
    "infinite": (lambda tensors, settings: tensors[f"{NAME}_scale_inv"].fill_(torch.inf), "NaN or infinite numbers"),
    "fp4": (lambda tensors, settings: settings.update(expert_dtype="fp4"), "experts of fp4"),
    "no block": (lambda tensors, settings: settings.update(weight_block_size=[0, 16]), "weight_block_size"),
    "one size": (lambda tensors, settings: settings.update(weight_block_size=[16]), r"blocks of \[16\]"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_damaged_files_are_refused(case: str, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    path = as_fp8(ARCHITECTURES["llama"].save(tmp_path / "float"), tmp_path / "fp8")
    tensors, config = load_file(path / "model.safetensors"), load_config(path)
    change(tensors, config["quantization_config"])
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        load_model(path, "float32", "cpu", "native")

"""Checkpoints of packed codes: values equal compressed-tensors' own and the published formulas, bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import ModelLoadError
from foretoken.core.native.build import SWITCH
from foretoken.models.formats.checkpoint import open_weights
from foretoken.models.formats.packed import PackedSettings, PackedWeights
from foretoken.models.formats.prequantized import packing_of, unpacked
from foretoken.models.loading import load_model

from .tiny import ARCHITECTURES, Tiny

OUT, IN = 48, 256
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's pack(): the output whose code is in each four bits of a word
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

Packed = tuple[dict[str, Tensor], dict[str, Any], Tensor]  # tensors of "m", quantization_config, weights


def random_codes(bits: int, rows: int, columns: int, group: int, seed: int, symmetric: bool) -> tuple[Tensor, ...]:
    """Returns codes [rows, columns], zeros and scales [rows, groups]."""
    generator = torch.Generator().manual_seed(seed)
    groups = columns // group
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator)
    zeros = torch.randint(0, 2**bits, (rows, groups), generator=generator)
    scales = (torch.rand(rows, groups, generator=generator) * 0.02 + 0.001).half()
    return codes, torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros, scales


def words(codes: Tensor, bits: int) -> Tensor:
    """Packs codes along the last dimension into int32, the lowest bits first."""
    per = 32 // bits
    parts = codes.unflatten(-1, (-1, per)).long()
    total = sum(parts[..., i] << (bits * i) for i in range(per))
    return (
        torch.as_tensor(total).to(torch.int64).bitwise_and(2**32 - 1).sub(2**31).bitwise_xor(-(2**31)).to(torch.int32)
    )


def by_formula(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    return (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def gptq(
    rows: int, columns: int, seed: int, bits: int = 4, version: int = 1, symmetric: bool = False, act: bool = False
) -> Packed:
    codes, zeros, scales = random_codes(bits, rows, columns, 64, seed, symmetric)
    groups = torch.arange(columns) // 64
    if act:
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
    stored = (zeros - 1) % 2**bits if version == 1 else zeros
    tensors = {
        "m.qweight": words(codes, bits).t().contiguous(),
        "m.qzeros": words(stored.t(), bits).contiguous(),
        "m.scales": scales.t().contiguous(),
        "m.g_idx": groups.to(torch.int32),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": 64, "desc_act": act, "sym": symmetric}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    return tensors, config, by_formula(codes, zeros, scales, groups)


def awq(rows: int, columns: int, seed: int) -> Packed:
    codes, zeros, scales = random_codes(4, rows, columns, 128, seed, False)

    def packed(values: Tensor) -> Tensor:
        ordered = values.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2)
        return words(ordered, 4)

    tensors = {
        "m.qweight": packed(codes.t()).contiguous(),
        "m.qzeros": packed(zeros.t()).contiguous(),
        "m.scales": scales.t().contiguous(),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    return tensors, config, by_formula(codes, zeros, scales, torch.arange(columns) // 128)


def mxfp4(rows: int, columns: int, seed: int) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(115, 123, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    table = torch.tensor(E2M1)
    values = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), -1).flatten(-2)
    weights = torch.ldexp(values, exponents.int()[..., None] - 127).flatten(1)
    return {"m.weight_blocks": blocks, "m.weight_scales": exponents}, {"quant_method": "mxfp4"}, weights


def compressed(rows: int, columns: int, seed: int, bits: int = 4, group: int = 32, symmetric: bool = True) -> Packed:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    scheme = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, **strategy}
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, 1 if group == -1 else columns // group)
    state = {
        "weight": torch.randn(rows, columns, generator=generator) * 0.05,
        "weight_scale": (torch.rand(shape, generator=generator) * 0.02 + 0.001).bfloat16().float(),
    }
    if not symmetric:
        limit = 2 ** (bits - 1)
        state["weight_zero_point"] = torch.randint(-limit, limit, shape, generator=generator, dtype=torch.int8)
    full = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**scheme))
    packed = PackedQuantizationCompressor.compress(state, full)
    weights = PackedQuantizationCompressor.decompress(packed, full)["weight"]
    assert weights.dtype == torch.float32
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    tensors = {f"m.{name}": tensor.contiguous() for name, tensor in packed.items()}
    tensors["m.weight_scale"] = tensors["m.weight_scale"].bfloat16()
    return tensors, config, weights


LAYOUTS: dict[str, Callable[[int, int, int], Packed]] = {
    "gptq": gptq,
    "gptq v2": lambda *at: gptq(*at, version=2),
    "gptq symmetric": lambda *at: gptq(*at, symmetric=True),
    "gptq 8 bits": lambda *at: gptq(*at, bits=8),
    "gptq desc_act": lambda *at: gptq(*at, act=True),
    "awq": awq,
    "mxfp4": mxfp4,
    **{
        f"compressed w{bits} {group} {'symmetric' if symmetric else 'zeros'}": (
            lambda rows, columns, seed, b=bits, g=group, s=symmetric: compressed(rows, columns, seed, b, g, s)
        )
        for bits in (4, 8)
        for group in (32, 64, 128, -1)
        for symmetric in (True, False)
    },
}


def opened(packed: Packed) -> PackedWeights:
    tensors, config, _ = packed
    settings = packing_of({"quantization_config": config})
    assert settings is not None
    return PackedWeights(tensors, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, settings)


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_equal_the_reference_bit_for_bit(name: str) -> None:
    packed = LAYOUTS[name](OUT, IN, 3)
    weights, expected = opened(packed), packed[2]
    assert weights.shapes == {"m.weight": (OUT, IN)} and list(weights) == ["m.weight"] and len(weights) == 1
    assert torch.equal(weights["m.weight"], expected)
    grouped = weights.grouped("m.weight")
    assert (grouped is None) == (name == "gptq desc_act")
    if grouped is not None:
        assert grouped.shape == (OUT, IN) and grouped.layout.group <= 128
        assert torch.equal(grouped.dequantize(), expected)
        assert torch.equal(grouped.rows(5, 31).dequantize(grouped.layout), expected[5:31])
        centred = "symmetric" in name or name == "mxfp4"
        assert grouped.layout.offsets != centred


def test_inputs_of_compressed_tensors_may_lie_in_any_group() -> None:
    tensors, config, _ = compressed(OUT, IN, 4)
    order = torch.arange(IN).flip(0) // 32
    codes = opened((tensors, config, torch.empty(0)))["m.weight"] / tensors["m.weight_scale"].float().repeat_interleave(
        32, 1
    )
    tensors["m.weight_g_idx"] = order.to(torch.int32)
    weights = opened((tensors, config, torch.empty(0)))
    expected = codes.round() * tensors["m.weight_scale"].float()[:, order]
    assert torch.equal(weights["m.weight"], expected) and weights.grouped("m.weight") is None
    tensors["m.weight_g_idx"] = torch.full((IN,), -1, dtype=torch.int32)
    assert opened((tensors, config, torch.empty(0))).grouped("m.weight") is not None


@pytest.mark.parametrize("columns, group", [(96, -1), (320, -1), (320, 160), (320, 40), (512, 256), (512, 512)])
def test_groups_of_any_length_stay_exact(columns: int, group: int) -> None:
    packed = compressed(OUT, columns, 6, group=group, symmetric=False)
    weights = opened(packed)
    assert torch.equal(weights["m.weight"], packed[2])
    grouped = weights.grouped("m.weight")
    assert (grouped is None) == (group == 40)
    if grouped is not None:
        assert grouped.layout.group in (128, 160) and torch.equal(grouped.dequantize(), packed[2])


def test_scales_of_32_bits_with_zeros_are_not_grouped() -> None:
    tensors, config, _ = gptq(OUT, IN, 5)
    tensors["m.scales"] = tensors["m.scales"].float() * 1.1
    assert opened((tensors, config, torch.empty(0))).grouped("m.weight") is None


@pytest.mark.parametrize(
    "name", ["gptq", "gptq desc_act", "awq", "compressed w4 32 symmetric", "compressed w8 -1 zeros"]
)
def test_a_packed_checkpoint_computes_as_its_dequantized_one(name, tmp_path, monkeypatch):
    """Exactly with torch's operators, which dequantize the matrices; compiled kernels also quantize activations."""
    dense, folder = tmp_path / "dense", tmp_path / "packed"
    tensors, config = save_packed(name, dense, folder)
    compiled = logits(folder)
    monkeypatch.setenv(SWITCH, "0")
    expected = logits(dense)
    assert torch.equal(logits(folder), expected)
    assert (compiled - expected).abs().mean() < 0.12 * expected.std()
    weights = unpacked(open_weights(folder), config)
    assert set(weights) == set(tensors) and dict(weights.shapes) == {n: tuple(t.shape) for n, t in tensors.items()}


def save_packed(name: str, dense: Path, folder: Path, **more: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Writes a tiny checkpoint dequantized to ``dense`` and packed to ``folder``, with ``more`` settings.

    Returns:
        The dequantized tensors and the packed checkpoint's config.json.
    """
    tiny = ARCHITECTURES["llama"]
    Tiny(tiny.family, {**tiny.config, "hidden_size": 256, "intermediate_size": 512, **more}).save(dense)
    folder.mkdir()
    tensors, stored = load_file(dense / "model.safetensors"), {}
    config = json.loads((dense / "config.json").read_text())
    for seed, key in enumerate(sorted(tensors)):
        if not key.endswith("_proj.weight"):
            stored[key] = tensors[key]
            continue
        rows, columns = tensors[key].shape
        parts, config["quantization_config"], tensors[key] = LAYOUTS[name](rows, columns, seed)
        stored |= {part.replace("m.", key.removesuffix("weight"), 1): tensor for part, tensor in parts.items()}
    save_file(tensors, dense / "model.safetensors")
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors, config


def logits(folder: Path) -> Tensor:
    model = load_model(folder, dtype="float32")
    handle = model.open([5, 6, 7, 8])
    return model.score([handle], [Draft.empty()])[0].logits


@pytest.mark.parametrize(
    "config, reason",
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 64}, "3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "groups of 0"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "gemv"),
    ],
)
def test_other_layouts_are_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        packing_of({"quantization_config": config})


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"strategy": "tensor"}, "strategy tensor"),
        ({"num_bits": 3}, "num_bits 3"),
        ({"type": "float"}, "type float"),
        ({"group_size": None}, "groups of None"),
    ],
)
def test_other_schemes_of_compressed_tensors_are_refused(change: dict[str, Any], reason: str) -> None:
    _, config, _ = compressed(OUT, IN, 0)
    config["config_groups"]["group_0"]["weights"] |= change
    with pytest.raises(ModelLoadError, match=reason):
        packing_of({"quantization_config": config})


@pytest.mark.parametrize("name", ["gptq", "awq", "mxfp4", "compressed w4 32 zeros"])
def test_parts_that_do_not_belong_together_are_refused(name: str) -> None:
    tensors, config, weights = LAYOUTS[name](OUT, IN, 1)
    key = next(iter(opened((tensors, config, weights))))
    codes = ("qweight", "weight_packed", "weight_blocks")
    for part, tensor in tensors.items():
        others = {other: value for other, value in tensors.items() if other != part}
        changes = [tensor[:1], torch.cat([tensor, tensor])]
        if not part.endswith(("scales", "scale", "shape", "g_idx")):
            changes.append(tensor.float())
        for changed in changes:
            with pytest.raises(ModelLoadError, match="do not belong together"):
                opened(({**others, part: changed}, config, weights))[key]
        if not part.endswith((*codes, "g_idx")):
            with pytest.raises(ModelLoadError, match="not complete"):
                opened((others, config, weights))


def test_missing_settings_have_the_tools_defaults() -> None:
    assert packing_of({}) is None
    settings = packing_of({"quantization_config": {"quant_method": "awq", "w_bit": 4, "q_group_size": 64}})
    assert settings == PackedSettings("awq", 4, 64)

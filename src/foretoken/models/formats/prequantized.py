"""Checkpoints that are already quantized, as compressed-tensors, torchao, DeepSeek and other tools write them.

``packed.py`` reads codes of four or eight bits in groups. This module reads two other forms:

- W8A8: symmetric int8 weights with one scale per output channel, and activations quantized dynamically and
  symmetrically per row. compressed-tensors (``int-quantized``) and torchao (``Int8DynamicActivationInt8WeightConfig``
  version 2, per row) write it.
- Eight-bit floats of type e4m3 with the scale of their block, often of 128 x 128 values. They span too many powers of
  two for int8, so matrices are dequantized when they are read: in float32, then rounded to the model's dtype. Files
  store the scales beside the matrices: ``weight_scale_inv`` (DeepSeek, transformers) or ``weight_scale``
  (compressed-tensors). Other engines also round activations to eight bits; here they keep the model's dtype.

Matrices that are not quantized stay as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import MAX_INT, Schema, Size, parse, shortened
from foretoken.models.formats.packed import PackedSettings, PackedWeights
from foretoken.models.formats.quantize import Int8
from foretoken.models.formats.weight_files import StoredTensors

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("weight_scale_inv", "weight_scale")
_STACKED = ("gate_up_proj", "up_proj", "down_proj")  # parameters with the matrices of all experts
_UNUSED = ("activation_scale", "input_scale")  # scales of activations


@dataclass(frozen=True, slots=True)
class Fp8Settings:
    """Sizes of the blocks that share a scale: outputs and inputs; None for whole matrices or outputs."""

    block: tuple[int, int] | None = None


class Fp8Weights(StoredTensors):
    """A checkpoint's tensors, with its matrices of eight-bit floats dequantized to float32.

    Args:
        weights: the stored tensors.
        settings: sizes of the blocks.
    """

    def __init__(self, weights: StoredTensors, settings: Fp8Settings) -> None:
        self._weights, self._block, self.files, shapes = weights, settings.block, weights.files, weights.shapes
        self._scales = {name: scale for scale in shapes if (name := _scaled_by(scale)) in shapes}
        hidden = {*self._scales.values(), *(name for name in shapes if name.endswith(_UNUSED))}
        self.shapes = {name: shape for name, shape in shapes.items() if name not in hidden}

    @property
    def scaled(self) -> bool:
        return bool(self._scales)

    def __getitem__(self, name: str) -> Tensor:
        stored = self._weights[name]
        if name in self._scales:
            return self._dequantized(name, stored, self._weights[self._scales[name]])
        if stored.dtype in FLOAT8:
            raise ModelLoadError(
                f"the tensor {name!r} holds {stored.dtype}, and its scales are not there; is it complete?"
            )
        return stored

    def _dequantized(self, name: str, stored: Tensor, scales: Tensor) -> Tensor:
        """Returns the weights, float32 [..., out, in]. Raises ModelLoadError for scales of another shape."""
        if stored.dtype not in FLOAT8 or stored.ndim < 2 or not scales.is_floating_point():
            raise ModelLoadError(f"{name!r} is {stored.dtype} with scales of {scales.dtype}; expected eight-bit floats")
        weights, scales = stored.float(), scales.float()
        if scales.numel() == 1 and self._block is None:
            return weights.mul_(scales.reshape(()))
        *stack, out, inputs = weights.shape
        rows, columns = self._block or (1, inputs)
        block = max(1, min(rows, out)), max(1, min(columns, inputs))  # settings may name any size
        grid = tuple(-(-size // of) for size, of in zip((out, inputs), block, strict=True))
        if self._block is None and scales.shape == (*stack, 1, 1):
            block, grid = (out, inputs), (1, 1)
        if scales.shape != (*stack, *grid):
            raise ModelLoadError(
                f"the scales of {name!r} have the shape {tuple(scales.shape)}, but its own, {tuple(weights.shape)}, "
                f"and config.json's quantization_config say {(*stack, *grid)}"
            )
        for row, first in enumerate(range(0, out, block[0])):
            by_input = scales[..., row, :].repeat_interleave(block[1], -1)[..., :inputs]
            weights[..., first : first + block[0], :] *= by_input[..., None, :]
        return weights


def _scaled_by(name: str) -> str | None:
    """Returns the name of the matrix whose scales a tensor of this name would hold; None for other names."""
    stem, _, last = name.rpartition(".")
    if last in _SCALES:
        return f"{stem}.weight"
    stacked = last.removesuffix("_scale_inv")
    return f"{stem}.{stacked}" if stacked != last and stacked in _STACKED else None


SUPPORTED = (
    "supported are int8 weights with a symmetric scale per channel and dynamic symmetric int8 activations per token, "
    "saved by compressed-tensors (int-quantized) or torchao (Int8DynamicActivationInt8WeightConfig, PerRow), and "
    "weights of 4 or 8 bits in groups, saved by compressed-tensors (pack-quantized), AWQ (gemm) or GPTQ, and "
    "eight-bit floats with scales of blocks, outputs or matrices (fp8, or float-quantized of compressed-tensors)"
)
_OTHER = ("kv_cache_scheme", "sparsity_config", "transform_config")
_WHERE = "config.json's quantization_config"


class QuantizationGroup(Schema):
    """The quantization of one group of modules in compressed-tensors."""

    format: str | None = None
    weights: dict[str, Any] | None = None
    input_activations: dict[str, Any] | None = None


class Quantization(Schema):
    """The ``quantization_config`` of config.json, of any tool."""

    quant_method: str | None = None
    format: str | None = None
    config_groups: dict[str, QuantizationGroup] | None = None


class PackedQuantization(Schema):
    """The ``quantization_config`` of AWQ and GPTQ."""

    bits: int | None = None
    w_bit: int | None = None
    group_size: int | None = None
    q_group_size: int | None = None
    version: str | None = None
    checkpoint_format: str | None = None


class Fp8Quantization(Schema):
    """The ``quantization_config`` of FP8 checkpoints."""

    weight_block_size: list[Size] | None = None
    expert_dtype: str = "fp8"


def check_prequantized(config: Mapping[str, Any]) -> bool:
    """Returns whether the checkpoint's weights are int8 with a scale per channel."""
    settings = config.get("quantization_config")
    if not settings or packing_of(config) is not None:
        return False
    method = parse(Quantization, settings, _WHERE).quant_method
    checks = {"compressed-tensors": _compressed_tensors, "torchao": _torchao}
    unsupported = checks[method](settings) if method in checks else f"{method}"
    if unsupported is not None:
        raise _refused(unsupported)
    return True


def packing_of(config: Mapping[str, Any]) -> PackedSettings | Fp8Settings | None:
    """Returns the packing of the checkpoint's codes, or the scaling of its eight-bit floats; None if it has neither."""
    settings = config.get("quantization_config")
    if not settings:
        return None
    quantization = parse(Quantization, settings, _WHERE)
    groups = list((quantization.config_groups or {}).values())
    formats = {group.format or quantization.format for group in groups}
    match quantization.quant_method:
        case "mxfp4":
            return PackedSettings("mxfp4", group=32)
        case "awq" | "gptq" as method:
            return _in_words(method, parse(PackedQuantization, settings, _WHERE))
        case "fp8":
            s = parse(Fp8Quantization, settings, _WHERE)
            if s.expert_dtype != "fp8":
                raise _refused(f"experts of {s.expert_dtype}")
            return Fp8Settings(_block(s.weight_block_size))
        case "compressed-tensors" if formats in ({"pack-quantized"}, {"float-quantized"}):
            if other := next((key for key in _OTHER if settings.get(key)), None):
                raise _refused(other)
            floats = formats == {"float-quantized"}
            schemes = {_scaling(group) if floats else _scheme(group) for group in groups}
            if len(schemes) > 1:
                raise _refused("several groups of different settings")
            return schemes.pop()
    return None


def _in_words(method: str, s: PackedQuantization) -> PackedSettings:
    """Returns the packing of AWQ and GPTQ. Raises ModelLoadError if it is not supported."""
    bits = s.bits if s.bits is not None else s.w_bit or 4
    group = s.group_size if s.group_size is not None else s.q_group_size or 128
    if group != -1 and not 1 <= group <= MAX_INT:
        raise _refused(f"groups of {group}")
    if method == "awq":
        if (s.version or "gemm").lower() != "gemm" or bits != 4:
            raise _refused(f"AWQ's layout {s.version} with {bits} bits")
        return PackedSettings("awq", 4, group)
    layout = s.checkpoint_format or "gptq"
    if layout not in ("gptq", "gptq_v2") or bits not in (4, 8):
        raise _refused(f"GPTQ's layout {layout} with {bits} bits")
    return PackedSettings("gptq", bits, group, zero_shift=int(layout == "gptq"))


def _scaling(group: QuantizationGroup) -> Fp8Settings:
    return Fp8Settings(_block((group.weights or {}).get("block_structure")))


def _block(sizes: Any) -> tuple[int, int] | None:
    """Returns the outputs and inputs of a block. Raises ModelLoadError for any other value."""
    if sizes is None:
        return None
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(isinstance(s, int) and 1 <= s <= MAX_INT for s in sizes)
    ):
        raise _refused(f"blocks of {shortened(sizes)}")
    return sizes[0], sizes[1]


def unpacked(weights: StoredTensors, config: Mapping[str, Any]) -> StoredTensors:
    """Returns the tensors of a checkpoint, with packed matrices and eight-bit floats under plain names."""
    settings = packing_of(config)
    if settings is None:
        return weights
    if isinstance(settings, Fp8Settings):
        floats = Fp8Weights(weights, settings)
        if not floats.scaled:
            raise _refused("fp8 without scales")
        return floats
    result = PackedWeights(weights, weights.shapes, settings)
    if not result.quantized:
        raise _refused(f"{settings.method} without packed matrices")
    return result


def read_int8(weights: Mapping[str, Tensor], name: str) -> Int8 | None:
    """Returns the weight of the linear layer ``name``; None if it is not quantized."""
    if f"{name}._weight_qdata" in weights:
        values, scales = weights[f"{name}._weight_qdata"], weights.get(f"{name}._weight_scale")
        offset = weights.get(f"{name}._weight_zero_point")
    elif f"{name}.weight_scale" in weights and f"{name}.weight" in weights:
        values, scales = weights[f"{name}.weight"], weights[f"{name}.weight_scale"]
        offset = weights.get(f"{name}.weight_zero_point")
    else:
        return None
    if values.dtype != torch.int8 or values.ndim != 2 or scales is None or scales.numel() != values.shape[0]:
        raise ModelLoadError(f"the matrix of {name!r} is not int8 with one scale per channel; {SUPPORTED}")
    if offset is not None and bool(offset.any()):
        raise ModelLoadError(f"the matrix of {name!r} has zero points; {SUPPORTED}")
    return Int8(values, scales.to(torch.float32, copy=True).flatten())


def _refused(what: str) -> ModelLoadError:
    return ModelLoadError(f"the checkpoint is quantized in a way that is not computed here ({what}); {SUPPORTED}")


def _scheme(group: QuantizationGroup) -> PackedSettings:
    weights = group.weights or {}
    bits, strategy, size = (weights.get(key) for key in ("num_bits", "strategy", "group_size"))
    if group.input_activations:
        raise _refused("format pack-quantized with quantized activations")
    if (
        weights.get("type", "int") != "int"
        or bits not in (4, 8)
        or isinstance(bits, float)
        or strategy not in ("group", "channel")
    ):
        raise _refused(f"weights with type {weights.get('type')}, num_bits {bits}, strategy {strategy}")
    symmetric = weights.get("symmetric") is not False
    if strategy == "channel":
        return PackedSettings("compressed-tensors", bits, symmetric=symmetric)
    if not isinstance(size, int) or not 1 <= size <= MAX_INT:
        raise _refused(f"groups of {size}")
    return PackedSettings("compressed-tensors", bits, size, symmetric=symmetric)


def _compressed_tensors(settings: Mapping[str, Any]) -> str | None:
    """Returns the first unsupported setting; None if all are supported."""
    groups = list((settings.get("config_groups") or {}).values())
    layout = {group.get("format") or settings.get("format") for group in groups}
    if not groups or not layout <= {"int-quantized", "naive-quantized"}:
        return f"format {', '.join(sorted(map(str, layout))) or settings.get('format')}"
    for group in groups:
        for part, strategy, dynamic in (("weights", "channel", False), ("input_activations", "token", True)):
            scheme = group.get(part) or {}
            expected = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": dynamic}
            for key, value in expected.items():
                if scheme.get(key) != value:
                    return f"{part} with {key} {scheme.get(key)}"
        if group.get("output_activations"):
            return "quantized output activations"
    return next((key for key in _OTHER if settings.get(key)), None)


def _torchao(settings: Mapping[str, Any]) -> str | None:
    """Returns the first unsupported setting; None if all are supported."""
    kinds = settings.get("quant_type") or {}
    scheme = kinds.get("default") if isinstance(kinds, Mapping) and len(kinds) == 1 else None
    if not isinstance(scheme, Mapping) or scheme.get("_type") != "Int8DynamicActivationInt8WeightConfig":
        return f"torchao {scheme.get('_type') if isinstance(scheme, Mapping) else kinds}"
    data = _object(scheme.get("_data"))
    granularity = data.get("granularity")
    granularities = granularity if isinstance(granularity, list) else [granularity]
    per_row = all(isinstance(g, Mapping) and g.get("_type") == "PerRow" for g in granularities)
    symmetric = _object(data.get("act_mapping_type")).get("_data") == "SYMMETRIC"
    if scheme.get("_version") != 2 or not per_row or not symmetric or data.get("weight_only_decode"):
        return "torchao's int8 with other settings"
    if settings.get("include_input_output_embeddings"):
        return "a quantized embedding"
    return None


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

"""Checkpoints whose matrices are eight-bit floats with scales, as DeepSeek and Qwen publish them.

A weight is a value of type e4m3 times the scale of its block, often of 128 x 128 values. Values of e4m3 span too many
powers of two for int8, so matrices are dequantized when they are read: in float32, then rounded to the model's
dtype. Files store the scales beside the matrices: ``weight_scale_inv`` (DeepSeek, transformers) or ``weight_scale``
(compressed-tensors). Other engines also round activations to eight bits; here they keep the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
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
        """Whether any matrix has scales."""
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

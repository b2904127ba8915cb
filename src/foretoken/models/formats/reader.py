"""Reads and checks tensors of a checkpoint by name."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.models.families.family import TensorNames
from foretoken.models.formats.prequantized import read_int8
from foretoken.models.formats.quantize import Grouped, GroupedWeights, Int8, Matrix, Quantizer, floats
from foretoken.models.formats.weight_files import converted
from foretoken.models.formats.weights import LinearWeights

# Prefixes of a decoder's names beside the family's: in a checkpoint of the bare model, and inside a multimodal one.
BASES = (
    "",
    "model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.text_model.",
    "text_model.",
)


def located(weights: Container[str], names: TensorNames) -> tuple[str, str]:
    """Returns the prefix of the names of a decoder's tensors, and the name of its vocabulary head.

    They are the family's, unless the checkpoint has the embedding under another prefix.
    """
    parts = ("weight", "_weight_qdata")
    bases = (base for base in (names.base, *BASES) for part in parts if f"{base}{names.embedding}.{part}" in weights)
    base = next(bases, names.base)
    heads = (base.removesuffix("model.") + names.head if base != names.base else names.head, names.head, "lm_head")
    return base, next((head for head in heads if any(f"{head}.{part}" in weights for part in parts)), names.head)


def rows_of(matrix: Matrix, order: Tensor, dtype: torch.dtype) -> Matrix:
    """Returns a matrix with its outputs in another order. One with codes in groups is dequantized to ``dtype``."""
    if isinstance(matrix, Int8):
        return Int8(matrix.values[order], matrix.scales[order])
    return floats(matrix, dtype)[order]


@dataclass(frozen=True, slots=True)
class TensorReader:
    """Reads and checks tensors by name.

    Methods raise ModelLoadError for a tensor that is missing or has the wrong shape.
    """

    weights: Mapping[str, Tensor]  # the checkpoint's tensors
    dtype: torch.dtype  # dtype to convert matrices and biases to
    quantize: Quantizer | None = None  # quantizer of float matrices; None for none
    norm_offset: float = 0.0  # offset that is added to stored norm weights
    transposed: bool = False  # whether matrices are stored as [in, out]
    base: str = ""  # prefix of the names of a decoder's tensors
    head: str = "lm_head"  # name of its vocabulary head

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        return self.parts((name,), rows, columns)[0]

    def parts(self, names: tuple[str, ...], rows: int, columns: int) -> tuple[Matrix, ...]:
        """Returns the weights of linear layers with the same input; concatenated they are [rows, columns]."""
        parts = as_one_kind(tuple(self._part(name) for name in names), self.dtype)
        if len({type(part) for part in parts}) > 1:
            raise ModelLoadError(
                f"only some of {' and '.join(names)} are quantized; here they are one product, so quantize all or none"
            )
        self.check(parts, names, rows, columns)
        return parts

    def linear(self, names: tuple[str, ...], rows: int, columns: int) -> LinearWeights:
        """Returns ``parts`` with their biases: linear layers that are one product."""
        return LinearWeights(self.parts(names, rows, columns), self.bias(names, rows))

    def halves(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the names of a gate and of the matrix that it multiplies, which GGUF files store apart."""
        apart = tuple(f"{names[0].rpartition('.')[0]}.{part}_proj" for part in ("gate", "up"))
        return apart if len(names) == 1 and all(f"{name}.weight" in self.weights for name in apart) else names

    def check(self, parts: Sequence[Matrix], names: tuple[str, ...], rows: int, columns: int) -> None:
        """Raises ModelLoadError unless the concatenated parts are [rows, columns]."""
        shapes = [tuple(part.shape) for part in parts]
        if any(len(s) != 2 or s[1] != columns for s in shapes) or sum(s[0] for s in shapes) != rows:
            raise self._misshapen(names, parts, (rows, columns))

    def bias(self, names: tuple[str, ...], rows: int) -> Tensor | None:
        """Returns the concatenated biases [rows] of linear layers; None if they have none."""
        if not any(f"{name}.bias" in self.weights for name in names):
            return None
        biases = [self.get(f"{name}.bias") for name in names]
        if any(bias.ndim != 1 for bias in biases) or sum(map(len, biases)) != rows:
            raise self._misshapen([f"{name}.bias" for name in names], biases, (rows,))
        return torch.cat([converted(f"{name}.bias", b, self.dtype) for name, b in zip(names, biases, strict=True)])

    def norm(self, name: str, size: int) -> Tensor:
        return self.floats(f"{name}.weight", (size,)).add_(self.norm_offset)

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a copy of the tensor in float32; a tensor of one dimension may be stored with several."""
        return self.shaped(name, shape).to(torch.float32, copy=True)

    def shaped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns the tensor as it is stored, whose shape is checked as in ``floats``."""
        stored = self.get(name)
        if len(shape) == 1 and stored.ndim > 1:
            stored = stored.flatten()
        if stored.shape != shape:
            raise self._misshapen([name], [stored], shape)
        return stored

    def get(self, name: str) -> Tensor:
        """Returns the tensor as it is stored. Raises ModelLoadError if it is missing or holds no floats."""
        try:
            tensor = self.weights[name]
        except KeyError:
            raise ModelLoadError(f"the checkpoint lacks the tensor {name!r}; is it complete?") from None
        if not tensor.is_floating_point():
            raise ModelLoadError(f"the tensor {name!r} holds {tensor.dtype} instead of floats; is it damaged?")
        return tensor

    def _misshapen(self, names: Sequence[str], parts: Sequence[Matrix], shape: tuple[int, ...]) -> ModelLoadError:
        shapes = " and ".join(str(tuple(part.shape)) for part in parts)
        return ModelLoadError(
            f"{' and '.join(names)} have the shape {shapes}, but config.json says {shape}"
            f"{' together' * (len(parts) > 1)}"
        )

    def grouped(self, name: str) -> Grouped | None:
        """Returns the weight of ``name`` if it is stored in groups and need not be dequantized; else None."""
        return self.groups(f"{name}.weight") if f"{name}.weight" in self.weights else None

    def groups(self, name: str) -> Grouped | None:
        """Returns the tensor if it is stored in groups and need not be dequantized; else None."""
        if self.quantize is not None or not isinstance(self.weights, GroupedWeights):
            return None
        return self.weights.grouped(name)

    def made(self, name: str, weight: Tensor) -> Matrix:
        """Returns a float matrix in the model's dtype, or quantized."""
        return converted(name, weight, self.dtype) if self.quantize is None else self.quantize(weight)

    def _part(self, name: str) -> Matrix:
        stored = read_int8(self.weights, name)
        if stored is not None:
            return stored
        grouped = self.grouped(name)
        if grouped is not None:
            return grouped
        weight = self.get(f"{name}.weight")
        if weight.ndim != 2:
            raise ModelLoadError(f"the tensor {name + '.weight'!r} is not a matrix; is the checkpoint damaged?")
        if self.transposed:
            weight = weight.t().contiguous()
        return self.made(f"{name}.weight", weight)


def as_one_kind(parts: tuple[Matrix, ...], dtype: torch.dtype) -> tuple[Matrix, ...]:
    """Returns the parts of one product, dequantized if some are floats and others in groups."""
    if any(isinstance(part, Grouped) for part in parts) and any(isinstance(part, Tensor) for part in parts):
        return tuple(floats(part, dtype) for part in parts)
    return parts

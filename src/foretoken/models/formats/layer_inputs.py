"""The weights of inputs of single layers (``families/layers.py``) as the runners take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foretoken.models.families.layers import LayerInputs
from foretoken.models.formats.quantize import Matrix
from foretoken.models.formats.reader import TensorReader
from foretoken.models.formats.weight_files import converted


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputWeights:
    """Weights for one layer's input: a gate [width, H], the last matrix [H, width] and a norm, float32 [H]."""

    gate: Matrix
    up: Matrix
    norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputEnds:
    """Weights that produce the inputs of all layers.

    Attributes:
        table: embeddings [V, layers * width], in the model's dtype.
        projection: projection of the model's embedding, [layers * width, H].
        norm: norm of the projection for one layer, float32 [width].
    """

    table: Tensor
    projection: Matrix
    norm: Tensor


def read_layer_input(reader: TensorReader, at: str, inputs: LayerInputs, hidden: int) -> LayerInputWeights:
    """Reads the weights for the input of the layer with names below ``at``.

    Raises ModelLoadError if a tensor is missing or has the wrong shape.
    """
    return LayerInputWeights(
        gate=reader.matrix(at + inputs.gate, inputs.width, hidden),
        up=reader.matrix(at + inputs.up, hidden, inputs.width),
        norm=reader.norm(at + inputs.norm, hidden),
    )


def read_layer_input_ends(
    reader: TensorReader, inputs: LayerInputs, layers: int, hidden: int, vocab: int
) -> LayerInputEnds:
    """Reads the weights that produce the inputs of all layers.

    Raises ModelLoadError if a tensor is missing or has the wrong shape.
    """
    name, width = f"{reader.base}{inputs.table}.weight", layers * inputs.width
    return LayerInputEnds(
        table=_table(reader, name, vocab, width),
        projection=reader.matrix(reader.base + inputs.projection, width, hidden),
        norm=reader.norm(reader.base + inputs.projection_norm, inputs.width),
    )


def _table(reader: TensorReader, name: str, vocab: int, width: int) -> Tensor:
    """Returns embeddings; those stored in groups are dequantized in parts."""
    groups = reader.groups(name)
    if groups is not None and groups.shape == (vocab, width):
        return groups.dequantize(reader.dtype)
    return converted(name, reader.shaped(name, (vocab, width)), reader.dtype, copy=True)

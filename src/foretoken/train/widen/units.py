"""Units (heads, neurons) of a wider model that computes the same function, and the rotated residual stream.

Write x for a row of the narrow residual stream, h its width and h' the wider one. The wide stream carries x Q, where
Q [h, h'] has orthonormal rows. Then

* a matrix W [h, n] that writes to the stream becomes Q^T W;
* a matrix that reads a norm's output becomes sqrt(h/h') W diag(w) Q, with w the norm's weight: the norm averages h'
  squares with the same sum, so with eps h/h' its output is sqrt(h'/h) times as long. The wide norms have weight 1;
* additional neurons and heads come in groups with equal inputs and opposite outputs, so that they cancel.

Factors of the groups are powers of two, which are exact in any format. For an odd number, a real neuron or head is
split in two halves.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.formats.reader import TensorReader

Tensors = Iterator[tuple[str, Tensor]]


def rotation(narrow: int, wide: int, seed: int) -> Tensor:
    """Returns Q, float64 [narrow, wide], a uniformly random matrix with orthonormal rows."""
    gaussian = torch.randn(wide, narrow, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    q, r = torch.linalg.qr(gaussian)
    return (q * r.diagonal().sign()).T.contiguous()


def layer_positions(layers: int, wide_layers: int) -> list[int]:
    """Returns the positions of the real layers among the wide model's, evenly spread."""
    return [i * wide_layers // layers for i in range(layers)]


@dataclass(frozen=True)
class Copies:
    """Sources and output factors of the wide units."""

    sources: tuple[int, ...]  # ``sources[i] >= 0`` is a real unit, ``-1 - j`` is the j-th filler unit
    factors: tuple[float, ...] = ()  # factors of the units' output columns

    @property
    def fillers(self) -> int:
        return -min(min(self.sources, default=0), 0)

    def gather(self, real: Tensor, filler: Tensor) -> Tensor:
        """Returns rows of ``real`` and ``filler`` in the order of the wide units."""
        rows = [s if s >= 0 else len(real) - 1 - s for s in self.sources]
        return torch.cat([real, filler])[torch.tensor(rows, dtype=torch.long)]


def copies(real: int, wide: int, first_filler: int = 0) -> Copies:
    """Pads real units to ``wide`` units by pairs with factors (1, -1).

    For an odd number the last real unit is halved. Without real units a triple (1, 1, -2) is added. Raises ValueError
    if ``wide`` is too small, or a single filler unit would have to cancel.

    Args:
        real: Number of real units.
        wide: Number of wide units.
        first_filler: Number of the first filler unit.
    """
    sources, factors = list(range(real)), [1.0] * real
    extra, filler = wide - real, first_filler
    if extra < 0 or (real == 0 and extra == 1):
        raise ValueError(f"{real} units cannot become {wide}")
    if extra % 2:
        if real:
            factors[-1] = 0.5
            sources, factors, extra = [*sources, real - 1], [*factors, 0.5], extra - 1
        else:
            sources, factors, extra = [-1 - filler] * 3, [1.0, 1.0, -2.0], extra - 3
            filler += 1
    for j in range(filler, filler + extra // 2):
        sources, factors = [*sources, -1 - j, -1 - j], [*factors, 1.0, -1.0]
    return Copies(tuple(sources), tuple(factors))


def query_heads(heads: int, groups: int, wide_heads: int, wide_groups: int) -> Copies:
    """Returns query heads in the wide order: group j keeps its real heads, and its others cancel.

    With 0 heads in 0 groups the layer consists of fillers.
    """
    per, wide_per = heads // groups if groups else 0, wide_heads // wide_groups
    sources: list[int] = []
    factors: list[float] = []
    filler = 0
    for j in range(wide_groups):
        group = copies(per if j < groups else 0, wide_per, filler)
        sources += [s + j * per if s >= 0 else s for s in group.sources]
        factors += group.factors
        filler = max(filler, group.fillers)
    return Copies(tuple(sources), tuple(factors))


def key_heads(heads: int, wide_heads: int) -> Copies:
    """Returns key heads in the wide order: the real ones first, then fillers."""
    return Copies(tuple(j if j < heads else heads - 1 - j for j in range(wide_heads)))


@dataclass(frozen=True)
class CheckpointPlan:
    """A checkpoint to be written."""

    parameters: int
    dtype: torch.dtype
    config: dict[str, Any]  # content of config.json
    layers: list[int] | dict[str, list[int]]  # positions of the source's layers among its own
    tensors: Tensors  # names and tensors, one after another


class WideStream(Protocol):
    """A wide residual stream."""

    @property
    def wide(self) -> int:
        """h'."""

    def reads(self, weight: Tensor, norm: Tensor | None = None) -> Tensor:
        """Widens a matrix [n, h] after a norm of weight ``norm`` [h] to [n, h']."""

    def writes(self, weight: Tensor) -> Tensor:
        """Widens a matrix [h, n] that writes to the stream to [h', n]."""


@dataclass(frozen=True)
class RotatedStream:
    """The wide stream x Q. Its norms have weight 1, so the matrices after a norm take its weight."""

    q: Tensor

    @property
    def wide(self) -> int:
        return self.q.shape[1]

    def embedding(self, weight: Tensor) -> Tensor:
        """Widens embeddings [V, h] to [V, h']."""
        return weight.double() @ self.q

    def reads(self, weight: Tensor, norm: Tensor | None = None) -> Tensor:
        scaled = weight.double() if norm is None else weight.double() * norm.double()
        return scaled @ self.q * math.sqrt(self.q.shape[0] / self.wide)

    def writes(self, weight: Tensor) -> Tensor:
        return self.q.T @ weight.double()


@dataclass(frozen=True)
class UnitWidener:
    """Widens the matrices of layers. A layer of fillers has no source, and its matrices no weights: None."""

    reader: TensorReader
    stream: WideStream
    generator: torch.Generator  # source of filler units
    write_scale: float  # standard deviation of the filler units' output columns

    def get(self, source: str | None, name: str) -> Tensor | None:
        """Returns a tensor of the layer with the prefix ``source``."""
        return None if source is None else self.reader.get(source + name)

    def reads(self, weight: Tensor | None, units: Copies, size: int, norm: Tensor | None = None) -> Tensor:
        """Returns the rows of wide units, ``size`` of each, that read the stream after a norm."""
        real = None if weight is None else self.stream.reads(weight, norm)
        return self.gathered(real, units, size, self.stream.wide, 1 / math.sqrt(self.stream.wide))

    def writes(self, weight: Tensor | None, units: Copies, size: int) -> Tensor:
        """Returns the columns of wide units, ``size`` of each, that write to the stream."""
        real = None if weight is None else self.stream.writes(weight).T
        rows = self.gathered(real, units, size, self.stream.wide, self.write_scale).unflatten(0, (-1, size))
        return (rows * torch.tensor(units.factors).view(-1, 1, 1)).flatten(0, 1).T

    def block(
        self,
        source: str | None,
        inputs: Iterable[tuple[str, Copies, int]],
        output: tuple[str, Copies, int],
        norm: Tensor | None = None,
    ) -> Tensors:
        """Yields the matrices of a block, by name: the inputs read the stream after a norm, the output writes to it."""
        for name, units, size in inputs:
            yield name, self.reads(self.get(source, name), units, size, norm)
        name, units, size = output
        yield name, self.writes(self.get(source, name), units, size)

    def gathered(self, real: Tensor | None, units: Copies, size: int, width: int, deviation: float = 1.0) -> Tensor:
        """Returns rows [units * size, width] in the order of the wide units; fillers are random."""
        given = torch.empty(0, size, width) if real is None else real.float().unflatten(0, (-1, size))
        filler = self.random(units.fillers * size, width).unflatten(0, (-1, size)) * deviation
        return units.gather(given, filler).flatten(0, 1)

    def random(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self.generator)


def filler_scale(layers: int) -> float:
    """Returns the standard deviation of the filler units' outputs in a model of this depth."""
    return 0.02 / math.sqrt(2 * layers)


def check_growth(shape: Any, narrow: Mapping[str, int]) -> None:
    for name, value in vars(shape).items():
        if value < narrow[name]:
            raise InvalidRequest(f"{name} {value} is less than the source's {narrow[name]}; a model can only grow")


def check_wide_groups(wide: tuple[int, int], narrow: tuple[int, int], deeper: bool) -> None:
    """Raises InvalidRequest if added query heads cannot cancel within their groups.

    Args:
        wide: Query heads and key heads of the wide model.
        narrow: Those of the source.
        deeper: Whether the wide model has layers of fillers.
    """
    (heads, groups), (narrow_heads, narrow_groups) = wide, narrow
    if heads % groups:
        raise InvalidRequest(f"{heads} heads do not divide among {groups} key heads; choose a multiple")
    per = narrow_heads // narrow_groups
    if heads // groups < per:
        raise InvalidRequest(
            f"{heads // groups} query heads per key head are fewer than the source's {per}; "
            f"choose at most {heads // per} key heads"
        )
    if heads == groups and (groups > narrow_groups or deeper):
        raise InvalidRequest("a key head with one query head cannot be added so that it cancels; ask for fewer")


def check_embedding(reader: TensorReader, name: str, vocab: int, hidden: int) -> None:
    """Raises ModelLoadError if the embedding's shape is not the config's."""
    if (shape := tuple(reader.get(name).shape)) != (vocab, hidden):
        raise ModelLoadError(f"{name} is {shape}, but config.json says {vocab} x {hidden}")


def check_unquantized(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        raise InvalidRequest("cannot widen a quantized model; pass its original checkpoint")

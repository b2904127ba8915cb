"""The matrices of a wider Llama that computes the same function.

Write x for a row of the narrow residual stream, h its width and h' the wider one. The wide stream carries x Q, where
Q [h, h'] has orthonormal rows. Then

* a matrix W [h, n] that writes to the stream becomes Q^T W;
* a matrix that reads a norm's output becomes sqrt(h/h') W diag(w) Q, with w the norm's weight: the norm averages h'
  squares with the same sum, so with eps h/h' its output is sqrt(h'/h) times as long. The wide norms have weight 1;
* additional neurons and heads come in groups with equal inputs and opposite outputs, so that they cancel.

Factors of the groups are powers of two, which are exact in any format. For an odd number, a real neuron or head is
split in two halves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


def rotation(narrow: int, wide: int, seed: int) -> torch.Tensor:
    """Returns Q, float64 [narrow, wide], a uniformly random matrix with orthonormal rows."""
    gaussian = torch.randn(wide, narrow, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    q, r = torch.linalg.qr(gaussian)
    return (q * r.diagonal().sign()).T.contiguous()


def layer_positions(layers: int, wide_layers: int) -> list[int]:
    """Returns the positions of the real layers among the wide model's, evenly spread."""
    return [i * wide_layers // layers for i in range(layers)]


@dataclass(frozen=True)
class Copies:
    """Sources and output factors of the wide units.

    Args:
        sources: ``sources[i] >= 0`` is a real unit, ``-1 - j`` is the j-th filler unit.
        factors: Factors of the units' output columns.
    """

    sources: tuple[int, ...]
    factors: tuple[float, ...]

    @property
    def fillers(self) -> int:
        """Number of filler units."""
        return -min(min(self.sources, default=0), 0)

    def gather(self, real: torch.Tensor, filler: torch.Tensor) -> torch.Tensor:
        """Returns rows of ``real`` and ``filler`` in the order of the wide units."""
        rows = [s if s >= 0 else len(real) - 1 - s for s in self.sources]
        return torch.cat([real, filler])[torch.tensor(rows, dtype=torch.long)]


def copies(real: int, wide: int, first_filler: int = 0) -> Copies:
    """Pads real units to ``wide`` units by pairs with factors (1, -1).

    For an odd number the last real unit is halved. Without real units a triple (1, 1, -2) is added.

    Args:
        real: Number of real units.
        wide: Number of wide units.
        first_filler: Number of the first filler unit.

    Raises:
        ValueError: ``wide`` is too small, or one filler unit alone would have to cancel.
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


@dataclass(frozen=True)
class Widener:
    """Widens single matrices.

    Args:
        q: Q, from ``rotation``.
        generator: Source of filler units.
        write_scale: Standard deviation of the filler units' output columns.
    """

    q: torch.Tensor
    generator: torch.Generator
    write_scale: float

    @property
    def wide(self) -> int:
        """Width of the wide residual stream."""
        return self.q.shape[1]

    def embedding(self, weight: torch.Tensor) -> torch.Tensor:
        """Widens embeddings [V, h] to [V, h']."""
        return weight.double() @ self.q

    def reads(self, weight: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Widens a matrix [n, h] after a norm of weight ``norm`` [h] to [n, h']."""
        narrow = self.q.shape[0]
        return (weight.double() * norm.double()) @ self.q * math.sqrt(narrow / self.wide)

    def writes(self, weight: torch.Tensor) -> torch.Tensor:
        """Widens a matrix [h, n] that writes to the stream to [h', n]."""
        return self.q.T @ weight.double()

    def filler_reads(self, rows: int) -> torch.Tensor:
        """Returns random rows [rows, h'] whose products with a normed vector have variance 1."""
        return self._random(rows, self.wide) / math.sqrt(self.wide)

    def filler_writes(self, columns: int) -> torch.Tensor:
        """Returns random columns as rows, [columns, h']."""
        return self._random(columns, self.wide) * self.write_scale

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self.generator)

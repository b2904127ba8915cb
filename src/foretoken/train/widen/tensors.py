"""The matrices of a wider Llama that computes the same function.

Write x for a row of the narrow residual stream, h its width and h' the wider one. The wide stream carries x Q, where
Q [h, h'] has orthonormal rows. Then

* what writes to the stream, W [h, n], becomes Q^T W;
* what reads a norm's output becomes sqrt(h/h') W diag(w) Q, w the norm's weight: the norm's mean runs over h' numbers
  whose squares add up to the same, so with eps h/h' its output is sqrt(h'/h) times as long. The wide norms weigh 1;
* further neurons and heads come in groups that read alike and write opposite columns, so that they add up to nothing.

Factors of the groups are powers of two, exact in any format. Where one is left over, a real neuron or head is split
in two halves instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


def rotation(narrow: int, wide: int, seed: int) -> torch.Tensor:
    """Q float64 [narrow, wide] with orthonormal rows, uniform over such matrices; fixed by its arguments."""
    gaussian = torch.randn(wide, narrow, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    q, r = torch.linalg.qr(gaussian)
    return (q * r.diagonal().sign()).T.contiguous()


def layer_positions(layers: int, wide_layers: int) -> list[int]:
    """Where the real layers stand among the wide model's, evenly spread."""
    return [i * wide_layers // layers for i in range(layers)]


@dataclass(frozen=True)
class Copies:
    """Which unit each wide unit is, and its share in what is written: ``sources[i] >= 0`` is a real unit,
    ``-1 - j`` the j-th filler unit; ``factors[i]`` multiplies its column.
    """

    sources: tuple[int, ...]
    factors: tuple[float, ...]

    @property
    def fillers(self) -> int:
        return -min(min(self.sources, default=0), 0)

    def gather(self, real: torch.Tensor, filler: torch.Tensor) -> torch.Tensor:
        """Rows of ``real`` and ``filler`` in the wide order."""
        rows = [s if s >= 0 else len(real) - 1 - s for s in self.sources]
        return torch.cat([real, filler])[torch.tensor(rows, dtype=torch.long)]


def copies(real: int, wide: int, first_filler: int = 0) -> Copies:
    """``real`` units padded to ``wide`` by pairs (1, -1); an odd one out halves the last real unit, or, where
    none is real, makes a triple (1, 1, -2). ``wide`` 1 with no real unit cannot cancel: ValueError.
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
    """Query heads in the wide order: group j keeps its own real heads, and all else cancels within its group.

    No real heads at all (0 of 0 groups) makes a layer of fillers.
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
    """Widens single matrices. ``q`` is `rotation`'s; random rows come from ``generator``."""

    q: torch.Tensor
    generator: torch.Generator
    write_scale: float  # standard deviation of what filler units write

    @property
    def wide(self) -> int:
        return self.q.shape[1]

    def embedding(self, weight: torch.Tensor) -> torch.Tensor:
        """[V, h] -> [V, h']"""
        return weight.double() @ self.q

    def reads(self, weight: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """A matrix behind a norm of weight ``norm`` [h]: [n, h] -> [n, h']"""
        narrow = self.q.shape[0]
        return (weight.double() * norm.double()) @ self.q * math.sqrt(narrow / self.wide)

    def writes(self, weight: torch.Tensor) -> torch.Tensor:
        """[h, n] -> [h', n]"""
        return self.q.T @ weight.double()

    def filler_reads(self, rows: int) -> torch.Tensor:
        """Random rows [rows, h'] whose products with a normed vector have variance 1."""
        return self._random(rows, self.wide) / math.sqrt(self.wide)

    def filler_writes(self, columns: int) -> torch.Tensor:
        """Random columns, as rows: [columns, h']"""
        return self._random(columns, self.wide) * self.write_scale

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self.generator)

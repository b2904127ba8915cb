"""Tables of positions of the compiled runner: rotary factors, attention biases, query scales."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.runners.native.bindings import ModelSpec, RopeSpec
from foretoken.models.runners.native.memory import padded

_CHUNK = 512  # positions that are computed at once, which bounds the temporary arrays


class PositionTables:
    """The tables that a specification points to, as long as passes have reached so far.

    Args:
        architecture: sizes and operations of the decoder.
        spec: its specification, whose pointers are set.
    """

    def __init__(self, architecture: Architecture, spec: ModelSpec) -> None:
        self._architecture, self._spec, self._rows = architecture, spec, 0
        self._ropes = (RopeSpec * max(1, len(architecture.frequencies)))()
        spec.ropes = self._ropes
        self._tables: list[Tensor] = []

    def reserve(self, rows: int) -> None:
        """Grows the tables to at least ``rows`` positions: rotary ones are [positions, 2 * half]."""
        if rows <= self._rows:
            return
        a, self._rows = self._architecture, padded(rows + rows // 4, _CHUNK)
        self._spec.table_positions = self._rows
        positions = torch.arange(self._rows).float()
        self._tables = []
        for number, frequencies in enumerate(a.frequencies):
            table = torch.empty(self._rows, 2 * len(frequencies))
            for part, chunk in zip(table.split(_CHUNK), positions.split(_CHUNK), strict=True):
                angles = torch.outer(chunk, frequencies)
                torch.mul(
                    torch.cat((angles.cos(), angles.sin()), -1), (a.rotary_scales or (1.0,) * 2)[number], out=part
                )
            self._tables.append(table)
            self._ropes[number] = RopeSpec(table.data_ptr(), len(frequencies), a.paired)
        if a.alibi is not None:
            self._tables.append(a.alibi.table(self._rows))
            self._spec.biases, self._spec.bias_stride = self._tables[-1].data_ptr(), self._rows
        if a.query_growth is not None:
            self._tables.append(a.query_factors(positions))
            self._spec.query_scales = self._tables[-1].data_ptr()

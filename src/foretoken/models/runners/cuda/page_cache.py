"""The KV cache on a device in pages, which sequences with a common prefix share (``models/state/pages.py``).

Pages are never moved, and a pass gets the positions of each sequence's pages. So a CUDA graph stays valid while the
cache
grows, and a sequence takes the memory of its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.core.devices import on_device
from foretoken.models.families.layers import HeadSizes
from foretoken.models.runners.base import Move
from foretoken.models.runners.triton_kernels.rows import UNIT, LayerPages
from foretoken.models.state.hybrid import HybridState
from foretoken.models.state.pages import PAGE, Pages
from foretoken.models.state.recurrent import StateShape


class DeviceMemory:
    """Zeroed memory, freed by ``free`` or with this object.

    Args:
        device: device of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: dict[int, Tensor] = {}

    def allocate(self, size: int) -> int:
        """Returns the address of ``size`` zeroed bytes."""
        block = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self._blocks[block.data_ptr()] = block
        return block.data_ptr()

    def free(self, address: int) -> None:
        """Frees memory that ``allocate`` returned; passes that were started before may still use it."""
        del self._blocks[address]

    @torch.inference_mode()
    def copy(self, to: int, source: int, size: int) -> None:
        """Copies ``size`` bytes to the address ``to``, after the passes that were started before."""
        if size:
            self._part(to, size).copy_(self._part(source, size))

    def block(self, address: int) -> Tensor:
        """Returns the memory at an address from ``allocate``."""
        return self._blocks[address]

    def _part(self, address: int, size: int) -> Tensor:
        start = address if address in self._blocks else max(block for block in self._blocks if block <= address)
        return self._blocks[start][address - start : address - start + size]


class Moves(NamedTuple):
    """Rows to move within the pages of sequences."""

    firsts: list[int]  # the first move of each sequence, and their number
    pairs: list[tuple[int, int, int, int]]  # address of a page, the row in it, and the same of the row that moves there

    @property
    def columns(self) -> Iterable[int]:
        """The pairs, one field after another."""
        return chain(*zip(*self.pairs, strict=True))


SCALE = 4  # bytes of the scale of a head's key or value in an int8 cache
Places = npt.NDArray[np.int64]


class PageCache:
    """Keys and values of all sequences.

    A page holds 64 tokens of all layers, in blocks [64, width of a head]: keys, then values, of all heads of a layer.
    Layers whose heads have the same width are side by side, so that few copies move a token. Scales of int8 follow
    all elements, [64] for each block.

    Args:
        sizes: sizes of each layer's heads; None for a layer that reads another layer's.
        dtype: type of keys and values; int8 ones have a scale for each head and token.
        shape: sizes of the recurrent state beside keys and values; None for none.
        rank: number of the keys' elements that are also the values (latent attention); 0 if values are stored.

    Attributes:
        pages: the pages of each slot.
        token_bytes: bytes of one token's keys and values in all layers.
        state_bytes: bytes of a sequence's recurrent state.
        blocks: int64 [2, blocks], the start in a page and the bytes of a row of each block.
        widest: the largest of these numbers of bytes.
    """

    def __init__(
        self,
        sizes: Sequence[HeadSizes | None],
        dtype: torch.dtype,
        device: torch.device,
        shape: StateShape | None = None,
        rank: int = 0,
    ) -> None:
        self._memory = DeviceMemory(device)
        base = self._memory.allocate(UNIT)
        self._base = base
        self._item = dtype.itemsize
        scaled = dtype == torch.int8
        order = sorted((size.head_dim, number, size.kv_heads) for number, size in enumerate(sizes) if size is not None)
        sides = 1 if rank else 2
        numbers = sum(sides * heads * dim for dim, _, heads in order)
        self.token_bytes = numbers * self._item + scaled * SCALE * sum(sides * heads for *_, heads in order)
        self._parts: list[tuple[int, int, int]] = []  # start of blocks of one width, their number, bytes of a row
        self._layers: dict[int, LayerPages] = {}
        block = self._memory.block(base)
        typed, scales = block.view(dtype), block.view(torch.float32)
        at, scale_at = 0, PAGE * numbers * self._item // SCALE
        for dim, number, heads in order:
            half = heads * PAGE * dim
            values = at if rank else at + half
            kept = (scale_at, scale_at + heads * PAGE) if scaled else None
            self._layers[number] = LayerPages(typed, scales, heads, dim, rank or dim, at, values, kept)
            self._extend(at * self._item, sides * heads, dim * self._item)
            at, scale_at = at + sides * half, scale_at + sides * heads * PAGE
        if scaled:
            self._extend(PAGE * numbers * self._item, sum(sides * heads for *_, heads in order), SCALE)
        self.widest = max((size for *_, size in self._parts), default=0)
        starts = [(start + block * PAGE * size, size) for start, count, size in self._parts for block in range(count)]
        self.blocks = torch.tensor(starts, dtype=torch.int64, device=device).view(-1, 2).T.contiguous()
        self._moves = Moves([0], [])
        self._kernels: Any = None
        page = max(PAGE * self.token_bytes, UNIT)
        self.state_bytes = 0 if shape is None else shape.bytes
        if shape is None:
            self.pages = Pages(self._memory.allocate, page, self._copy)
        else:
            self.pages = HybridState(self._memory, page, shape)

    def _extend(self, start: int, blocks: int, row: int) -> None:
        if self._parts and self._parts[-1][2] == row:
            before, count, _ = self._parts.pop()
            start, blocks = before, count + blocks
        self._parts.append((start, blocks, row))

    def layer(self, number: int) -> LayerPages:
        """Returns the positions of a layer's keys and values in pages."""
        return self._layers[number]

    def reserve(self, slot: int, first: int, rows: int) -> Places:
        """Allocates pages for ``rows`` rows; rows from ``first`` on will be written.

        Returns:
            Positions of their pages, in ``UNIT`` bytes from ``LayerPages.base``.
        """
        self.pages.reserve(slot, first, rows)
        held = np.array(self.pages.held(slot)[: -(-rows // PAGE)], dtype=np.int64)
        places: Places = (held - self._base) // UNIT
        return places

    def move(self, moves: Sequence[Move], kernels: Any) -> None:
        """Moves rows of slots, the accepted paths of draft trees, before the next pass; see ``Runner.move_all``."""
        (firsts, pairs), self._kernels = self._moves, kernels
        for slot, destination, sources in moves:
            self.pages.accept(slot, destination, sources)
            held = self.pages.held(slot)
            for row, source in enumerate(sources, destination):
                if row != source:
                    pairs.append((held[row // PAGE], row % PAGE, held[source // PAGE], source % PAGE))
            if len(pairs) > firsts[-1]:
                firsts.append(len(pairs))
        if self.state_bytes:
            self.settle()

    def settle(self, sequences: int = 0, count: int = 0) -> Moves | None:
        """Moves the rows that no pass has moved by one launch.

        Returns:
            The moves that are left to the next pass in its place, if there are up to ``count`` of them, of up to
            ``sequences`` sequences; None if none are.
        """
        moves, self._moves = self._moves, Moves([0], [])
        if not moves.pairs or not self._parts:
            return None
        if len(moves.firsts) - 1 <= sequences and len(moves.pairs) <= count:
            return moves
        numbers, heads = on_device([*moves.firsts, *moves.columns], self._memory.device), len(moves.firsts)
        self._kernels.move(numbers[:heads], numbers[heads:].view(4, -1), self.blocks, self.widest)
        return None

    def _copy(self, to: int, source: int, size: int) -> None:
        self.settle()
        self._memory.copy(to, source, size)

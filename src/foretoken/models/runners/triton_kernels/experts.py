"""Experts of single rows: a row's result does not depend on what other rows were routed to.

A program computes a block of outputs of one expert, for all rows that chose it, a tile of them at a time. A single row
has a tile of the same size. So a pass reads the weights of an expert once for few rows, and once a tile for many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.models.runners.triton_kernels.rows import EDGE

OUTPUTS, INPUTS = 64, 256  # outputs, and bytes of inputs, of one step of a program: the fastest sizes on an H200
PAIRS = 1024  # pairs of one step of the search


@triton.jit
def _find(chosen, counts, pairs, sizes, total, TOP: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    found = 0
    for start in range(0, total, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        own = tl.load(chosen + pair, mask=pair < total, other=-1) == expert
        own = own & (tl.load(counts + pair // TOP, mask=pair < total, other=0) > 0)
        place = found + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(pairs + expert * total + place, pair, mask=own)
        found += tl.sum(own.to(tl.int32), 0)
    tl.store(sizes + expert, found)


@triton.jit
def _expert(
    x, weights, bias, pairs, sizes, result, total, stride,
    TOP: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, SHARED: tl.constexpr, BIAS: tl.constexpr,
    TILE: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    at, expert = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.program_id(1).to(tl.int64)
    inside = at < OUT
    matrix = weights + expert * IN * OUT + at[None, :] * IN
    size = tl.load(sizes + expert)
    for start in range(0, size, TILE):
        slot = start + tl.arange(0, TILE)
        valid = slot < size
        pair = tl.load(pairs + expert * total + slot, mask=valid, other=0).to(tl.int64)
        row = pair
        if SHARED:
            row = pair // TOP
        sums = tl.zeros([TILE, BLOCK_OUT], tl.float32)
        for step in range(0, IN, BLOCK_IN):
            inner = step + tl.arange(0, BLOCK_IN)
            numbers = tl.load(
                x + row[:, None] * stride + inner[None, :], mask=valid[:, None] & (inner < IN)[None, :], other=0.0
            )
            part = tl.load(matrix + inner[:, None], mask=(inner < IN)[:, None] & inside[None, :], other=0.0)
            sums = tl.dot(numbers, part, sums, input_precision="ieee")
        if BIAS:
            sums += tl.load(bias + expert * OUT + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        to = result + pair[:, None] * OUT + at[None, :]
        tl.store(to, sums.to(result.dtype.element_ty), mask=valid[:, None] & inside[None, :])


@triton.jit
def _combine(outputs, weights, result, TOP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for rank in range(TOP):
        pair = row * TOP + rank
        total += tl.load(outputs + pair * SIZE + at, mask=inside, other=0.0).to(tl.float32) * tl.load(weights + pair)
    tl.store(result + row * SIZE + at, total, mask=inside)


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Pairs of a row and one of its experts, by expert."""

    shape: tuple[int, int]  # rows, and experts of each row
    pairs: Tensor  # indices of the pairs, int32 [experts, rows * experts of each row]
    sizes: Tensor  # number of pairs, int32 [experts]

    @staticmethod
    def of(chosen: Tensor, counts: Tensor, experts: int) -> Routes:
        """Finds the pairs.

        Args:
            chosen: indices of experts, int64 [R, top].
            counts: integers [R]; rows with 0 are padding, which belongs to no expert.
            experts: number of experts.
        """
        rows, top = chosen.shape
        pairs = torch.empty((experts, rows * top), dtype=torch.int32, device=chosen.device)
        sizes = torch.empty(experts, dtype=torch.int32, device=chosen.device)
        _find[(experts,)](chosen.contiguous(), counts, pairs, sizes, rows * top, TOP=top, BLOCK=PAIRS, num_warps=4)
        return Routes((rows, top), pairs, sizes)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStack:
    """The matrices of all experts on the device: [experts, out, in], and biases [experts, out] or None."""

    weights: Tensor
    biases: Tensor | None

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """Multiplies by the matrices of the chosen experts.

        Args:
            x: [R, in], or [R, top, in] with an input for each of a row's experts.
            routes: pairs of rows and experts.

        Returns:
            [R, top, out]; zeros for padding.
        """
        rows, top = routes.shape
        experts, out, size = self.weights.shape
        x = x.contiguous()
        result = x.new_zeros((rows, top, out))
        _expert[(triton.cdiv(out, OUTPUTS), experts)](
            x, self.weights, self.weights if self.biases is None else self.biases, routes.pairs, routes.sizes, result,
            rows * top, size, TOP=top, IN=size, OUT=out, SHARED=x.ndim == 2, BIAS=self.biases is not None,
            TILE=EDGE, BLOCK_OUT=OUTPUTS, BLOCK_IN=INPUTS // x.element_size(), num_warps=4, num_stages=3,
        )  # fmt: skip
        return result


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """Returns the sum of outputs [R, top, H] times weights, float32 [R, top], in the order of ranks: float32 [R, H]."""
    rows, top, size = outputs.shape
    result = torch.empty((rows, size), dtype=torch.float32, device=outputs.device)
    _combine[(rows, triton.cdiv(size, 1024))](
        outputs, weights.contiguous(), result, TOP=top, SIZE=size, BLOCK=1024, num_warps=4
    )
    return result

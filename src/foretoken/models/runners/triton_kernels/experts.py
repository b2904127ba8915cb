"""Experts of single rows: a row's result does not depend on what other rows were routed to.

A program computes a block of outputs of one pair of a row and one of its experts. Pairs that share an expert read its
weights from the cache. Long chunks of a prompt, in which many rows share an expert, are computed by products instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTPUTS, INPUTS = 32, 128  # of one step of a program


@triton.jit
def _expert(
    x, weights, bias, chosen, counts, result, stride,
    TOP: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, SHARED: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    pair, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = pair // TOP
    if tl.load(counts + row) > 0:
        expert = tl.load(chosen + pair)
        inside = at < OUT
        source = x + (row if SHARED else pair) * stride
        matrix = weights + expert * IN * OUT + at[:, None] * IN
        sums = tl.zeros([BLOCK_OUT], tl.float32)
        for start in range(0, IN, BLOCK_IN):
            inner = start + tl.arange(0, BLOCK_IN)
            numbers = tl.load(source + inner, mask=inner < IN, other=0.0).to(tl.float32)
            part = tl.load(matrix + inner[None, :], mask=inside[:, None] & (inner < IN)[None, :], other=0.0)
            sums += tl.sum(part.to(tl.float32) * numbers[None, :], 1)
        if BIAS:
            sums += tl.load(bias + expert * OUT + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + pair * OUT + at, sums.to(result.dtype.element_ty), mask=inside)


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
class ExpertStack:
    """The matrices of all experts on the device: [experts, out, in], and biases [experts, out] or None."""

    weights: Tensor
    biases: Tensor | None

    def __call__(self, x: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
        """Multiplies by the matrices of the chosen experts.

        Args:
            x: [R, in], or [R, top, in] with an input for each of a row's experts.
            chosen: numbers of experts, int64 [R, top].
            counts: int32 [R]; rows with 0 are padding, whose results are zeros.

        Returns:
            [R, top, out]
        """
        rows, top = chosen.shape
        _, out, size = self.weights.shape
        x, chosen = x.contiguous(), chosen.contiguous()
        result = x.new_zeros((rows, top, out))
        _expert[(rows * top, triton.cdiv(out, OUTPUTS))](
            x, self.weights, self.weights if self.biases is None else self.biases, chosen, counts, result, size,
            TOP=top, IN=size, OUT=out, SHARED=x.ndim == 2, BIAS=self.biases is not None,
            BLOCK_OUT=OUTPUTS, BLOCK_IN=INPUTS, num_warps=4,
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

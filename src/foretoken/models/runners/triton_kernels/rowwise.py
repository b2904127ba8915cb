"""Norms, activations and rotations in one kernel each, a program for every row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x, weight, result, eps, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < SIZE
    numbers = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(numbers * numbers) / SIZE + eps)
    normed = numbers * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + row * SIZE + at, normed.to(result.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMS norm over the last dimension times ``weight`` [n], computed in float32 and rounded once."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _rms_norm[(flat.shape[0],)](
        flat, weight, result, eps, flat.stride(0), SIZE=size, BLOCK=block, num_warps=min(8, max(1, block // 512))
    )
    return result


@triton.jit
def _silu_mul(x, result, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + SIZE + at, mask=inside, other=0.0)
    active = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    tl.store(result + row * SIZE + at, active * up, mask=inside)


def silu_mul(x: Tensor) -> Tensor:
    """Returns silu(gate) * up of [R, 2 n], gate and up side by side; both factors are rounded, as torch rounds them."""
    size = x.shape[-1] // 2
    result = torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
    _silu_mul[(x.shape[0], triton.cdiv(size, 1024))](x, result, x.stride(0), SIZE=size, BLOCK=1024, num_warps=4)
    return result


@triton.jit
def _rotate(
    x, cos, sin, result, row_stride, head_stride,
    DIM: tl.constexpr, TURNED: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside, turned = at < DIM, at < TURNED
    source = x + row * row_stride + head * head_stride
    if PAIRED:
        other = at ^ 1
    else:
        other = tl.where(at < TURNED // 2, at + TURNED // 2, at - TURNED // 2)
    numbers = tl.load(source + at, mask=inside, other=0.0)
    partner = tl.load(source + other, mask=turned, other=0.0)
    c = tl.load(cos + row * TURNED + at, mask=turned, other=1.0)
    s = tl.load(sin + row * TURNED + at, mask=turned, other=0.0)
    mixed = (numbers * c).to(numbers.dtype) + (partner * s).to(numbers.dtype)
    to = result + (row * tl.num_programs(1) + head) * DIM
    tl.store(to + at, tl.where(turned, mixed, numbers), mask=inside)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, paired: bool) -> Tensor:
    """Returns ``functional.rotate`` of [R, heads, D] by cos and sin [R, 1, rotated elements]."""
    rows, heads, dim = x.shape
    result = torch.empty((rows, heads, dim), dtype=x.dtype, device=x.device)
    _rotate[(rows, heads)](
        x, cos, sin, result, x.stride(0), x.stride(1),
        DIM=dim, TURNED=cos.shape[-1], PAIRED=paired, BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return result


@triton.jit
def _quantize(x, values, scales, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < SIZE
    numbers = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(numbers)), 1e-30)
    # The sum with 1.5 * 2^23 has no digits behind the point: it is rounded to an integer, ties to even.
    rounded = (numbers * (127.0 / largest) + 12582912.0) - 12582912.0
    tl.store(values + row * SIZE + at, rounded.to(tl.int8), mask=inside)
    tl.store(scales + row, largest / 127.0)


@triton.jit
def _restore(
    sums, weight_scales, row_scales, bias, result, SIZE: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    y = tl.load(sums + row * SIZE + at, mask=inside, other=0).to(tl.float32)
    y = y * tl.load(weight_scales + at, mask=inside, other=0.0) * tl.load(row_scales + row)
    if BIAS:
        y += tl.load(bias + at, mask=inside, other=0.0)
    tl.store(result + row * SIZE + at, y.to(result.dtype.element_ty), mask=inside)


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the product of x [R, in] with an int8 matrix, as ``linear.Int8Linear`` does.

    Args:
        x: the input; R is at least 17, as ``torch._int_mm`` requires.
        weight: int8 [out, in].
        scales: float32 [out].
        bias: float32 [out], or None.
    """
    rows, size = x.shape
    values = torch.empty((rows, size), dtype=torch.int8, device=x.device)
    row_scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _quantize[(rows,)](
        x, values, row_scales, x.stride(0), SIZE=size, BLOCK=block, num_warps=min(8, max(1, block // 512))
    )
    sums = torch._int_mm(values, weight.T)
    out = weight.shape[0]
    result = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    _restore[(rows, triton.cdiv(out, 1024))](
        sums, scales, row_scales, scales if bias is None else bias, result,
        SIZE=out, BIAS=bias is not None, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return result

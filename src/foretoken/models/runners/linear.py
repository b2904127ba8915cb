"""Matrix products whose rows do not depend on how many rows share the pass."""

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.formats.quantize import Grouped, Int8, Matrix, quantize_rows
from foretoken.models.runners.triton_kernels import has_kernels, kernels

# With AMX, oneDNN uses another bf16 kernel from 33 rows on, which sums in another order (measured).
AMX_ROWS = 32
# A float32 sum of this many products of two int8 is below 2^24, so it is exact in any order.
EXACT_TERMS = 1024
# On CUDA, cuBLAS chooses its kernel by the number of rows; with a fixed one, no row's sum depends on the others. Up to
# 64 rows cost what one row costs (measured on an H200, docs/benchmarks/h200.md).
FIXED_ROWS = 64


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether oneDNN can pack weights of this dtype: on CPUs, in float32, or in bf16 if the CPU has it."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def can_multiply_int8(weight: Tensor) -> bool:
    """Returns whether torch's int8 product takes a weight [out, in], and is exact.

    Without VNNI on the CPU, or if oneDNN may not use it, intermediate sums may saturate. On CUDA, cuBLAS takes
    multiples of 8.
    """
    if weight.device.type == "cuda":
        return has_kernels(weight.device) and not any(size % 8 for size in weight.shape)
    return weight.is_cpu and _int8_sums_are_exact()


@cache
def _int8_sums_are_exact() -> bool:
    """Returns whether oneDNN sums products of int8 exactly. ONEDNN_MAX_CPU_ISA may forbid instructions."""
    if not torch.backends.mkldnn.is_available() or not torch.cpu._is_vnni_supported():
        return False
    largest = torch.full((2, EXACT_TERMS), 127, dtype=torch.int8)
    return torch.equal(torch._int_mm(largest, largest.T).float(), exact_product(largest, largest))


def by_fixed_rows(multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns ``multiply(x)`` of x [rows, in], computed ``FIXED_ROWS`` rows at a time; the last ones are padded."""
    count = len(x)
    if count % FIXED_ROWS:
        x = F.pad(x, (0, 0, 0, -count % FIXED_ROWS))
    if len(x) == FIXED_ROWS:
        return multiply(x)[:count]
    return torch.cat([multiply(part) for part in x.split(FIXED_ROWS)])[:count]


def moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


class Product(Protocol):
    """A linear layer, ``x @ weight.T + bias``."""

    def __call__(self, x: Tensor, any_kernel: bool = False) -> Tensor:
        """Multiplies x [rows, in]. Returns [rows, out].

        any_kernel: whether these rows are always computed together. The kernel may then depend on their number.
        """


def product(weight: Matrix, bias: Tensor | None = None) -> Product:
    """Returns the fastest product for this weight."""
    if isinstance(weight, Grouped):
        return GroupedLinear(weight, bias)
    return Int8Linear(weight, bias) if isinstance(weight, Int8) else Linear(weight, bias)


class Linear:
    """A float weight, packed once for oneDNN if possible.

    A packed weight is read at up to twice the bandwidth of ``F.linear``, and its rows are bitwise equal for any number
    of rows from 2 on. A single row may use another kernel, so passes are padded to two rows.
    """

    __slots__ = ("_bias", "_max_rows", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = can_pack(weight.dtype, weight.device)
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        else:
            self._weight = weight.clone() if weight.device.type == "cpu" else weight  # it may be a mapped file
        self._bias = bias
        amx = self._packed and weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        self._max_rows = AMX_ROWS if amx else 0

    def __call__(self, x: Tensor, any_kernel: bool = False) -> Tensor:
        if not self._packed:
            return self._plain(x) if any_kernel or x.is_cpu else by_fixed_rows(self._plain, x)
        if any_kernel or not self._max_rows or x.shape[0] <= self._max_rows:
            return self._multiply(x)
        return torch.cat([self._multiply(part) for part in x.tensor_split(-(-x.shape[0] // self._max_rows))])

    def _plain(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def _multiply(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class Int8Linear:
    """Int8 weights times dynamically quantized rows (W8A8), with exact integer sums.

    oneDNN's packed product with scales (``qlinear``) is not used: on processors with VNNI and without AMX it may take
    its reference implementation (measured: 12.7 s instead of 1.1 ms for 64 rows times 2,048 x 2,048).
    """

    __slots__ = ("_bias", "_native", "_scales", "_values")

    def __init__(self, weight: Int8, bias: Tensor | None = None) -> None:
        self._native = can_multiply_int8(weight.values)
        self._values = weight.values.clone(memory_format=torch.contiguous_format)
        self._scales, self._bias = weight.scales, None if bias is None else bias.float()

    def __call__(self, x: Tensor, any_kernel: bool = False) -> Tensor:
        if self._native and has_kernels(x.device):
            return by_fixed_rows(self._fused, x)
        values, scales = quantize_rows(x)
        sums = torch._int_mm(values, self._values.T).float() if self._native else exact_product(values, self._values)
        y = sums.mul_(self._scales)
        y = y * scales if self._bias is None else torch.addcmul(self._bias, y, scales)
        return y.to(x.dtype)

    def _fused(self, x: Tensor) -> Tensor:
        return kernels().int8_linear(x, self._values, self._scales, self._bias)


class GroupedLinear:
    """Weights quantized in groups. The first product dequantizes them to its input's dtype for good."""

    __slots__ = ("_bias", "_linear", "_weight")

    def __init__(self, weight: Grouped, bias: Tensor | None = None) -> None:
        self._weight: Grouped | None = weight
        self._bias = bias
        self._linear: Linear | None = None

    def __call__(self, x: Tensor, any_kernel: bool = False) -> Tensor:
        if self._weight is not None:
            self._linear = Linear(self._weight.dequantize(x.dtype).to(x.device), self._bias)
            self._weight = None  # it may hold codes in memory
        assert self._linear is not None
        return self._linear(x, any_kernel)


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x @ weight.T, float32 [rows, out]: exact sums, rounded once; on any device.

    Args:
        x: int8 [rows, in].
        weight: int8 [out, in].
    """
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for start in range(0, x.shape[1], EXACT_TERMS):
        terms = slice(start, start + EXACT_TERMS)
        total += F.linear(x[:, terms].float(), weight[:, terms].float()).to(torch.int32)
    return total.float()

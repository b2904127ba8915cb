"""Every kind of weights on every instruction set that this processor can run, against float64, bit by bit over rows."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from foretoken.core.native import build, cpu
from foretoken.models.formats.quantize import Grouped, GroupLayout, Groups, Int8, TwoLevels
from foretoken.models.formats.quantize import Matrix as AnyMatrix
from foretoken.models.runners.native.build import Kind, packing_library
from foretoken.models.runners.native.packing import Arena, Packed, pack

from .products import PRODUCTS, SOURCES
from .test_native import LEVELS, needs_kernels

OUTPUTS, INPUTS, ROWS = 80, 768, 40


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def groups(
    bits: int,
    levels: tuple[int, ...] | None = None,
    offsets: bool = False,
    block: int = 1,
    zero: int = 0,
    group: int = 32,
) -> Grouped:
    """A matrix in groups with all codes, the largest and the smallest among them."""
    layout = GroupLayout(bits, group, zero, levels, offsets, block, half=block == 1 and not offsets)
    codes = (torch.arange(OUTPUTS * INPUTS) * 7919 % 2**bits).to(torch.uint8).view(OUTPUTS, INPUTS)
    codes[3], codes[4] = 0, 2**bits - 1

    def scales(seed: int) -> Tensor | TwoLevels:
        count = INPUTS // group
        if block == 1:
            return (random(OUTPUTS, count + seed)[:, :count] / 16).half().float()
        parts = (torch.arange(OUTPUTS * count) % 127 - 63).to(torch.int8).view(OUTPUTS, count)
        return TwoLevels((random(OUTPUTS, count // block + seed)[:, : count // block] / 64).half().float(), parts)

    return Grouped.of(Groups(codes, scales(0), scales(1) if offsets else None), layout)


def int8() -> Int8:
    values = (torch.arange(OUTPUTS * INPUTS) * 7919 % 256 - 128).to(torch.int8).view(OUTPUTS, INPUTS)
    values[2], values[5] = -128, 127
    return Int8(values, random(OUTPUTS).abs())


@dataclass(frozen=True)
class Case:
    """Weights, how they are packed, and the error that rounding may leave, relative to the sum of magnitudes."""

    weights: Callable[[], AnyMatrix]
    compress: bool = False
    near: float = 1e-6


KINDS = {
    "float32": Case(lambda: random(OUTPUTS, INPUTS)),
    "bfloat16": Case(lambda: random(OUTPUTS, INPUTS).bfloat16()),
    "packed": Case(lambda: random(OUTPUTS, INPUTS).bfloat16(), compress=True),
    "int8": Case(int8),
    "four bits": Case(lambda: groups(4, zero=8)),
    "four bits in groups of 128": Case(lambda: groups(4, zero=8, group=128)),
    "table of small levels": Case(lambda: groups(4, levels=tuple(range(0, 64, 4)), zero=20)),
    "table of large levels": Case(lambda: groups(4, levels=tuple(range(0, 256, 17)), zero=120)),
    "six bits": Case(lambda: groups(6, offsets=True, block=8)),
    "eight bits": Case(lambda: groups(8, zero=128)),
}


@pytest.fixture(scope="module", params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in [each.name for each in cpu.available()]:
        pytest.skip(f"this processor cannot run {name}")
    return name


def products(packed: Packed, name: str) -> Callable[[Tensor], Tensor]:
    """Returns a function that multiplies rows [n, INPUTS] by a packed matrix."""
    parts = [PRODUCTS, (SOURCES / "kind.cpp", (f"-DFORETOKEN_KIND={packed.matrix.kind}",))]
    chosen = next(each for each in cpu.LEVELS if each.name == name)
    library = ctypes.CDLL(str(build.linked("products", parts, chosen)))

    def multiply(x: Tensor) -> Tensor:
        out = torch.empty(len(x), packed.matrix.units * 32)
        arguments = ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(INPUTS), len(x), ctypes.c_void_p(out.data_ptr())
        library.multiply(ctypes.byref(packed.matrix), *arguments)
        return out[:, :OUTPUTS]

    return multiply


def dequantized(weights: AnyMatrix) -> Tensor:
    if isinstance(weights, Grouped):
        return weights.rows(0, OUTPUTS).dequantize(weights.layout)
    return weights.dequantize() if isinstance(weights, Int8) else weights.float()


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_products_are_those_of_float64_for_any_number_of_rows(level, kind, monkeypatch):
    monkeypatch.setenv(cpu.VARIABLE, level)
    case = KINDS[kind]
    weights, arena = case.weights(), Arena(packing_library())
    packed: Packed = pack(arena, [weights], compress=case.compress)
    assert (packed.matrix.kind == Kind.PACKED) == case.compress
    multiply = products(packed, level)
    # whole numbers with the largest in each span, so that activations in int8 are exact
    x = (random(ROWS, INPUTS) * 40).round().clamp(-127, 127)
    x[:, ::16], x[:, 1::16] = 127, -127
    wide = dequantized(weights).double()
    result, magnitude = multiply(x), x.double().abs() @ wide.abs().T
    assert ((result.double() - x.double() @ wide.T).abs() <= case.near * magnitude).all()
    for rows in range(1, ROWS):
        assert torch.equal(multiply(x[:rows].clone()), result[:rows]), rows
        assert torch.equal(multiply(x[rows:].clone()), result[rows:]), rows

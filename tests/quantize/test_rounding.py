"""Scales by least squares, GPTQ, and the blocks of GGUF's types."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as K
from torch import Tensor

from foretoken.models.formats.gguf.blocks import LAYOUTS, PACKED, groups_of
from foretoken.quantize.ggml import to_blocks
from foretoken.quantize.rounding import Curvature, Grid, Rounding, affine_scales, gptq, symmetric_scales

# Mean squared error of llama.cpp's ggml_quantize_chunk on ``weights()``, in thousandths of the weights' mean square.
LLAMA_CPP = {
    K.Q4_0: 7.335,
    K.Q4_1: 6.127,
    K.Q5_0: 1.821,
    K.Q5_1: 1.431,
    K.Q8_0: 0.02838,
    K.Q3_K: 22.63,
    K.Q4_K: 5.119,
    K.Q5_K: 1.297,
    K.Q6_K: 0.3138,
}


def weights(rows: int = 64, columns: int = 1024, seed: int = 0) -> Tensor:
    return 0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def inputs(columns: int, seed: int = 1) -> Tensor:
    """Returns correlated inputs [512, columns] of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    sizes = torch.randn(columns, generator=generator).exp()
    return torch.randn(512, columns, generator=generator) @ (mixing + torch.eye(columns)) * sizes


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_blocks_hold_what_the_codes_stand_for(kind: K) -> None:
    """The gguf package reads the same numbers that rounding compared."""
    seen: list[Tensor] = []

    class Spy(Rounding):
        def codes(self, weights: Tensor, grid: Grid) -> Tensor:
            codes = super().codes(weights, grid)
            seen.append(grid.values(codes))
            return codes

    given = weights()
    given[3], given[4, :256], given[5] = 0.0, 0.0, given[5].abs()  # zeros, and groups of one sign
    data = to_blocks(given, kind, Spy())
    values = torch.from_numpy(gguf.dequantize(data, kind))
    assert torch.equal(values, seen[0])
    assert torch.equal(groups_of(kind, data).dequantize(LAYOUTS[kind]), values)
    assert torch.equal(values[3], torch.zeros(1024))


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_errors_are_llama_cpp_s_or_smaller(kind: K) -> None:
    given = weights()
    values = torch.from_numpy(gguf.dequantize(to_blocks(given, kind, Rounding()), kind))
    error = float((values - given).square().mean() / given.square().mean())
    assert error < 1.03e-3 * LLAMA_CPP[kind]
    if kind in (K.Q4_0, K.Q4_1, K.Q5_0, K.Q5_1, K.Q8_0):
        plain = gguf.dequantize(gguf.quantize(given.numpy(), kind), kind)
        assert error <= float(np.square(plain - given.numpy()).mean() / given.square().mean())


def test_every_scale_is_a_local_minimum_or_the_best_tried() -> None:
    """No scale of a fine grid is much better than the one that was chosen."""
    x = weights(32, 32)
    chosen = symmetric_scales(x, -8, torch.ones_like(x))
    error = (Grid(chosen[:, None], -8, 7, 32).values(Grid(chosen[:, None], -8, 7, 32).codes(x)) - x).square().sum(1)
    best = torch.full_like(error, torch.inf)
    extreme = x.gather(1, x.abs().argmax(1, keepdim=True))
    for share in torch.linspace(0.7, 1.3, 601):
        grid = Grid(extreme / -8 * share, -8, 7, 32)
        best = torch.minimum(best, (grid.values(grid.codes(x)) - x).square().sum(1))
    assert float((error / best).mean()) < 1.02 and float((error / best).max()) < 1.2


def test_importance_moves_the_error_to_where_it_costs_little() -> None:
    x = weights(256, 32)
    importance = torch.ones_like(x)
    importance[:, :4] = 100.0

    def error(weight: Tensor) -> Tensor:
        scales, offsets = affine_scales(x, 15, weight, -1.0, 20)
        grid = Grid(scales[:, None], 0, 15, 32, offsets[:, None])
        return (grid.values(grid.codes(x)) - x).square().mean(0)

    assert error(importance)[:4].mean() < 0.7 * error(torch.ones_like(x))[:4].mean()


def test_a_group_of_zeros_has_the_scale_0_and_gives_zeros() -> None:
    x = torch.zeros(2, 32)
    scales = symmetric_scales(x, -8, torch.ones_like(x))
    grid = Grid(scales[:, None], -8, 7, 32)
    assert torch.equal(scales, torch.zeros(2)) and torch.equal(grid.values(grid.codes(x)), x)
    scales, offsets = affine_scales(x, 15, torch.ones_like(x), -1.0, 20)
    grid = Grid(scales[:, None], 0, 15, 32, offsets[:, None])
    assert torch.equal(grid.values(grid.codes(x)), x)


def test_gptq_changes_outputs_less_than_rounding_to_the_nearest() -> None:
    given, seen = weights(96, 256), inputs(256)
    x = given.unflatten(1, (-1, 64))
    grid = Grid(symmetric_scales(x, -8, torch.ones_like(x)), -8, 7, 64)
    curvature = Curvature.of(seen.t() @ seen)
    nearest, better = grid.values(grid.codes(given)), grid.values(gptq(given, grid, curvature))
    first, second = (((values - given) @ seen.t()).square().mean() for values in (nearest, better))
    assert second < 0.5 * first
    assert (better - given).square().mean() > (nearest - given).square().mean()


def test_gptq_with_independent_inputs_is_rounding_to_the_nearest() -> None:
    given = weights(16, 200)
    grid = Grid(symmetric_scales(given.unflatten(1, (-1, 40)), -8, torch.ones(16, 5, 40)), -8, 7, 40)
    curvature = Curvature.of(torch.diag(torch.rand(200, generator=torch.Generator().manual_seed(0)) + 0.1))
    assert torch.equal(gptq(given, grid, curvature), grid.codes(given))


def test_inputs_that_never_occur_do_no_harm() -> None:
    seen = inputs(64)
    seen[:, 10:20] = 0.0
    given = weights(16, 64)
    x = given.unflatten(1, (-1, 32))
    grid = Grid(symmetric_scales(x, -8, torch.ones_like(x)), -8, 7, 32)
    for hessian in (seen.t() @ seen, torch.zeros(64, 64)):
        assert torch.isfinite(grid.values(gptq(given, grid, Curvature.of(hessian)))).all()

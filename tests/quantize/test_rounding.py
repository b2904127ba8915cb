"""Scales by least squares, GPTQ, GGUF's blocks; text that runs through a model while it is quantized."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf.constants import GGMLQuantizationType as K
from tests.models.tiny import ARCHITECTURES, only_runner
from torch import Tensor

from foretoken import zoo
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.checkpoint import load_config
from foretoken.models.formats.gguf.blocks import LAYOUTS, PACKED, groups_of
from foretoken.models.loading import load_model
from foretoken.quantize import calibration, quantize_checkpoint
from foretoken.quantize.calibration import Calibration, Losses
from foretoken.quantize.file import to_blocks
from foretoken.quantize.rounding import Curvature, Grid, Rounding, Scheme, affine_scales, gptq, symmetric_scales
from foretoken.quantize.run import EMBEDDING, SourceCheckpoint

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


def tokens(count: int = 640) -> Tensor:
    return torch.randint(3, 101, (count,), generator=torch.Generator().manual_seed(0))


def run_through(source: SourceCheckpoint, text: Calibration, scale: float = 1.0) -> Losses:
    """Takes a text through a model whose layers' matrices are multiplied by ``scale`` instead of quantized."""
    ends: dict[str, Tensor] = {}
    for layer, tensors in source.parts():
        if layer is None:
            ends |= tensors
            if EMBEDDING in tensors:
                text.begin(tensors[EMBEDDING], tensors[EMBEDDING])
        else:
            curvatures = text.curvatures(layer, tensors)
            assert set(curvatures) == {name for name, tensor in tensors.items() if tensor.ndim == 2}
            assert all(len(curvatures[name].order) == tensors[name].shape[1] for name in curvatures)
            text.advance(layer, {n: t * scale if t.ndim == 2 else t for n, t in tensors.items()})
    return text.losses(ends, ends)


DENSE = [name for name, tiny in ARCHITECTURES.items() if tiny.native and tiny.torch and not tiny.mixture]


@pytest.mark.parametrize("family", DENSE)
def test_the_losses_are_those_of_the_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "WINDOW", 40)
    path = ARCHITECTURES[family].save(tmp_path)
    source = SourceCheckpoint.open(path, Scheme.of("int4"))
    text = Calibration(Architecture.of(load_config(path)), tokens())
    losses = run_through(source, text)
    windows = tokens().view(-1, 40)[1::8]
    total = 0.0
    with only_runner("torch"):
        model = load_model(path, "float32")
        for window in windows.tolist():
            handle = model.open(window[:1])
            logits = model.score([handle], [Draft.chain(window[1:])])[0].logits[:-1]
            model.close(handle)
            total += float(F.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum"))
    assert losses.tokens == windows[:, 1:].numel()
    assert losses.before == pytest.approx(total / losses.tokens, rel=1e-4)
    assert losses.after == pytest.approx(losses.before, rel=1e-5)
    assert run_through(source, Calibration(Architecture.of(load_config(path)), tokens()), 0.7).after != losses.after


def test_models_with_experts_are_refused(tmp_path: Path) -> None:
    path = ARCHITECTURES["mixtral"].save(tmp_path)
    with pytest.raises(InvalidRequest, match="experts are not calibrated"):
        Calibration(Architecture.of(load_config(path)), tokens())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4-g128", "Q4_0"])
def test_calibration_lowers_the_loss(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(file.read_text() for file in sorted(Path(calibration.__file__).parents[1].glob("c*/*.py")))[
        :30_000
    ]
    out = tmp_path / ("model.gguf" if scheme == "Q4_0" else "folder")
    calibrated = quantize_checkpoint(zoo.path("draft"), out, scheme, calibration=text)
    monkeypatch.setattr("foretoken.quantize.run.Rounding", lambda curvature=None: Rounding())
    nearest = quantize_checkpoint(zoo.path("draft"), out, scheme, calibration=text, force=True)
    assert calibrated.losses is not None and nearest.losses is not None
    assert calibrated.losses.before == nearest.losses.before
    assert calibrated.losses.after - calibrated.losses.before < 0.7 * (nearest.losses.after - nearest.losses.before)


def test_short_texts_and_schemes_that_round_nothing_are_refused(tmp_path: Path) -> None:
    source = zoo.path("draft")
    with pytest.raises(InvalidRequest, match="at least 32"):
        quantize_checkpoint(source, tmp_path / "q", "int4", calibration="def f(): pass")
    with pytest.raises(InvalidRequest, match="rounds no weights"):
        quantize_checkpoint(source, tmp_path / "q", "bfloat16", calibration="def f(): pass")
    with pytest.raises(InvalidRequest, match="only decoders"):
        quantize_checkpoint(zoo.path("eagle3"), tmp_path / "q", "int4", calibration="def f(): pass")
    assert not (tmp_path / "q").exists()

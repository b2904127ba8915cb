"""Schemes by name, and rounding to codes of few bits: scales by least squares, codes to the nearest or by GPTQ."""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.gguf.settings import MIXTURES
from foretoken.models.formats.quantize import Quantizer
from foretoken.models.options import QUANTIZATIONS

FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SCHEMES = (*QUANTIZATIONS, *FLOATS, *MIXTURES)


@dataclass(frozen=True, slots=True)
class Scheme:
    """Target format of a quantized checkpoint."""

    name: str  # one of ``SCHEMES``
    quantizer: Quantizer | None = None  # bits and groups of a folder's matrices; None for floats and GGUF
    dtype: torch.dtype | None = None  # dtype of a folder of floats
    gguf: bool = False  # whether a GGUF file is written

    @staticmethod
    def of(name: str) -> "Scheme":
        """Returns the scheme of a name in any case. Raises InvalidRequest for an unknown name."""
        scheme_name = {scheme.lower(): scheme for scheme in SCHEMES}.get(name.lower())
        if scheme_name is None:
            raise InvalidRequest(f"scheme {name!r} is not known; known: {', '.join(SCHEMES)}")
        if scheme_name in QUANTIZATIONS:
            return Scheme(scheme_name, quantizer=Quantizer.of(scheme_name))
        return Scheme(scheme_name, dtype=FLOATS.get(scheme_name), gguf=scheme_name in MIXTURES)

    @property
    def quantizes(self) -> bool:
        return self.dtype is None and self.name not in ("F32", "F16", "BF16")


_SMALL = 1e-15  # magnitude below which a group counts as zeros
_SYMMETRIC_STEPS = tuple(step / 10 for step in range(-9, 10))  # tried around the largest code, as llama.cpp does
_COLUMNS = 128  # columns that GPTQ corrects at once
_DAMPING = 0.01  # fraction of the mean diagonal that is added to the Hessian


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The values that a matrix [out, in] can have: ``code * scale + offset`` in each group of inputs."""

    scales: Tensor  # float32 [out, groups]
    low: int  # smallest code
    high: int  # largest code
    group: int  # inputs of a group; the last may be shorter
    offsets: Tensor | None = None  # float32 [out, groups], or None

    def codes(self, weights: Tensor) -> Tensor:
        inputs = weights.shape[1]
        shifted = weights if self.offsets is None else weights - self._spread(self.offsets, inputs)
        return self._nearest(shifted, self._spread(self.scales, inputs)).to(torch.int16)

    def column(self, weights: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Returns the nearest codes [out] of the weights [out] of one input, and their values."""
        scale = self.scales[:, index // self.group]
        offset = 0.0 if self.offsets is None else self.offsets[:, index // self.group]
        codes = self._nearest(weights - offset, scale)
        return codes, codes * scale + offset

    def values(self, codes: Tensor) -> Tensor:
        numbers = codes * self._spread(self.scales, codes.shape[1])
        return numbers if self.offsets is None else numbers + self._spread(self.offsets, codes.shape[1])

    def _nearest(self, weights: Tensor, scales: Tensor) -> Tensor:
        return weights.div(scales.masked_fill(scales == 0, torch.inf)).round_().clamp_(self.low, self.high)

    def _spread(self, numbers: Tensor, inputs: int) -> Tensor:
        return numbers.repeat_interleave(self.group, 1)[:, :inputs]


def symmetric_scales(x: Tensor, low: int, importance: Tensor) -> Tensor:
    """Returns the scales of least squared error for codes from ``low`` to ``-low - 1``.

    The element of largest magnitude gets a code near ``low``. Several such codes are tried: each gives the other codes,
    and these the scale by least squares (llama.cpp's ``make_qx_quants``). Returns float32 [...].

    Args:
        x: groups [..., group].
        low: smallest code, negative.
        importance: weight of each squared error, as x.
    """
    at = x.abs().argmax(-1, keepdim=True)
    extreme = x.gather(-1, at)
    empty = extreme.abs() < _SMALL
    inverse = low / extreme.masked_fill(empty, torch.inf)
    best, best_score = torch.zeros_like(extreme), torch.zeros_like(extreme)
    for step in _SYMMETRIC_STEPS:
        codes = (x * (inverse * (1 - step / low))).round_().clamp_(low, -low - 1)
        weighted = importance * codes
        dot, square = (weighted * x).sum(-1, keepdim=True), (weighted * codes).sum(-1, keepdim=True)
        scale = dot / square.clamp_min(torch.finfo(torch.float32).tiny)
        score = scale * dot
        better = score > best_score
        best, best_score = torch.where(better, scale, best), torch.where(better, score, best_score)
    return best.masked_fill_(empty, 0.0)[..., 0]


def affine_scales(x: Tensor, high: int, importance: Tensor, first: float, steps: int) -> tuple[Tensor, Tensor]:
    """Returns scales and minimums of least squared error for codes from 0 to ``high``.

    Several ranges are tried, each refined by least squares; the minimum is never positive (llama.cpp's
    ``make_qkx2_quants``). Returns scales and minimums, float32 [...].

    Args:
        x: groups [..., group].
        high: largest code.
        importance: weight of each squared error, as x.
        first: the first code tried for the largest element, less ``high``.
        steps: number of further codes, 0.1 apart.
    """
    smallest, largest = x.amin(-1, keepdim=True).clamp_max(0.0), x.amax(-1, keepdim=True)
    span = largest - smallest
    flat = span <= 0
    span = span.masked_fill(flat, torch.inf)
    weight, total = importance.sum(-1, keepdim=True), (importance * x).sum(-1, keepdim=True)
    scale, offset = span / high, smallest
    codes = ((x - smallest) / scale).round_().clamp_(0, high)
    error = (importance * (scale * codes + offset - x).square_()).sum(-1, keepdim=True)
    error.masked_fill_(flat, 0.0)
    for step in range(steps + 1):
        codes = ((x - smallest) * ((first + 0.1 * step + high) / span)).round_().clamp_(0, high)
        weighted = importance * codes
        ones, squares = weighted.sum(-1, keepdim=True), (weighted * codes).sum(-1, keepdim=True)
        dot = (weighted * x).sum(-1, keepdim=True)
        determinant = weight * squares - ones * ones
        usable = determinant > 0
        divisor = determinant.masked_fill(~usable, 1.0)
        new_scale, new_offset = (weight * dot - total * ones) / divisor, (squares * total - ones * dot) / divisor
        positive = new_offset > 0
        new_scale = torch.where(positive, dot / squares.clamp_min(_SMALL), new_scale)
        new_offset = new_offset.masked_fill(positive, 0.0)
        new_error = (importance * (new_scale * codes + new_offset - x).square_()).sum(-1, keepdim=True)
        better = usable & (new_error < error)
        error, scale = torch.where(better, new_error, error), torch.where(better, new_scale, scale)
        offset = torch.where(better, new_offset, offset)
    return scale.masked_fill_(flat, 0.0)[..., 0], offset[..., 0]


@dataclass(frozen=True, slots=True, eq=False)
class Curvature:
    """Effect of an error in each input of a matrix on its outputs for the calibration text."""

    importance: Tensor  # mean square of each input, float32 [in]
    order: Tensor  # inputs, the largest first
    factor: Tensor  # upper Cholesky factor of the inverse of the damped Hessian, in that order, float32 [in, in]

    @staticmethod
    def of(hessian: Tensor) -> "Curvature":
        """Returns the curvature for a sum of x x^T over inputs x, float32 [in, in]."""
        importance = hessian.diagonal().clone()
        order = importance.argsort(descending=True, stable=True)
        damped = hessian[order][:, order].double()
        mean = float(importance.mean())
        damped.diagonal().add_(_DAMPING * mean if mean > 0 else 1.0)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        return Curvature(importance, order, torch.linalg.cholesky(inverse, upper=True).float())


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounds matrices to a grid: to the nearest codes or, with ``curvature``, by GPTQ."""

    curvature: Curvature | None = None

    @property
    def importance(self) -> Tensor | None:
        """Weight of the squared errors of each input, float32 [in]; None without calibration."""
        return None if self.curvature is None else self.curvature.importance

    def codes(self, weights: Tensor, grid: Grid) -> Tensor:
        return grid.codes(weights) if self.curvature is None else gptq(weights, grid, self.curvature)


def gptq(weights: Tensor, grid: Grid, curvature: Curvature) -> Tensor:
    """Rounds a matrix so that its outputs change least on the calibration text (GPTQ, 2210.17323).

    Inputs are rounded one after the other, those of the largest activations first. Later ones compensate the error of
    earlier ones. Returns codes, int16 [out, in].

    Args:
        weights: float32 [out, in].
        grid: its possible values.
    """
    factor, names = curvature.factor, curvature.order.tolist()
    remaining = weights[:, curvature.order]
    codes = torch.empty(weights.shape, dtype=torch.int16)
    for start in range(0, len(names), _COLUMNS):
        end = min(start + _COLUMNS, len(names))
        block, local_factor = remaining[:, start:end], factor[start:end, start:end]
        errors = torch.empty_like(block)
        for at in range(end - start):
            code, value = grid.column(block[:, at], names[start + at])
            codes[:, names[start + at]] = code.to(torch.int16)
            errors[:, at] = (block[:, at] - value) / local_factor[at, at]
            block[:, at + 1 :] -= torch.outer(errors[:, at], local_factor[at, at + 1 :])
        remaining[:, end:] -= errors @ factor[start:end, end:]
    return codes

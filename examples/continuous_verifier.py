"""Real values instead of tokens: a drafted series verified by an autoregressive Gaussian target.

The rule is token rejection's (2211.17192) with densities for probabilities: x ~ q is accepted with probability
min(1, p(x) / q(x)), on average 1 - TV(p, q), the maximum of any rule for one value. A rejected value is replaced by:

* equal scales: its reflection about the hyperplane midway between the two means, which is exact and stays close to the
  draft value (reflection-maximal coupling; Bou-Rabee, Eberle and Zimmer, Annals of Applied Probability 2020, section
  2.3). With xi = (x - m) / s and e the direction of (m - mu) / s:
      y = mu + s (xi - 2 <e, xi> e);        in one dimension y = mu + m - x
  Its density is q(x(y)) (1 - min(1, p(x(y)) / q(x(y)))) = (p(y) - q(y))+, since the reflection swaps p and q.
  The acceptance probability is 2 Phi(-|(m - mu) / s| / 2).
* other scales: y ~ p until one is accepted with 1 - min(1, q(y) / p(y)), a draw from norm((p - q)+). A rejection takes
  1 / TV draws on average and has probability TV: one draw per value overall.

Here p is N(mu, sigma^2) and q is N(m, s^2), diagonal where a value has several coordinates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from foretoken.core.streams import Purpose, Streams, exponentials, random_seed_from

Reals = NDArray[np.float64]


class RealStream(Protocol):
    """Interface of the random numbers of drafting and verification. A test can replace it by a quadrature.

    ``index`` addresses the draw within the step; a ``bernoulli`` and a ``normal`` may have the same index.
    """

    def bernoulli(self, p: float, index: int) -> bool:
        """Returns True with probability ``p``."""
        ...

    def normal(self, size: int, index: int) -> Reals:
        """Returns ``size`` independent standard normal numbers."""
        ...


@dataclass(frozen=True, slots=True)
class SeededReals:
    """Random numbers of the step that begins after ``position`` values, for one purpose.

    As with ``Streams``, the same address gives the same numbers.
    """

    streams: Streams
    purpose: Purpose
    position: int

    def bernoulli(self, p: float, index: int) -> bool:
        return self.streams.private(self.purpose, self.position).bernoulli(p, index)

    def normal(self, size: int, index: int) -> Reals:
        """Box and Muller (1958): sqrt(2 E) cos(2 pi U) with E exponential, U uniform."""
        noise = exponentials(random_seed_from(self.streams.seed, self.purpose, self.position, index), 2 * size).numpy()
        drawn: Reals = np.sqrt(2.0 * noise[:size]) * np.cos(2.0 * np.pi * np.exp(-noise[size:]))
        return drawn


@dataclass(frozen=True, slots=True)
class Gaussians:
    """One Gaussian per row, with independent coordinates.

    Args:
        means: float64 [rows, d].
        scales: Standard deviations, above 0, float64 [rows, d].
    """

    means: Reals
    scales: Reals

    def __post_init__(self) -> None:
        if self.means.ndim != 2 or self.means.shape != self.scales.shape:
            raise ValueError(f"means {self.means.shape} and scales {self.scales.shape}; expected both [rows, d]")
        if not (np.isfinite(self.means).all() and np.isfinite(self.scales).all() and (self.scales > 0.0).all()):
            raise ValueError(
                "means must be finite and scales finite and above 0; look at what the model made of its past"
            )

    def __len__(self) -> int:
        return len(self.means)

    def draw(self, row: int, stream: RealStream, index: int) -> Reals:
        """Returns a value sampled from row ``row``, [d]."""
        return self.means[row] + self.scales[row] * stream.normal(self.means.shape[1], index)

    def log_density(self, row: int, value: Reals) -> float:
        """Returns the log-density of ``value`` [d], up to the constant -d/2 log(2 pi), which cancels in ratios."""
        z = (value - self.means[row]) / self.scales[row]
        return float(-0.5 * (z @ z) - np.log(self.scales[row]).sum())


@dataclass(frozen=True, slots=True)
class SeriesDraft:
    """Draft values of one series. No values are legal and mean plain sampling.

    Args:
        values: float64 [n, d]. Value i was sampled from row i of ``law``.
        law: The distributions; a row may depend on the values before it.
    """

    values: Reals
    law: Gaussians

    def __post_init__(self) -> None:
        if self.values.shape != self.law.means.shape:
            raise ValueError(f"values {self.values.shape} drawn from a law of shape {self.law.means.shape}")

    def __len__(self) -> int:
        return len(self.values)


class Origin(StrEnum):
    """The origin of the target's own value."""

    BONUS = "bonus"  # every drafted value is accepted
    REFLECTED = "reflected"  # the reflection of the rejected value
    RESIDUAL = "residual"  # sampled from norm((p - q)+)


@dataclass(frozen=True, slots=True)
class SeriesVerdict:
    """Result of verification. accepted: number of accepted draft values. value [d]: the value that the target adds."""

    accepted: int
    value: Reals
    origin: Origin


def verify(draft: SeriesDraft, target: Gaussians, stream: RealStream) -> SeriesVerdict:
    """Verifies a draft. The ``accepted`` draft values followed by ``value`` have the target's distribution.

    Args:
        draft: The draft of n values.
        target: n + 1 rows; row i is the distribution after the first i draft values.
        stream: Random numbers of ``Purpose.VERIFY``. Values are verified at indices 0 to n - 1, the bonus is sampled at
            n, the residual above it.

    Raises:
        ValueError: The rows do not fit the draft.
    """
    n = len(draft)
    if target.means.shape != (n + 1, draft.values.shape[1]):
        raise ValueError(f"target rows {target.means.shape} for {n} values; expected {(n + 1, draft.values.shape[1])}")
    for i, value in enumerate(draft.values):
        if not stream.bernoulli(_chance(target, draft.law, i, value), index=i):
            if np.array_equal(target.scales[i], draft.law.scales[i]):
                return SeriesVerdict(i, _reflect(target, draft.law, i, value), Origin.REFLECTED)
            return SeriesVerdict(i, _residual(target, draft.law, i, stream, first=n + 1), Origin.RESIDUAL)
    return SeriesVerdict(n, target.draw(n, stream, index=n), Origin.BONUS)


def overlap(p: Gaussians, q: Gaussians, row: int) -> float:
    """Returns 1 - TV of two rows of equal scales, the probability that a draft value is accepted: 2 Phi(-|z| / 2)."""
    if not np.array_equal(p.scales[row], q.scales[row]):
        raise ValueError("the closed form is that of equal scales")
    z = (p.means[row] - q.means[row]) / p.scales[row]
    return math.erfc(math.sqrt(float(z @ z) / 8.0))


def _chance(p: Gaussians, q: Gaussians, row: int, value: Reals) -> float:
    """Returns min(1, p / q) at ``value``."""
    return math.exp(min(0.0, p.log_density(row, value) - q.log_density(row, value)))


def _reflect(p: Gaussians, q: Gaussians, row: int, value: Reals) -> Reals:
    """Returns p's mean plus q's deviation, reflected along the line between the means."""
    scale = p.scales[row]
    gap = (q.means[row] - p.means[row]) / scale
    xi = (value - q.means[row]) / scale
    squared = float(gap @ gap)
    mirrored = xi - 2.0 * (gap @ xi) / squared * gap if squared > 0.0 else xi
    reflected: Reals = p.means[row] + scale * mirrored
    return reflected


def _residual(p: Gaussians, q: Gaussians, row: int, stream: RealStream, first: int) -> Reals:
    """Draws y ~ p until one is accepted with 1 - min(1, q / p). Attempt k uses index ``first + k``."""
    for index in count(first):
        value = p.draw(row, stream, index)
        if stream.bernoulli(-math.expm1(min(0.0, q.log_density(row, value) - p.log_density(row, value))), index):
            return value
    raise AssertionError("unreachable: the attempts are endless")

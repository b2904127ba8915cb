"""Steps of one draft value, by quadrature: each decision of the verifier is taken both ways."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from scipy import integrate, stats

from continuous_verifier import Gaussians, SeededReals, SeriesDraft, SeriesVerdict

Verify = Callable[[SeriesDraft, Gaussians, SeededReals], SeriesVerdict]


def rows(*pairs: tuple[float, float]) -> Gaussians:
    """One-dimensional rows of (mean, scale)."""
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return Gaussians(table[:, :1], table[:, 1:])


@dataclass
class Scripted:
    """Answers ``bernoulli`` from a list and ``normal`` with one number, and notes the weight of the answers."""

    answers: list[bool]
    z: float = 0.0
    chances: list[float] = field(default_factory=list)

    def bernoulli(self, p: float, index: int) -> bool:
        answer = self.answers[len(self.chances)]
        self.chances.append(p if answer else 1.0 - p)
        return answer

    def normal(self, size: int, index: int) -> np.ndarray:
        return np.full(size, self.z)


@dataclass(frozen=True)
class Step:
    """One value: the target's (mean, scale) and the draft's."""

    p: tuple[float, float]
    q: tuple[float, float]

    @property
    def break_points(self) -> list[float]:
        """The points where p = q, at which the chance to stand has a kink."""
        (mu, sigma), (m, s) = self.p, self.q
        a, b = 1 / s**2 - 1 / sigma**2, mu / sigma**2 - m / s**2
        c = m**2 / s**2 - mu**2 / sigma**2 + 2 * math.log(s / sigma)
        result = np.roots([a, 2 * b, c] if a else [2 * b, c])
        return sorted(float(r.real) for r in result if abs(r.imag) < 1e-12)

    def density(self, of: tuple[float, float], x: float) -> float:
        return float(stats.norm.pdf(x, *of))

    def run(self, rule: Verify, x: float, answers: list[bool], y: float = 0.0) -> tuple[SeriesVerdict, list[float]]:
        """Runs a step of one draft value x; a draw from the target is y.

        Returns:
            The verdict, and the probability of each decision.
        """
        stream = Scripted(answers, (y - self.p[0]) / self.p[1])
        draft = SeriesDraft(np.array([[x]]), rows(self.q))
        return rule(draft, rows(self.p, self.p), stream), stream.chances

    def stands(self, rule: Verify, x: float) -> float:
        return self.run(rule, x, [True])[1][0]

    def integral(self, f: Callable[[float], float]) -> float:
        points = [-40.0, *self.break_points, 40.0]
        inner = sorted({*points, *(m + k * s for m, s in (self.p, self.q) for k in (-6, -2, 0, 2, 6))})
        return sum(integrate.quad(f, a, b, epsabs=1e-13, epsrel=1e-12)[0] for a, b in pairwise(inner))

    def out(self, rule: Verify, y: float, refused: float | None = None) -> float:
        """Returns the density of the step's first value at y, summed over all paths to it.

        refused: the mass of the residual, for rules that draw from it.
        """
        stood = self.density(self.q, y) * self.stands(rule, y)
        if self.p[1] == self.q[1]:
            source = float(self.run(rule, y, [False])[0].value[0])  # a reflection is its own inverse
            return stood + self.density(self.q, source) * (1.0 - self.stands(rule, source))
        kept = self.run(rule, y, [False, True], y)[1][1]
        assert refused is not None
        return stood + refused * self.density(self.p, y) * kept

    def refusals(self, rule: Verify) -> float:
        """The chance to refuse over the chance that a draw from the target stands in for the refused one."""
        refused = self.integral(lambda x: self.density(self.q, x) * (1.0 - self.stands(rule, x)))
        kept = self.integral(lambda y: self.density(self.p, y) * self.run(rule, y, [False, True], y)[1][1])
        return refused / kept


STEPS = {
    "equal scales": Step((0.3, 1.0), (-0.6, 1.0)),
    "equal scales, small": Step((2.0, 0.05), (2.02, 0.05)),
    "draft too broad": Step((0.3, 0.8), (-0.2, 1.3)),
    "draft too narrow": Step((0.1, 1.2), (0.4, 0.7)),
}

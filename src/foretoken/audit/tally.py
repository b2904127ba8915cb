"""Test statistics of sampled tokens under the target's exact distribution: sums of scores, and G-tests.

For a token x sampled from p, the excess surprise -log p(x) - H(p) has mean 0 given the past, x is the likeliest token
with probability max p, and so on. Each statistic minus its expectation is a martingale difference, so sums over any
number of texts, divided by their standard errors, are approximately standard normal. The rank of x, randomized within
its own probability by an independent uniform, is uniform. So is its position in the vocabulary, which detects reused
random numbers.

Tokens may be grouped by their distance from the start of a decode step, since the start is known before they are
sampled. They must not be grouped by accepted or corrected: those conditional distributions are min(p, q) and (p - q)+,
neither of which is p. Under rules that verify a path as a whole, they must not be grouped by decode step either.

Power is stated at the level at which a test is used, a Bonferroni share of ``ALPHA``.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.audit.subject import AuditedCompletion
from foretoken.plan.statistics import root

ALPHA = 1e-3  # probability of failing an exact implementation, over all tests of an audit
POWER = 0.9
BINS = 20
UNLIKELY = 0.01  # probability below which a token counts as unlikely
MIN_VARIANCE = 25.0  # variance of a count from which the normal approximation is used


@dataclass(frozen=True, slots=True)
class Fit:
    """A G-test. statistic: 2 sum O log(O/E). moved: the total variation between cells that it finds with ``POWER``.

    n samples from a distribution at total variation d have noncentrality at least 4 n d^2 (Cauchy-Schwarz), so
    ``moved`` holds for every wrong distribution at that distance.
    """

    statistic: float
    dof: int
    p_value: float
    moved: float


def g_test(observed: Sequence[float], expected: Sequence[float], level: float) -> Fit:
    """Returns the G-test of ``observed`` counts against ``expected`` ones.

    Cells that expect fewer than 5 samples are pooled, if necessary with the next smallest. A sample in a cell that
    expects none has p-value 0.
    """
    if any(o and e <= 0.0 for o, e in zip(observed, expected, strict=True)):
        return Fit(math.inf, 0, 0.0, 0.0)
    cells: list[tuple[float, float]] = []
    pool = (0.0, 0.0)
    for o, e in sorted(zip(observed, expected, strict=True), key=lambda cell: cell[1]):
        if pool[1] < 5.0:
            pool = (pool[0] + o, pool[1] + e)
        else:
            cells.append((o, e))
    cells.append(pool)
    dof = len(cells) - 1
    if dof < 1:
        return Fit(0.0, 0, 1.0, 1.0)
    statistic = 2.0 * sum(o * math.log(o / e) for o, e in cells if o)
    moved = math.sqrt(noncentrality(dof, level) / (4.0 * sum(e for _, e in cells)))
    return Fit(statistic, dof, chi2_tail(statistic, dof), min(1.0, moved))


def normal_tail(z: float) -> float:
    """Returns the two-sided p-value of a standard normal ``z``."""
    return math.erfc(abs(z) / math.sqrt(2.0))


@cache
def detectable(level: float) -> float:
    """Returns the shift, in standard errors, that a two-sided z-test at ``level`` finds with ``POWER``."""
    critical = root(lambda z: level - normal_tail(z), 0.0, 40.0)
    return critical + root(lambda z: 1.0 - POWER - normal_tail(z) / 2.0, 0.0, 9.0)


def chi2_tail(statistic: float, dof: int) -> float:
    """Returns P(chi-square with ``dof`` degrees of freedom > ``statistic``)."""
    half = torch.tensor([dof / 2.0, statistic / 2.0], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@cache
def noncentrality(dof: int, level: float) -> float:
    """Returns the noncentrality that a chi-square test at ``level`` finds with ``POWER``."""
    critical = root(lambda x: level - chi2_tail(x, dof), 0.0, 10.0 * dof + 200.0)
    return root(lambda shift: _noncentral_tail(critical, dof, shift) - POWER, 0.0, 10.0 * critical + 200.0)


def _noncentral_tail(statistic: float, dof: int, shift: float) -> float:
    """Returns the tail of a noncentral chi-square: a Poisson mixture of central tails."""
    mean = shift / 2.0
    spread = 12.0 * math.sqrt(mean) + 40.0
    counts = torch.arange(max(0, int(mean - spread)), int(mean + spread), dtype=torch.float64)
    weights = (counts * math.log(mean) - mean - torch.lgamma(counts + 1.0)).exp() if mean else (counts == 0).double()
    tails = torch.special.gammaincc(dof / 2.0 + counts, torch.full_like(counts, statistic / 2.0))
    return float((weights * tails).sum())


@dataclass(slots=True)
class Sum:
    """Sum of deviations and of their variances. shift: the expected sum if tokens came from the draft."""

    excess: float = 0.0
    variance: float = 0.0
    shift: float = 0.0

    @property
    def z(self) -> float:
        """The sum in standard errors."""
        return self.excess / math.sqrt(self.variance) if self.variance > 0.0 else 0.0

    def add(self, probs: Tensor, scores: Tensor, at: int) -> float:
        """Adds the score of outcome ``at``, beside its expectation under ``probs``, which is returned."""
        mean = float(probs @ scores)
        self.excess += float(scores[at]) - mean
        self.variance += float(probs @ scores.square()) - mean**2
        return mean


@dataclass(frozen=True, slots=True)
class Statistic:
    """One test. value: z, or G with ``dof`` degrees of freedom. finds: smallest error found, in ``what``."""

    name: str
    value: float
    dof: int
    p_value: float
    finds: float
    what: str


class TokenFigures(NamedTuple):
    """Figures of the tokens of a text, by name: (excess, variance), each [n], and uniforms in [0, 1], [n]."""

    sums: dict[str, tuple[Tensor, Tensor]]
    uniforms: dict[str, Tensor]


@dataclass(slots=True)
class Group:
    """Statistics of one group of tokens. Groups depend only on what is known before the tokens are sampled."""

    name: str
    tokens: int = 0
    sums: dict[str, Sum] = field(default_factory=lambda: defaultdict(Sum))
    toward: Sum = field(default_factory=Sum)
    bins: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0] * BINS))

    def add(self, figures: TokenFigures, at: Sequence[int]) -> None:
        """Adds the tokens at positions ``at`` of a text."""
        if not at:
            return
        rows = torch.tensor(list(at))
        self.tokens += len(at)
        for name, (excess, variance) in figures.sums.items():
            self.sums[name].excess += float(excess[rows].sum())
            self.sums[name].variance += float(variance[rows].sum())
        for name, uniform in figures.uniforms.items():
            for index in (uniform[rows] * BINS).long().clamp(max=BINS - 1).tolist():
                self.bins[name][index] += 1

    def statistics(self, level: float) -> list[Statistic]:
        """Returns the tests that have enough tokens. level: significance level at which power is stated."""
        statistics = []
        for name, bins in self.bins.items() if self.tokens >= 5 * BINS else ():
            fit = g_test(bins, [self.tokens / BINS] * BINS, level)
            what = f"probability moved between {name}"
            statistics.append(Statistic(f"{self.name}: {name}", fit.statistic, fit.dof, fit.p_value, fit.moved, what))
        for name, total in self.sums.items():
            if total.variance >= MIN_VARIANCE:
                finds = detectable(level) * math.sqrt(total.variance) / self.tokens
                what = "nats a token" if name == "surprise" else "change of the rate"
                statistics.append(_normal(f"{self.name}: {name}", total, finds, what))
        if self.toward.shift > 0.0 and self.toward.variance >= 1.0:
            finds = detectable(level) * math.sqrt(self.toward.variance) / self.toward.shift
            statistics.append(
                _normal(f"{self.name}: toward the draft", self.toward, min(1.0, finds), "of the draft's distribution")
            )
        return statistics


@dataclass(slots=True)
class TokenTally:
    """Statistics of all tokens, and of the first, second and third token of steps that drafted.

    impossible: number of tokens with probability 0, counted by the caller.
    """

    everything: Group = field(default_factory=lambda: Group("all tokens"))
    behind: list[Group] = field(default_factory=lambda: [Group(name) for name in ("first", "second", "third")])
    steps: int = 0
    drafted: int = 0
    whole: int = 0
    impossible: int = 0

    @property
    def tokens(self) -> int:
        return self.everything.tokens

    def add(self, text: AuditedCompletion, probs: Tensor, spread: Tensor, reference: Tensor | None = None) -> None:
        """Adds a completion.

        Args:
            probs: [n, V], the exact distributions.
            spread: [n], uniforms that nothing else uses.
            reference: [n, V], see ``Audited.reference``.
        """
        n = len(text.tokens)
        figures = token_figures(probs, torch.tensor(text.tokens), spread)
        self.everything.add(figures, range(n))
        if reference is not None:
            for at in range(n):
                _toward(self.everything.toward, probs[at], reference[at], text.tokens[at])
        for behind, group in enumerate(self.behind):
            group.add(figures, [r.position + behind for r in text.steps if r.position + behind < n])
        for one in text.steps:
            self.steps += 1
            self.drafted += one.drafted
            self.whole += one.whole
            if one.q is not None and one.position < n:
                _toward(self.behind[0].toward, probs[one.position], one.q, text.tokens[one.position])

    def statistics(self, level: float) -> list[Statistic]:
        """Returns the tests of all groups. level: significance level at which power is stated."""
        return [statistic for group in (self.everything, *self.behind) for statistic in group.statistics(level)]


def token_figures(probs: Tensor, tokens: Tensor, spread: Tensor) -> TokenFigures:
    """Returns the per-token figures. probs: float64 [n, V]; tokens, spread: [n]."""
    prob = probs.gather(1, tokens[:, None]).squeeze(1)
    entropies = torch.special.entr(probs)
    logs = torch.where(probs > 0, probs, 1.0).log()
    entropy = entropies.sum(-1)
    drawn = -torch.where(prob > 0, prob, 1.0).log()
    top, best = probs.max(-1)
    small = torch.where(probs < UNLIKELY, probs, 0.0).sum(-1)
    likelier = probs > prob[:, None]
    before = torch.arange(probs.shape[1]) < tokens[:, None]
    likelier |= (probs == prob[:, None]) & before
    sums = {
        "surprise": (drawn - entropy, (-entropies * logs).sum(-1) - entropy.square()),
        "likeliest token": ((tokens == best).double() - top, top * (1.0 - top)),
        "unlikely tokens": ((prob < UNLIKELY).double() - small, small * (1.0 - small)),
    }
    masses = {"ranks": likelier, "places": before}
    return TokenFigures(
        sums, {name: torch.where(mask, probs, 0.0).sum(-1) + spread * prob for name, mask in masses.items()}
    )


def _toward(total: Sum, p: Tensor, q: Tensor, token: int) -> None:
    """Adds the score q/(p+q) of the token, the most powerful bounded score against a small admixture of q in p."""
    p, q = p.double(), q.to(p.device).double()
    score = torch.where(q > 0, q / (p + q).clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    total.shift += float(q @ score) - total.add(p, score, token)


def _normal(name: str, own: Sum, finds: float, what: str) -> Statistic:
    return Statistic(name, own.z, 0, normal_tail(own.z), finds, what)

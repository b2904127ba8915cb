"""Sums over drawn tokens, each beside what the target's exact law makes of it.

A token drawn from p has, whatever came before it, surprise -log p(x) - H(p) of mean 0, is the likeliest token with
probability max p, and so on: each figure less its expectation has mean 0 given the past, so sums over any number of
texts are martingales, and over their standard errors standard normals. Its rank, spread over its own probability by an
independent uniform, is uniform; so is its place in the vocabulary, where numbers that are used twice show.

Where a round began is known before its tokens are, so tokens may be told apart by how far they lie behind a beginning.
They may not by whether they were accepted or corrected: those two laws are min(p, q) and (p - q)+, and neither is p.
Nor, under rules that judge a path as a whole, by which round they are of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.audit.chance import detectable, g_test, normal_tail
from foretoken.audit.subject import Text

BINS = 20
UNLIKELY = 0.01  # of one token
LEAST = 25.0  # variance of a count from which its tail is taken for a normal one's


@dataclass(slots=True)
class Sum:
    """Of deviations from their expectations, and of their variances. shift: what a draft's own law would add."""

    excess: float = 0.0
    variance: float = 0.0
    shift: float = 0.0

    @property
    def z(self) -> float:
        return self.excess / math.sqrt(self.variance) if self.variance > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Statistic:
    """One test. value: z, or G with its ``dof``. finds: the least error it finds with power 0.9, see ``what``."""

    name: str
    value: float
    dof: int
    p_value: float
    finds: float
    what: str


@dataclass(slots=True)
class Group:
    """Tokens that are told apart by what was known before they were drawn."""

    name: str
    tokens: int = 0
    surprise: Sum = field(default_factory=Sum)
    top: Sum = field(default_factory=Sum)
    unlikely: Sum = field(default_factory=Sum)
    toward: Sum = field(default_factory=Sum)
    ranks: list[int] = field(default_factory=lambda: [0] * BINS)
    places: list[int] = field(default_factory=lambda: [0] * BINS)

    def add(self, parts: Parts, at: Sequence[int]) -> None:
        """The tokens at positions ``at`` of a judged text."""
        if not at:
            return
        rows = torch.tensor(list(at))
        self.tokens += len(at)
        for own, (excess, variance) in (
            (self.surprise, parts.surprise), (self.top, parts.top), (self.unlikely, parts.unlikely)
        ):  # fmt: skip
            own.excess += float(excess[rows].sum())
            own.variance += float(variance[rows].sum())
        for bins, uniform in ((self.ranks, parts.ranks), (self.places, parts.places)):
            for index in (uniform[rows] * BINS).long().clamp(max=BINS - 1).tolist():
                bins[index] += 1

    def statistics(self, level: float) -> list[Statistic]:
        """Those with enough tokens behind them."""
        found = []
        for name, bins in (("ranks", self.ranks), ("places", self.places)) if self.tokens >= 5 * BINS else ():
            fit = g_test(bins, [self.tokens / BINS] * BINS, level)
            what = f"probability moved between {name}"
            found.append(Statistic(f"{self.name}: {name}", fit.statistic, fit.dof, fit.p_value, fit.moved, what))
        rates = (("surprise", self.surprise), ("likeliest token", self.top), ("unlikely tokens", self.unlikely))
        for name, own in rates:
            if own.variance >= LEAST:
                finds = detectable(level) * math.sqrt(own.variance) / self.tokens
                what = "nats a token" if own is self.surprise else "change of the rate"
                found.append(_normal(f"{self.name}: {name}", own, finds, what))
        if self.toward.shift > 0.0 and self.toward.variance >= 1.0:
            finds = detectable(level) * math.sqrt(self.toward.variance) / self.toward.shift
            found.append(_normal(f"{self.name}: toward the draft", self.toward, min(1.0, finds), "of the draft's law"))
        return found


@dataclass(frozen=True, slots=True)
class Parts:
    """A text's tokens judged: (excess, variance), each [n]; ranks, places [n] from 0 to 1."""

    surprise: tuple[Tensor, Tensor]
    top: tuple[Tensor, Tensor]
    unlikely: tuple[Tensor, Tensor]
    ranks: Tensor
    places: Tensor


@dataclass(slots=True)
class Tally:
    """All tokens, and those that lie 0, 1 and 2 behind the beginning of a round that drafted.

    impossible: tokens that the law cannot draw, counted by whoever adds texts.
    """

    everything: Group = field(default_factory=lambda: Group("all tokens"))
    behind: list[Group] = field(default_factory=lambda: [Group(name) for name in ("first", "second", "third")])
    rounds: int = 0
    drafted: int = 0
    whole: int = 0
    impossible: int = 0

    @property
    def tokens(self) -> int:
        return self.everything.tokens

    def add(self, text: Text, probs: Tensor, spread: Tensor, reference: Tensor | None = None) -> None:
        """probs: [n, V], the exact laws. spread: [n], uniforms that nothing else reads. reference: see ``Audited``."""
        n = len(text.tokens)
        parts = judged(probs, torch.tensor(text.tokens), spread)
        self.everything.add(parts, range(n))
        if reference is not None:
            for at in range(n):
                _toward(self.everything.toward, probs[at], reference[at], text.tokens[at])
        for behind, group in enumerate(self.behind):
            group.add(parts, [r.position + behind for r in text.rounds if r.position + behind < n])
        for one in text.rounds:
            self.rounds += 1
            self.drafted += one.drafted
            self.whole += one.whole
            if one.q is not None and one.position < n:
                _toward(self.behind[0].toward, probs[one.position], one.q, text.tokens[one.position])

    def statistics(self, level: float) -> list[Statistic]:
        """level: of one test, to state its power at."""
        return [found for group in (self.everything, *self.behind) for found in group.statistics(level)]


def judged(probs: Tensor, tokens: Tensor, spread: Tensor) -> Parts:
    """probs: float64 [n, V]; tokens, spread: [n]."""
    own = probs.gather(1, tokens[:, None]).squeeze(1)
    entropies = torch.special.entr(probs)
    logs = torch.where(probs > 0, probs, 1.0).log()
    entropy = entropies.sum(-1)
    drawn = -torch.where(own > 0, own, 1.0).log()
    top, best = probs.max(-1)
    small = torch.where(probs < UNLIKELY, probs, 0.0).sum(-1)
    likelier = probs > own[:, None]
    before = torch.arange(probs.shape[1]) < tokens[:, None]
    likelier |= (probs == own[:, None]) & before
    return Parts(
        surprise=(drawn - entropy, (-entropies * logs).sum(-1) - entropy.square()),
        top=((tokens == best).double() - top, top * (1.0 - top)),
        unlikely=((own < UNLIKELY).double() - small, small * (1.0 - small)),
        ranks=torch.where(likelier, probs, 0.0).sum(-1) + spread * own,
        places=torch.where(before, probs, 0.0).sum(-1) + spread * own,
    )


def _toward(total: Sum, p: Tensor, q: Tensor, token: int) -> None:
    """Adds q/(p+q) at the token: of all bounded scores the one that tells a little of q in p best."""
    p, q = p.double(), q.to(p.device).double()
    score = torch.where(q > 0, q / (p + q).clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    mean = float((p * score).sum())
    total.excess += float(score[token]) - mean
    total.variance += float((p * score.square()).sum()) - mean**2
    total.shift += float((q * score).sum()) - mean


def _normal(name: str, own: Sum, finds: float, what: str) -> Statistic:
    return Statistic(name, own.z, 0, normal_tail(own.z), finds, what)

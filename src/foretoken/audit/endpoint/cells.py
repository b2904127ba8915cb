"""Distributions over cells: the likeliest tokens one by one, and all others as one cell.

Merging outcomes keeps a test valid, so a server's top-k log-probabilities suffice to test its samples. Under a sampling
parameter the probability of the rest is not known; then the law is conditional on the token being one of the likeliest,
which is known before it is sampled, and tokens outside are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foretoken.probe.answers import TokenPlace

_LEAST = 1e-4  # probability below which the rest is merged with the least likely token
_SUM = 1.01  # largest sum of probabilities that rounding explains
_CLEAR, _CLEAR_MASS = 0.1, 0.02  # nats and probability by which no two passes of a server differ


class FalseLogprobsError(Exception):
    """Log-probabilities that no distribution can have."""


@dataclass(frozen=True, slots=True)
class Cells:
    """A distribution and its outcome. probs: of each cell. at: the cell of the sampled token."""

    probs: tuple[float, ...]
    at: int


def whole(place: TokenPlace) -> Cells:
    """Returns the target's distribution at a place: its likeliest tokens in the order of names, then the rest.

    Raises:
        FalseLogprobsError: Its log-probabilities are not those of a distribution.
    """
    ordered = sorted(place.top)
    probs = [math.exp(value) for _, value in ordered]
    total = sum(probs)
    if not total <= _SUM or any(value > math.log(_SUM) for _, value in ordered):
        raise FalseLogprobsError(f"probabilities at one place add up to {total:.3g}")
    at = next((i for i, (name, _) in enumerate(ordered) if name == place.token), len(probs))
    rest = max(0.0, 1.0 - total)
    if rest < _LEAST:
        least = probs.index(min(probs))
        probs[least] += rest
        at = least if at == len(probs) else at
    else:
        probs.append(rest)
    return Cells(tuple(each / sum(probs) for each in probs), at)


@dataclass(frozen=True, slots=True)
class TunedSampling:
    """Sampling parameters, as OpenAI and vLLM define them. bias: by name of token. window: see ``Dialect``."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[str, float] = field(default_factory=dict)
    window: int | None = None

    def scores(self, top: Sequence[tuple[str, float]], prompt: Sequence[str], text: Sequence[str]) -> list[float]:
        """Returns scores whose softmax is the sampling distribution before filters.

        Log-probabilities are logits up to a constant, which neither the temperature nor what is subtracted shows. A
        repetition penalty, which divides or multiplies logits, would, so there is none here.

        Args:
            top: Tokens by name with the log-probabilities of plain sampling.
            prompt: Names of the prompt's tokens. They count for penalties only within ``window``.
            text: Names of the tokens generated before.
        """
        history = (*prompt, *text)
        counted = Counter(text if self.window is None else history[-self.window :])
        return [
            (
                value
                + self.bias.get(name, 0.0)
                - self.presence_penalty * (counted[name] > 0)
                - self.frequency_penalty * counted[name]
            )
            / self.temperature
            for name, value in top
        ]

    def kept(self, top: Sequence[tuple[str, float]]) -> list[bool] | None:
        """Returns which of the likeliest tokens pass the filters, None if rounding or other tokens decide that."""
        filters = (self._top_k, self._nucleus, self._min_p)
        passed = [each(top) for each in filters]
        known = [each for each in passed if each is not None]
        return None if len(known) < len(filters) else [all(each) for each in zip(*known, strict=True)]

    def _top_k(self, top: Sequence[tuple[str, float]]) -> list[bool] | None:
        if self.top_k and (len(top) <= self.top_k or top[self.top_k - 1][1] - top[self.top_k][1] < _CLEAR):
            return None
        return [not self.top_k or i < self.top_k for i in range(len(top))]

    def _nucleus(self, top: Sequence[tuple[str, float]]) -> list[bool] | None:
        """Keeps a token if those that may be likelier have less than ``top_p``, whichever way rounding orders them.

        Two passes order near ties differently, so a token just outside of the nucleus of one may be inside that of
        another, by as much probability as the other token of the tie has.
        """
        if self.top_p >= 1.0:
            return [True] * len(top)
        kept = []
        for i, (_, value) in enumerate(top):
            others = [other for j, (_, other) in enumerate(top) if j != i]
            certain = sum(math.exp(other) for other in others if other - value > _CLEAR)
            possible = sum(math.exp(other) for other in others if value - other <= _CLEAR)
            if certain < self.top_p + _CLEAR_MASS and possible > self.top_p - _CLEAR_MASS:
                return None
            kept.append(possible < self.top_p)
        return None if kept[-1] else kept  # tokens that are not named here may be inside as well

    def _min_p(self, top: Sequence[tuple[str, float]]) -> list[bool] | None:
        if self.min_p <= 0.0:
            return [True] * len(top)
        floor = top[0][1] + math.log(self.min_p)
        if top[-1][1] >= floor or any(abs(value - floor) < _CLEAR for _, value in top):
            return None
        return [value >= floor for _, value in top]


def tuned(place: TokenPlace, tuning: TunedSampling, prompt: Sequence[str], text: Sequence[str]) -> Cells | None:
    """Returns the distribution under sampling parameters, over the likeliest tokens in the order of their rank.

    Tokens outside are a last cell of probability 0 where a filter forbids them; elsewhere the place says nothing
    about them and is left out if one was sampled.

    Args:
        place: The place, with the log-probabilities of plain sampling.
        tuning: The parameters.
        prompt: Names of the prompt's tokens.
        text: Names of the tokens before the place.
    """
    kept = tuning.kept(place.top) if place.top else None
    if kept is None:
        return None
    scores = tuning.scores(place.top, prompt, text)
    highest = max(scores)
    weights = [math.exp(score - highest) * keep for score, keep in zip(scores, kept, strict=True)]
    total = sum(weights)
    names = [name for name, _ in place.top]
    outside = place.token not in names
    if outside and all(kept):
        return None
    probs = (*(weight / total for weight in weights), 0.0)
    return Cells(probs, len(names) if outside else names.index(place.token))

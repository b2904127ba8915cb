"""A custom verifier, and the proof by enumeration that it keeps the target's distribution.

    .venv/bin/python examples/custom_verifier.py

A verifier is a pure function of a draft, the target's rows and random numbers. The random numbers are an interface, so
each draw can take every outcome in turn: the probabilities of all results add up to the exact output distribution.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foretoken.core.draft import Draft, Sampled
from foretoken.core.streams import Stream
from foretoken.core.verdict import Verdict
from foretoken.verify import Verifier

VOCABULARY, DEPTH = 3, 2


def verify(draft: Draft, probs: Any, stream: Stream) -> Verdict:
    """Rejection sampling of a chain (2211.17192, algorithm 1). probs: [n + 1, V]; draft.law.probs: [n, V]."""
    assert isinstance(draft.law, Sampled)
    for i, token in enumerate(draft.tokens):
        p, q = probs[i], draft.law.probs[i]
        if not stream.bernoulli(min(1.0, float(p[token] / q[token])), index=i):
            return Verdict(tuple(range(i)), stream.categorical((p - q).clamp(min=0), index=i))  # the recovered token
    n = len(draft)
    return Verdict(tuple(range(n)), stream.categorical(probs[n], index=n))  # the bonus token


def wrong(draft: Draft, probs: Any, stream: Stream) -> Verdict:
    """The same with a common mistake: after a rejection it samples from p instead of the residual."""
    verdict = verify(draft, probs, stream)
    i = len(verdict.path)
    return verdict if i == len(draft) else Verdict(verdict.path, stream.categorical(probs[i], index=DEPTH + 1 + i))


@dataclass
class Branching:
    """A stream whose draws take the outcomes listed in ``script``, then the first ones."""

    script: list[int]
    widths: list[int] = field(default_factory=list)  # number of possible outcomes of each draw
    probability: float = 1.0

    def bernoulli(self, p: float, index: int) -> bool:
        return bool(self._branch([(1, p), (0, 1.0 - p)]))

    def categorical(self, weights: Tensor, index: int) -> int:
        return self._branch(list(enumerate((weights / weights.sum()).tolist())))

    def uniform(self, index: int) -> Any:
        raise NotImplementedError("this verifier asks for no uniform number")

    def _branch(self, outcomes: list[tuple[int, float]]) -> int:
        possible = [(value, p) for value, p in outcomes if p > 0]
        if len(self.widths) == len(self.script):
            self.script.append(0)
        value, p = possible[self.script[len(self.widths)]]
        self.widths.append(len(possible))
        self.probability *= p
        return value


def enumerate_outcomes(run: Callable[[Stream], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """Returns the distribution of ``run``'s result, by running it once for every outcome of its draws."""
    distribution: dict[tuple[int, ...], float] = defaultdict(float)
    script: list[int] = []
    while True:
        stream = Branching(script)
        distribution[run(stream)] += stream.probability
        while script and script[-1] + 1 == stream.widths[len(script) - 1]:
            script.pop()
        if not script:
            return dict(distribution)
        script[-1] += 1


def rows(seed: int) -> Tensor:
    """Returns the distribution of each token after each token, [V, V] in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64).softmax(-1)


def step(verifier: Verifier, target: Tensor, proposal: Tensor, stream: Stream) -> tuple[int, ...]:
    """Runs one decode step after token 0: drafts DEPTH tokens and verifies them. Returns the emitted tokens."""
    drafted: list[int] = []
    for i in range(DEPTH):
        drafted.append(stream.categorical(proposal[[0, *drafted][-1]], index=-1 - i))
    before = [0, *drafted]
    verdict = verifier(Draft.chain(drafted, Sampled(proposal[before[:-1]])), target[before], stream)
    return (*(drafted[i] for i in verdict.path), verdict.token)


def error(verifier: Verifier) -> float:
    """Returns the total variation distance between the emitted tokens and the target's own.

    A step that emits fewer than DEPTH + 1 tokens is continued by the target.
    """
    target, proposal = rows(1), rows(2)
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    for emitted, p in enumerate_outcomes(partial(step, verifier, target, proposal)).items():
        for rest in _texts(DEPTH + 1 - len(emitted)):
            text = (*emitted, *rest)
            texts[text] += p * math.prod(float(target[a, b]) for a, b in _pairs(text)[len(emitted) :])
    return 0.5 * sum(abs(p - math.prod(float(target[a, b]) for a, b in _pairs(t))) for t, p in texts.items())


def _texts(length: int) -> list[tuple[int, ...]]:
    return [()] if length == 0 else [(*text, v) for text in _texts(length - 1) for v in range(VOCABULARY)]


def _pairs(text: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns each token with the one before it; token 0 comes first."""
    return list(zip((0, *text), text, strict=False))


def main() -> None:
    """Enumerates the right and the wrong verifier, and prints their errors."""
    print(f"rejection sampling: total variation {error(verify):.1e}")
    print(f"with the mistake:   total variation {error(wrong):.1e}")


if __name__ == "__main__":
    main()

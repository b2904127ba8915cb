"""The task that every check receives: the subject, the prompts, the significance level and the deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from foretoken.audit.subject import Audited, CompletionSettings, Ids
from foretoken.core.streams import random_seed_from

NOISE_TOKENS = 32  # of each prompt whose logits are compared


class AuditSpeed(NamedTuple):
    """Seconds that a completion of ``NOISE_TOKENS`` takes, and the computation of its exact distributions."""

    completion: float = 0.0
    distributions: float = 0.0


@dataclass(frozen=True, slots=True)
class AuditTask:
    """Inputs of a check."""

    subject: Audited  # the audited implementation
    prompts: tuple[Ids, ...]  # token ids
    temperature: float
    seed: int  # all seeds of the audit are derived from it
    level: float  # significance level of one check
    deadline: float  # by time.monotonic; a check runs one portion at least, whose size ``fitting`` bounds
    noise: float = 0.0  # largest difference between logits of two passes, 0 where passes are batch-invariant
    tick: Callable[[], None] = field(default=lambda: None)  # called after every portion
    speed: AuditSpeed = field(default_factory=AuditSpeed)  # by which portions are bounded

    def fitting(self, max_texts: int, completions: int, distributions: int = 0) -> int:
        """Returns the number of texts, from 1 to ``max_texts``, that can be checked before the deadline.

        Each text takes that many completions of ``NOISE_TOKENS``, and computations of exact distributions (0 or 1).
        """
        seconds = completions * self.speed.completion + distributions * self.speed.distributions
        return max(1, min(max_texts, int((self.deadline - monotonic()) / seconds))) if seconds > 0.0 else max_texts

    def portions(self, max_portions: int) -> Iterator[int]:
        """Yields 0, 1, 2, ... until the deadline, at most ``max_portions`` of them."""
        for index in range(max_portions):
            if index and monotonic() >= self.deadline:
                return
            yield index
            self.tick()

    def turn(self, portion: int, size: int) -> tuple[Ids, ...]:
        """Returns the ``size`` prompts of a portion. Prompts are cycled."""
        return tuple(self.prompts[(portion * size + i) % len(self.prompts)] for i in range(size))

    def seeds(self, purpose: int, portion: int, size: int) -> tuple[int, ...]:
        """Returns one seed per prompt of a portion, from 0 to ``MAX_SEED``. No two checks share any."""
        return tuple(random_seed_from(self.seed, purpose, portion, i) >> 1 for i in range(size))


def noise(subject: Audited, prompts: Sequence[Ids]) -> float:
    """Returns the largest difference of a logit between decoding and one forward pass over the same text."""
    if subject.bit_equal:
        return 0.0
    settings = CompletionSettings(subject.law(0.0), NOISE_TOKENS, (0,) * len(prompts), batch=subject.batch, keep=True)
    largest = 0.0
    for prompt, text in zip(prompts, subject.generate(prompts, settings), strict=True):
        if text.rows is not None:
            largest = max(largest, float((text.rows - subject.logits(prompt, text.tokens).float()).abs().max()))
    return largest

"""What every check is given: whom to audit, on which prompts, how, and until when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic

from foretoken.audit.subject import Ask, Audited, Ids
from foretoken.core.streams import random_seed_from


@dataclass(frozen=True, slots=True)
class Work:
    """prompts: token ids. level: of calling an exact implementation wrong, for one check.

    deadline: ``time.monotonic`` seconds; a check does one portion at least. noise: how far logits of two passes lie
    apart, 0 where they are promised not to. tick: called after every portion.
    """

    subject: Audited
    prompts: tuple[Ids, ...]
    temperature: float
    seed: int
    level: float
    deadline: float
    noise: float = 0.0
    tick: Callable[[], None] = field(default=lambda: None)

    @property
    def late(self) -> bool:
        return monotonic() >= self.deadline

    def portions(self, most: int) -> Iterator[int]:
        """0, 1, 2 ... while there is time, at most ``most`` of them."""
        for index in range(most):
            if index and self.late:
                return
            yield index
            self.tick()

    def turn(self, portion: int, size: int) -> tuple[Ids, ...]:
        """``size`` prompts, going round."""
        return tuple(self.prompts[(portion * size + i) % len(self.prompts)] for i in range(size))

    def seeds(self, purpose: int, portion: int, size: int) -> tuple[int, ...]:
        """One for each prompt of a portion, from 0 to ``MAX_SEED``; no two checks share any."""
        return tuple(random_seed_from(self.seed, purpose, portion, i) >> 1 for i in range(size))


def noise(subject: Audited, prompts: Sequence[Ids], tokens: int = 32) -> float:
    """The largest difference of one logit between decoding and one pass over the same text."""
    if subject.bit_equal:
        return 0.0
    ask = Ask(subject.law(0.0), tokens, (0,) * len(prompts), batch=subject.batch, keep=True)
    found = 0.0
    for prompt, text in zip(prompts, subject.generate(prompts, ask), strict=True):
        if text.rows is not None:
            found = max(found, float((text.rows - subject.logits(prompt, text.tokens).float()).abs().max()))
    return found

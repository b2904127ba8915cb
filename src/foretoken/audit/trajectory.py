"""Trajectory equality: one seed, one text, with speculation or without, at every depth, alone and in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from foretoken.audit.divergence import Divergence, explained, parity, parting
from foretoken.audit.result import Check, Outcome
from foretoken.audit.subject import Ask, Audited, Ids
from foretoken.audit.work import Work
from foretoken.core.context import Exactness

NAME = "trajectory equality"
TOKENS, TEXTS, PORTIONS = 32, 8, 8
DEPTHS = (1, 8)  # beside the configured one, and what the subject's own controller says
PURPOSE = 1


def trajectory(work: Work, float32: bool = True) -> Check:
    """Texts in portions of 8 while there is time. float32: one portion in that precision too, if it can be had."""
    subject = work.subject
    if not subject.seeded:
        return Check(NAME, Outcome.SKIPPED, "it does not promise one text for one seed")
    found: list[Divergence] = []
    texts = 0
    for portion in work.portions(PORTIONS):
        found += _portion(work, subject, portion)
        texts += TEXTS
    depths = _depths(subject)
    ways = {f"at depths {_named(depths)}, alone and in batches of {TEXTS}": texts * len(depths) * 2}
    other = subject.in_float32() if float32 else None
    if other is not None:
        found += _portion(work, other, 0)
        ways["in float32"] = TEXTS * len(depths) * 2
    return parity(NAME, found, subject.bit_equal, ways, texts * TOKENS)


def _portion(work: Work, subject: Audited, portion: int) -> list[Divergence]:
    prompts, seeds = work.turn(portion, TEXTS), work.seeds(PURPOSE, portion, TEXTS)
    law = subject.law(work.temperature)
    plain = Ask(law, TOKENS, seeds, depth=0, grade=Exactness.TRAJECTORY, batch=1)
    right = [text.tokens for text in subject.generate(prompts, plain)]
    found = []
    for depth, batch in product(_depths(subject), (1, TEXTS)):
        found += _compare(subject, prompts, right, plain, replace(plain, depth=depth, batch=batch))
    return found


def _compare(
    subject: Audited, prompts: Sequence[Ids], right: Sequence[tuple[int, ...]], plain: Ask, ask: Ask
) -> list[Divergence]:
    texts = subject.generate(prompts, ask)
    parts = [parting(here, there.tokens) for here, there in zip(right, texts, strict=True)]
    return [explained(subject, prompts, i, at, plain, ask) for i, at in enumerate(parts) if at is not None]


def _depths(subject: Audited) -> tuple[int | None, ...]:
    return (*dict.fromkeys((*DEPTHS, *([subject.depth] if subject.depth else []))), None)


def _named(depths: Sequence[int | None]) -> str:
    return ", ".join("as controlled" if depth is None else str(depth) for depth in depths)

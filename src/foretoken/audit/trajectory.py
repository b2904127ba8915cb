"""Trajectory equality: one text per seed, with and without speculation, at every depth, alone and in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from foretoken.audit.divergence import Divergence, explain_divergence, first_difference, parity
from foretoken.audit.result import Check, CheckOutcome
from foretoken.audit.subject import Audited, CompletionSettings, Ids
from foretoken.audit.work import AuditTask
from foretoken.core.context import Exactness

NAME = "trajectory equality"
TOKENS, TEXTS, PORTIONS = 32, 8, 8
DEPTHS = (1, 8)  # beside the configured depth and the controller's own
PURPOSE = 1


def trajectory(work: AuditTask, float32: bool = True) -> Check:
    """Compares portions of 8 texts until the deadline. float32: also one portion in float32 where possible."""
    subject = work.subject
    if not subject.seeded:
        return Check(NAME, CheckOutcome.SKIPPED, "it does not promise one text for one seed")
    depths, divergences, texts = _depths(subject), list[Divergence](), 0
    size = work.fitting(TEXTS, completions(subject) * (1 + float32))
    for portion in work.portions(PORTIONS):
        divergences += _portion(work, subject, portion, size)
        texts += size
    ways = {f"at depths {_named(depths)}, alone and in batches of {size}": texts * len(depths) * 2}
    other = subject.in_float32() if float32 else None
    if other is not None:
        divergences += _portion(work, other, 0, size)
        ways["in float32"] = size * len(depths) * 2
    return parity(NAME, divergences, subject.bit_equal, ways, texts * TOKENS)


def completions(subject: Audited) -> int:
    """Returns the number of completions of a text: plain, and at each depth alone and in a batch."""
    return 1 + 2 * len(_depths(subject))


def _portion(work: AuditTask, subject: Audited, portion: int, size: int) -> list[Divergence]:
    prompts, seeds = work.turn(portion, size), work.seeds(PURPOSE, portion, size)
    law = subject.law(work.temperature)
    plain = CompletionSettings(law, TOKENS, seeds, depth=0, grade=Exactness.TRAJECTORY, batch=1)
    expected = [text.tokens for text in subject.generate(prompts, plain)]
    divergences = []
    for depth, batch in product(_depths(subject), (1, size)):
        divergences += _compare(subject, prompts, expected, plain, replace(plain, depth=depth, batch=batch))
    return divergences


def _compare(
    subject: Audited,
    prompts: Sequence[Ids],
    expected: Sequence[tuple[int, ...]],
    plain: CompletionSettings,
    settings: CompletionSettings,
) -> list[Divergence]:
    texts = subject.generate(prompts, settings)
    parts = [first_difference(here, there.tokens) for here, there in zip(expected, texts, strict=True)]
    return [
        explain_divergence(subject, prompts, i, at, plain, settings) for i, at in enumerate(parts) if at is not None
    ]


def _depths(subject: Audited) -> tuple[int | None, ...]:
    return (*dict.fromkeys((*DEPTHS, *([subject.depth] if subject.depth else []))), None)


def _named(depths: Sequence[int | None]) -> str:
    return ", ".join("as controlled" if depth is None else str(depth) for depth in depths)

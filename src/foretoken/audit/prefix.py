"""Prefix distribution: samples one prompt many times and compares the first tokens with their enumerated joint law.

The test of single tokens conditions on the past. This one tests the joint distribution, and finds texts that should be
independent and are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from foretoken.audit.result import Check, CheckOutcome
from foretoken.audit.sampled import audited_distributions
from foretoken.audit.subject import AuditTask, CompletionSettings, Ids
from foretoken.audit.tally import Fit, g_test

NAME = "prefix distribution"
LENGTH, BEYOND = 3, 2  # tested tokens, and tokens generated beyond them so that the first steps draft
PROMPTS, TEXTS, MAX_TEXTS = 2, 16, 8192  # prompts, texts per portion, texts in all
WORTH = 80  # expected texts from which a prefix is split by its next token
MIN_TEXTS = 200  # texts per prompt for a verdict
PURPOSE = 6


@dataclass(frozen=True, slots=True)
class Cell:
    """Texts that begin with ``tokens``; if ``others``, those of them that belong to no longer cell."""

    tokens: tuple[int, ...]
    others: bool
    observed: int
    expected: float


def prefix(work: AuditTask, max_texts: int = MAX_TEXTS) -> Check:
    """Samples until the deadline, alternating between prompts once each has enough texts for a verdict."""
    prompts = work.prompts[:PROMPTS]
    counts: list[Counter[tuple[int, ...]]] = [Counter() for _ in prompts]
    law, batch = work.subject.law(work.temperature), work.subject.batch
    size = min(TEXTS, batch * 4)
    for portion in work.portions(-(-max_texts // size)):
        short = (i for i, counted in enumerate(counts) if _texts(counted) < MIN_TEXTS)
        at = next(short, portion % len(prompts))
        settings = CompletionSettings(
            law, LENGTH + BEYOND, work.seeds(PURPOSE, portion, size), work.subject.depth, batch=batch
        )
        for text in work.subject.generate([prompts[at]] * size, settings):
            counts[at].update(text.tokens[:length] for length in range(1, LENGTH + 1))
    tested = [
        (prompt, counted) for prompt, counted in zip(prompts, counts, strict=True) if _texts(counted) >= MIN_TEXTS
    ]
    if not tested:
        return Check(NAME, CheckOutcome.INCONCLUSIVE, f"{_texts(counts[0])} texts are too few; {MIN_TEXTS} at least")
    fits: list[Fit] = []
    for prompt, counted in tested:
        cells = tree(work, prompt, counted)
        level = work.level / len(tested)
        fits.append(g_test([cell.observed for cell in cells], [cell.expected for cell in cells], level))
        work.tick()
    return _verdict(fits, sum(_texts(counted) for _, counted in tested), work.level / len(tested))


def tree(work: AuditTask, prompt: Ids, counts: Counter[tuple[int, ...]]) -> list[Cell]:
    """Returns cells that partition all texts: prefixes with enough expected texts, and the remainder of each."""
    total, cells = _texts(counts), []
    open_: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_:
        tokens, mass = open_.pop()
        row = _next(work, prompt, tokens)
        likely = [(int(t), mass * float(row[t])) for t in (row * mass * total >= 5.0).nonzero().flatten()]
        mass_left, others_left = mass, counts[tokens] if tokens else total
        for token, share in likely:
            below = (*tokens, token)
            mass_left, others_left = mass_left - share, others_left - counts[below]
            if len(below) < LENGTH and share * total >= WORTH:
                open_.append((below, share))
            else:
                cells.append(Cell(below, False, counts[below], share * total))
        cells.append(Cell(tokens, True, others_left, max(mass_left, 0.0) * total))
    return cells


def _next(work: AuditTask, prompt: Ids, tokens: Sequence[int]) -> Tensor:
    """Returns the distribution after ``tokens``, float64 [V]."""
    law = work.subject.law(work.temperature)
    return audited_distributions(work.subject, prompt, [*tokens, 0], law)[0][-1]


def _texts(counts: Counter[tuple[int, ...]]) -> int:
    return sum(count for tokens, count in counts.items() if len(tokens) == 1)


def _verdict(fits: Sequence[Fit], texts: int, level: float) -> Check:
    worst = min(fits, key=lambda fit: fit.p_value)
    figures = f"G = {worst.statistic:.0f} on {worst.dof}, p = {worst.p_value:.2g}"
    numbers = {
        "texts": texts,
        "length": LENGTH,
        "level": level,
        "fits": [
            {"g": f.statistic if isfinite(f.statistic) else None, "dof": f.dof, "p_value": f.p_value, "finds": f.moved}
            for f in fits
        ],
    }
    if worst.p_value < level:
        return Check(NAME, CheckOutcome.FAILED, f"first {LENGTH} tokens of {texts:,} texts: {figures}", numbers)
    moved = min(fit.moved for fit in fits)
    evidence = f"first {LENGTH} tokens of {texts:,} texts: {figures}; would have found {moved:.1%} moved (power 0.9)"
    return Check(NAME, CheckOutcome.PASSED, evidence, numbers)

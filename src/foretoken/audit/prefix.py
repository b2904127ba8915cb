"""Prefix law: one prompt, many times; the first tokens counted as wholes against their enumerated law.

Where the test of single tokens conditions on what came before, this one sees the joint law, and texts that should
be independent and are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from foretoken.audit.chance import Fit, g_test
from foretoken.audit.result import Check, Outcome
from foretoken.audit.sampled import laws
from foretoken.audit.subject import Ask, Ids
from foretoken.audit.work import Work

NAME = "prefix law"
LENGTH, BEYOND = 3, 2  # tokens that are looked at; more are asked for, so that first rounds draft
PROMPTS, TEXTS, MOST = 2, 16, 8192  # prompts; texts of a portion, and of all
WORTH = 80  # expected texts from which a prefix is told apart by its next token
LEAST = 200  # texts
PURPOSE = 6


@dataclass(frozen=True, slots=True)
class Cell:
    """Texts that begin with ``tokens``, or, where ``others``, with ``tokens`` and then none of its own cells."""

    tokens: tuple[int, ...]
    others: bool
    observed: int
    expected: float


def prefix(work: Work, most: int = MOST) -> Check:
    """Draws while there is time, from two prompts by turns once each has enough for a verdict."""
    prompts = work.prompts[:PROMPTS]
    counts: list[Counter[tuple[int, ...]]] = [Counter() for _ in prompts]
    law, batch = work.subject.law(work.temperature), work.subject.batch
    size = min(TEXTS, batch * 4)
    for portion in work.portions(-(-most // size)):
        short = (i for i, found in enumerate(counts) if _texts(found) < LEAST)
        at = next(short, portion % len(prompts))
        ask = Ask(law, LENGTH + BEYOND, work.seeds(PURPOSE, portion, size), work.subject.depth, batch=batch)
        for text in work.subject.generate([prompts[at]] * size, ask):
            counts[at].update(text.tokens[:length] for length in range(1, LENGTH + 1))
    tested = [(prompt, found) for prompt, found in zip(prompts, counts, strict=True) if _texts(found) >= LEAST]
    if not tested:
        return Check(NAME, Outcome.INCONCLUSIVE, f"{_texts(counts[0])} texts are too few; {LEAST} at least")
    fits: list[Fit] = []
    for prompt, found in tested:
        cells = tree(work, prompt, found)
        level = work.level / len(tested)
        fits.append(g_test([cell.observed for cell in cells], [cell.expected for cell in cells], level))
        work.tick()
    return _verdict(fits, sum(_texts(found) for _, found in tested), work.level / len(tested))


def tree(work: Work, prompt: Ids, counts: Counter[tuple[int, ...]]) -> list[Cell]:
    """Cells that together are all texts: the prefixes worth telling apart, and for each of them the rest."""
    total, cells = _texts(counts), []
    open_: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_:
        tokens, mass = open_.pop()
        row = _next(work, prompt, tokens)
        likely = [(int(t), mass * float(row[t])) for t in (row * mass * total >= 5.0).nonzero().flatten()]
        left, rest = mass, counts[tokens] if tokens else total
        for token, share in likely:
            below = (*tokens, token)
            left, rest = left - share, rest - counts[below]
            if len(below) < LENGTH and share * total >= WORTH:
                open_.append((below, share))
            else:
                cells.append(Cell(below, False, counts[below], share * total))
        cells.append(Cell(tokens, True, rest, max(left, 0.0) * total))
    return cells


def _next(work: Work, prompt: Ids, tokens: Sequence[int]) -> Tensor:
    """float64 [V]: the law after ``tokens``."""
    law = work.subject.law(work.temperature)
    return laws(work.subject, prompt, [*tokens, 0], law)[0][-1]


def _texts(counts: Counter[tuple[int, ...]]) -> int:
    return sum(count for tokens, count in counts.items() if len(tokens) == 1)


def _verdict(fits: Sequence[Fit], texts: int, level: float) -> Check:
    worst = min(fits, key=lambda fit: fit.p_value)
    figures = f"G = {worst.statistic:.0f} on {worst.dof}, p = {worst.p_value:.2g}"
    numbers = {
        "texts": texts, "length": LENGTH, "level": level,
        "fits": [
            {"g": f.statistic if isfinite(f.statistic) else None, "dof": f.dof, "p_value": f.p_value, "finds": f.moved}
            for f in fits
        ],
    }  # fmt: skip
    if worst.p_value < level:
        return Check(NAME, Outcome.FAILED, f"first {LENGTH} tokens of {texts:,} texts: {figures}", numbers)
    moved = min(fit.moved for fit in fits)
    evidence = f"first {LENGTH} tokens of {texts:,} texts: {figures}; would have found {moved:.1%} moved (power 0.9)"
    return Check(NAME, Outcome.PASSED, evidence, numbers)

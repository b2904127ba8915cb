"""Checks that sampled tokens follow the distribution of the target's own forward pass: at every position, and jointly.

The test of single tokens conditions on the past. The prefix check samples one prompt many times and compares the first
tokens with their enumerated joint distribution: it finds texts that should be independent and are not.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite

import torch
from torch import Tensor

from foretoken.audit.subject import Audited, AuditTask, Check, CheckOutcome, CompletionSettings, Ids
from foretoken.audit.tally import Fit, Statistic, TokenTally, g_test
from foretoken.core.context import Exactness
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import exponentials, random_seed_from
from foretoken.plan.texts import SampledText, text_distributions

NAMES = {Exactness.DISTRIBUTION: "sampled distribution", Exactness.TRAJECTORY: "seeded distribution"}
PURPOSES = {Exactness.DISTRIBUTION: 3, Exactness.TRAJECTORY: 4}
SPREAD = 5
TOKENS, MAX_TOKENS = 32, 1 << 20  # tokens per text, and in all


def sampled(
    work: AuditTask, grade: Exactness = Exactness.DISTRIBUTION, max_tokens: int = MAX_TOKENS
) -> tuple[Check, TokenTally]:
    """Samples until the deadline or ``max_tokens``. Returns the check and its statistics."""
    name = NAMES[grade]
    if grade is Exactness.TRAJECTORY and not work.subject.seeded:
        return Check(name, CheckOutcome.SKIPPED, "it does not promise one text for one seed"), TokenTally()
    tally = drawn(work, work.subject, grade, max_tokens, lambda _: False)
    return sampling_check(name, tally, work.level, work.subject.open), tally


def drawn(
    work: AuditTask, subject: Audited, grade: Exactness, max_tokens: int, enough: Callable[[TokenTally], bool]
) -> TokenTally:
    """Samples from ``subject`` until there are ``max_tokens`` tokens, ``enough`` is true, or the deadline has passed.

    Two portions of three draft at the subject's depth, because its controller may decide not to draft.
    """
    tally, size = TokenTally(), work.fitting(max(1, subject.batch), 1, 1)
    for portion in work.portions(-(-max_tokens // (size * TOKENS))):
        prompts, seeds = work.turn(portion, size), work.seeds(PURPOSES[grade], portion, size)
        depth = None if portion % 3 == 2 else subject.depth
        settings = CompletionSettings(subject.law(work.temperature), TOKENS, seeds, depth, grade, batch=size)
        for prompt, seed, text in zip(prompts, seeds, subject.generate(prompts, settings), strict=True):
            probs, impossible = audited_distributions(subject, prompt, text.tokens, settings.law, work.noise)
            spread = exponentials(random_seed_from(seed, SPREAD), len(text.tokens)).neg().exp()
            tally.add(text, probs, spread, subject.reference(prompt, text.tokens, settings.law))
            tally.impossible += impossible
        if enough(tally):
            break
    return tally


def audited_distributions(
    subject: Audited, prompt: Ids, text: Ids, law: SamplingLaw, noise: float = 0.0
) -> tuple[Tensor, int]:
    """Returns the exact distributions along ``text``, float64 [n, V], and the number of impossible tokens.

    A token that a filter removes counts as possible if its logit passes when moved by ``noise``.
    """
    logits = subject.logits(prompt, text).double().cpu()
    probs = text_distributions(logits, SampledText(tuple(prompt), tuple(text), len(text)), law)
    tokens = torch.tensor(list(text))[:, None]
    lowest_kept = torch.where(probs > 0, logits, torch.inf).amin(-1)
    impossible = (probs.gather(1, tokens).squeeze(1) <= 0) & (
        logits.gather(1, tokens).squeeze(1) < lowest_kept - 2.0 * noise
    )
    return probs, int(impossible.sum())


def sampling_check(name: str, tally: TokenTally, level: float, steps_visible: bool = False) -> Check:
    """Returns the outcome of all tests, which share ``level``. A token of probability 0 is an error by itself.

    steps_visible: Whether ``tally.steps`` counts the steps that drafted. Without any there is nothing to test.
    """
    statistics, level = leveled(tally, level)
    wrong = [one for one in statistics if one.p_value < level]
    numbers = {
        "tokens": tally.tokens,
        "steps": tally.steps,
        "impossible": tally.impossible,
        "level": level,
        "drafted_per_step": tally.drafted / max(1, tally.steps),
        "accepted_whole": tally.whole / max(1, tally.steps),
        "statistics": [asdict(one) for one in statistics],
    }
    if tally.impossible:
        evidence = f"{tally.impossible} of {tally.tokens:,} tokens have probability 0 under the target"
        return Check(name, CheckOutcome.FAILED, evidence, numbers)
    if wrong:
        evidence = f"{tally.tokens:,} tokens do not follow the target's distribution: {most_significant(wrong)}"
        return Check(name, CheckOutcome.FAILED, evidence, numbers)
    found = power(statistics)
    if not found or (steps_visible and not tally.steps):
        why = "nothing was drafted" if found else f"{tally.tokens} tokens are too few"
        return Check(name, CheckOutcome.INCONCLUSIVE, why, numbers)
    worst = min(statistics, key=lambda one: one.p_value)
    evidence = (
        f"{tally.tokens:,} tokens, {len(statistics)} statistics, the most surprising p = {worst.p_value:.2g}; "
        f"would have found {found} (power 0.9)"
    )
    return Check(name, CheckOutcome.PASSED, evidence, numbers)


def leveled(tally: TokenTally, level: float) -> tuple[list[Statistic], float]:
    """Returns the tests with their power, and the significance level of each (Bonferroni)."""
    each = level / max(1, len(tally.statistics(level)))
    return tally.statistics(each), each


def power(statistics: Sequence[Statistic]) -> str:
    """Describes the smallest errors that would have been found with probability 0.9; empty if none would."""
    smallest: dict[str, float] = {}
    for one in statistics:
        if one.what in ("probability moved between ranks", "of the draft's distribution"):
            smallest[one.what] = min(one.finds, smallest.get(one.what, 1.0))
    return " or ".join(f"{value:.1%} {what}" for what, value in smallest.items())


def most_significant(wrong: Sequence[Statistic]) -> str:
    """Describes the three most significant tests."""
    ordered = sorted(wrong, key=lambda one: one.p_value)[:3]
    return "; ".join(
        f"{one.name}, {f'G = {one.value:.0f} on {one.dof}' if one.dof else f'z = {one.value:+.1f}'}" for one in ordered
    )


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

"""Sampled law: do drawn tokens follow the law that the target's own plain pass gives at every position?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from foretoken.audit.result import Check, Outcome
from foretoken.audit.subject import Ask, Audited, Ids
from foretoken.audit.tally import Statistic, Tally
from foretoken.audit.work import Work
from foretoken.core.context import Exactness
from foretoken.core.sampling import History, SamplingLaw
from foretoken.core.streams import exponentials, random_seed_from

NAMES = {Exactness.DISTRIBUTION: "sampled law", Exactness.TRAJECTORY: "seeded law"}
PURPOSES = {Exactness.DISTRIBUTION: 3, Exactness.TRAJECTORY: 4}
SPREAD = 5
TOKENS, MOST = 32, 1 << 20  # tokens of a text, and of all


def sampled(work: Work, grade: Exactness = Exactness.DISTRIBUTION, most: int = MOST) -> tuple[Check, Tally]:
    """Draws while there is time. -> the verdict, and the sums it rests on"""
    name = NAMES[grade]
    if grade is Exactness.TRAJECTORY and not work.subject.seeded:
        return Check(name, Outcome.SKIPPED, "it does not promise one text for one seed"), Tally()
    tally = drawn(work, work.subject, grade, most, lambda _: False)
    return judge(name, tally, work), tally


def drawn(work: Work, subject: Audited, grade: Exactness, most: int, enough: Callable[[Tally], bool]) -> Tally:
    """Sums over texts of ``subject`` until there are ``most`` tokens, or enough, or no time.

    Two portions of three draft at the subject's depth, as its own controller may hold drafting not worth its time.
    """
    tally, size = Tally(), max(1, subject.batch)
    for portion in work.portions(-(-most // (size * TOKENS))):
        prompts, seeds = work.turn(portion, size), work.seeds(PURPOSES[grade], portion, size)
        depth = None if portion % 3 == 2 else subject.depth
        ask = Ask(subject.law(work.temperature), TOKENS, seeds, depth, grade, batch=size)
        for prompt, seed, text in zip(prompts, seeds, subject.generate(prompts, ask), strict=True):
            probs, impossible = laws(subject, prompt, text.tokens, ask.law, work.noise)
            spread = exponentials(random_seed_from(seed, SPREAD), len(text.tokens)).neg().exp()
            tally.add(text, probs, spread, subject.reference(prompt, text.tokens, ask.law))
            tally.impossible += impossible
        if enough(tally):
            break
    return tally


def laws(subject: Audited, prompt: Ids, text: Ids, law: SamplingLaw, noise: float = 0.0) -> tuple[Tensor, int]:
    """The exact law at every token of ``text``, float64 [n, V], and how many tokens it could not have drawn.

    A token that a filter leaves out is possible if its logit, moved by ``noise``, passes.
    """
    logits = subject.logits(prompt, text).double().cpu()
    histories = [History(list(prompt), len(prompt), tuple(text[:at])) for at in range(len(text))]
    probs = law.probs(logits, histories if law.needs_history else [])
    tokens = torch.tensor(list(text))[:, None]
    least = torch.where(probs > 0, logits, torch.inf).amin(-1)
    out = (probs.gather(1, tokens).squeeze(1) <= 0) & (logits.gather(1, tokens).squeeze(1) < least - 2.0 * noise)
    return probs, int(out.sum())


def judge(name: str, tally: Tally, work: Work) -> Check:
    """All statistics share ``work.level``. A token that the law cannot draw is an error by itself."""
    statistics, level = leveled(tally, work.level)
    wrong = [one for one in statistics if one.p_value < level]
    numbers = {
        "tokens": tally.tokens, "rounds": tally.rounds, "impossible": tally.impossible, "level": level,
        "drafted_per_round": tally.drafted / max(1, tally.rounds), "accepted_whole": tally.whole / max(1, tally.rounds),
        "statistics": [asdict(one) for one in statistics],
    }  # fmt: skip
    if tally.impossible:
        evidence = f"{tally.impossible} of {tally.tokens:,} tokens have probability 0 in the target's law"
        return Check(name, Outcome.FAILED, evidence, numbers)
    if wrong:
        evidence = f"{tally.tokens:,} tokens do not follow the target's law: {told(wrong)}"
        return Check(name, Outcome.FAILED, evidence, numbers)
    if not statistics or (work.subject.open and not tally.rounds):
        why = "nothing was drafted" if statistics else f"{tally.tokens} tokens are too few"
        return Check(name, Outcome.INCONCLUSIVE, why, numbers)
    worst = min(statistics, key=lambda one: one.p_value)
    evidence = (
        f"{tally.tokens:,} tokens, {len(statistics)} statistics, the most surprising p = {worst.p_value:.2g}; "
        f"would have found {power(statistics)}"
    )
    return Check(name, Outcome.PASSED, evidence, numbers)


def leveled(tally: Tally, level: float) -> tuple[list[Statistic], float]:
    """The statistics with their power at the level that each of them gets, and that level."""
    each = level / max(1, len(tally.statistics(level)))
    return tally.statistics(each), each


def power(statistics: Sequence[Statistic]) -> str:
    """The least errors that were bound to show, with probability 0.9."""
    least: dict[str, float] = {}
    for one in statistics:
        if one.what in ("probability moved between ranks", "of the draft's law"):
            least[one.what] = min(one.finds, least.get(one.what, 1.0))
    return " or ".join(f"{value:.1%} {what}" for what, value in least.items()) + " (power 0.9)"


def told(wrong: Sequence[Statistic]) -> str:
    """The most telling three."""
    ordered = sorted(wrong, key=lambda one: one.p_value)[:3]
    return "; ".join(
        f"{one.name}, {f'G = {one.value:.0f} on {one.dof}' if one.dof else f'z = {one.value:+.1f}'}" for one in ordered
    )

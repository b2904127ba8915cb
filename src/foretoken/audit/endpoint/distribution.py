"""Whether sampled tokens follow the target's distribution, and whether the test would notice if they did not.

A distribution is tested over cells: the likeliest tokens one by one, and all others as one cell. Merging outcomes keeps
a test valid, so that a server's top-k log-probabilities suffice to test its samples.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from foretoken.audit.endpoint.task import EndpointTask, inconclusive, missing, unanswered
from foretoken.audit.negative import Plant, control_check, plant_of
from foretoken.audit.result import CONTROL, Check, CheckOutcome
from foretoken.audit.sampled import sampling_check
from foretoken.audit.subject import AuditedCompletion
from foretoken.audit.tally import BINS, TokenTally, noncentrality
from foretoken.probe.answers import ServerAnswer, TokenPlace
from foretoken.probe.server import Reference, Side

NAME = "sampled distribution"
PLAIN = "sampled distribution, plain"
TILTED, SOFTENED = 0.25, 1.5  # fraction of tokens that the control replaces, and its temperature
_TESTS = 5  # statistics of a tally, about
_MIN_REST = 1e-4  # probability below which the rest is merged with the least likely token
_SUM = 1.01  # largest sum of probabilities that rounding explains


class FalseLogprobsError(Exception):
    """The log-probabilities of a position add up to more than 1."""


@dataclass(frozen=True, slots=True)
class Cells:
    """A distribution and its outcome. probs: of each cell. at: the cell of the sampled token."""

    probs: tuple[float, ...]
    at: int


def whole(place: TokenPlace) -> Cells:
    """Returns the target's distribution at a position: its likeliest tokens in the order of names, then the rest.

    Raises FalseLogprobsError for log-probabilities that no distribution can have.
    """
    ordered = sorted(place.top)
    probs = [math.exp(value) for _, value in ordered]
    total = sum(probs)
    if not total <= _SUM or any(value > math.log(_SUM) for _, value in ordered):
        raise FalseLogprobsError(f"probabilities at one place add up to {total:.3g}")
    at = next((i for i, (name, _) in enumerate(ordered) if name == place.token), len(probs))
    rest = max(0.0, 1.0 - total)
    if rest < _MIN_REST:
        least = probs.index(min(probs))
        probs[least] += rest
        at = least if at == len(probs) else at
    else:
        probs.append(rest)
    return Cells(tuple(each / sum(probs) for each in probs), at)


def detectable(tokens: int, level: float) -> str:
    """Returns the error that a test of ``tokens`` tokens finds, before any is sampled."""
    moved = (noncentrality(BINS - 1, level / _TESTS) / (4.0 * max(1, tokens))) ** 0.5
    what = "of probability moved between likely and unlikely tokens (power 0.9)"
    return f"{tokens:,} tokens find {min(1.0, moved):.1%} {what}"


def distribution(task: EndpointTask) -> list[Check]:
    """Tests sampled texts of both sides, and plants errors. Without plain texts that pass, nothing is concluded."""
    if task.reference is Reference.NONE:
        why = "the server gives no log-probabilities; name the model's --checkpoint"
        return [inconclusive(NAME, why), control_check([])]
    speculative, texts = _tested(task, task.speculative, NAME, task.sizes.sampled)
    if task.plain is None:
        return [speculative, _control(task, texts)]
    plain, _ = _tested(task, task.plain, PLAIN, task.sizes.sampled_plain)
    if plain.outcome is CheckOutcome.FAILED:
        why = f"plain decoding does not follow this reference ({task.reference}) either: {speculative.evidence}"
        plain = replace(plain, outcome=CheckOutcome.INCONCLUSIVE)
        speculative = inconclusive(NAME, why, speculative.numbers)
    return [plain, speculative, _control(task, texts)]


def _tested(task: EndpointTask, side: Side, name: str, count: int) -> tuple[Check, list[list[Cells]]]:
    """Samples texts and tests them. Returns the cells of every text as well."""
    top = side.needs_logprobs or task.reference is Reference.INLINE
    requests = [task.request(i, f"sample/{i}", task.sizes.sampled_tokens, 1.0, top=top) for i in range(count)]
    replies = side.complete(requests, task.concurrency)
    answers = [(reply, f"sample/{i}") for i, reply in enumerate(replies) if isinstance(reply, ServerAnswer)]
    places = task.places(side, answers)
    rows = [row for row in places if isinstance(row, tuple)]
    why = [*missing(replies), *missing(places)]
    try:
        texts = [[whole(place) for place in row if place.top] for row in rows]
    except FalseLogprobsError as error:
        return inconclusive(name, f"the log-probabilities are false: {error}"), []
    check = sampling_check(name, tallied(texts, task.random(name)), task.level)
    without = sum(not place.top for row in rows for place in row)
    check = replace(check, numbers={**check.numbers, "reference": str(task.reference), "without_logprobs": without})
    if check.outcome is not CheckOutcome.FAILED:
        if why:
            check = unanswered(name, why, count)
        elif without * 10 > sum(map(len, rows)):
            check = inconclusive(name, f"{without} tokens came without log-probabilities", check.numbers)
    return check, texts


def tallied(texts: Sequence[Sequence[Cells]], spread: random.Random) -> TokenTally:
    """Returns the statistics of texts. spread: spreads outcomes within the probability of their cell."""
    tally, every = TokenTally(), [cells for text in texts for cells in text]
    if every:
        width = max(len(cells.probs) for cells in every)
        rows = [(*cells.probs, *(0.0,) * (width - len(cells.probs))) for cells in every]
        uniform = torch.tensor([spread.random() for _ in every], dtype=torch.float64)
        outcomes = AuditedCompletion(tuple(cells.at for cells in every))
        tally.add(outcomes, torch.tensor(rows, dtype=torch.float64), uniform)
    return tally


def _control(task: EndpointTask, texts: Sequence[Sequence[Cells]]) -> Check:
    """Plants errors in the server's answers: the same test must find them in no more tokens."""
    plants: list[Plant] = []
    for error, power in {
        f"one token in {round(1 / TILTED)} is replaced by the likeliest": 0.0,
        f"one token in {round(1 / TILTED)} is sampled again at {SOFTENED} times the temperature": 1.0 / SOFTENED,
    }.items():
        chance = task.random(CONTROL, error)
        tilted = [[_tilted(cells, power, chance) for cells in text] for text in texts]
        plants.append(plant_of(error, tallied(tilted, chance), task.level))
    return control_check(plants if any(texts) else [])


def _tilted(cells: Cells, power: float, chance: random.Random) -> Cells:
    """Replaces the outcome of some cells by a sample from probs ^ power, the likeliest cell for power 0."""
    if chance.random() >= TILTED:
        return cells
    if not power:
        return replace(cells, at=cells.probs.index(max(cells.probs)))
    weights = [each**power for each in cells.probs]
    return replace(cells, at=chance.choices(range(len(weights)), weights)[0])

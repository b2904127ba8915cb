"""Whether sampled tokens follow the target's distribution, and whether the test would notice if they did not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from foretoken.audit.chance import noncentrality
from foretoken.audit.endpoint.cells import Cells, FalseLogprobsError, whole
from foretoken.audit.endpoint.work import EndpointTask, because, missing
from foretoken.audit.negative import Plant, control_check, plant_of
from foretoken.audit.result import CONTROL, Check, CheckOutcome
from foretoken.audit.sampled import sampling_check
from foretoken.audit.subject import AuditedCompletion
from foretoken.audit.tally import BINS, TokenTally
from foretoken.probe.answers import ServerAnswer, TokenPlace
from foretoken.probe.side import EndpointRequest, Reference, Side

NAME = "sampled distribution"
PLAIN = "sampled distribution, plain"
TILTED, SOFTENED = 0.25, 1.5  # share of tokens that the control replaces, and its temperature
_TESTS = 5  # statistics of a tally, about


def detectable(tokens: int, level: float) -> str:
    """Returns what a test of that many tokens finds, before any is sampled."""
    moved = (noncentrality(BINS - 1, level / _TESTS) / (4.0 * max(1, tokens))) ** 0.5
    what = "of probability moved between likely and unlikely tokens (power 0.9)"
    return f"{tokens:,} tokens find {min(1.0, moved):.1%} {what}"


def distribution(task: EndpointTask) -> list[Check]:
    """Tests sampled texts of both sides, and plants errors. A reference that refutes plain decoding is no judge."""
    if task.reference is Reference.NONE:
        why = "inconclusive, because the server gives no log-probabilities; name the model's --checkpoint"
        return [Check(NAME, CheckOutcome.INCONCLUSIVE, why), control_check([])]
    own, texts = _tested(task, task.speculative, NAME, task.sizes.sampled)
    if task.plain is None:
        return [own, _control(task, texts)]
    plain, _ = _tested(task, task.plain, PLAIN, task.sizes.sampled_plain)
    if plain.outcome is CheckOutcome.FAILED:
        why = f"inconclusive, because plain decoding does not follow this reference ({task.reference}) either"
        plain = replace(plain, outcome=CheckOutcome.INCONCLUSIVE)
        own = replace(own, outcome=CheckOutcome.INCONCLUSIVE, evidence=f"{why}: {own.evidence}")
    return [plain, own, _control(task, texts)]


def _tested(task: EndpointTask, side: Side, name: str, count: int) -> tuple[Check, list[list[Cells]]]:
    """Samples texts and tests them. Returns the cells of every text as well."""
    top = side.needs_logprobs or task.reference is Reference.INLINE
    requests = [
        EndpointRequest(task.prompt(i), task.sizes.sampled_tokens, f"sample/{i}", 1.0, top) for i in range(count)
    ]
    replies = task.ask(side, requests)
    told = [(reply, f"sample/{i}") for i, reply in enumerate(replies) if isinstance(reply, ServerAnswer)]
    places = task.places(side, told)
    why = [*missing(replies), *missing(places)]
    try:
        texts = [_cells(row) for row in places if isinstance(row, tuple)]
    except FalseLogprobsError as error:
        false = f"inconclusive, because the log-probabilities are false: {error}"
        return Check(name, CheckOutcome.INCONCLUSIVE, false), []
    check = sampling_check(name, tallied(texts, task.random(name)), task.level)
    untold = sum(not place.top for row in places if isinstance(row, tuple) for place in row)
    check = replace(check, numbers={**check.numbers, "reference": str(task.reference), "without_logprobs": untold})
    if check.outcome is CheckOutcome.FAILED:
        return check, texts
    if why:
        return because(name, why, count), texts
    if untold * 10 > sum(map(len, texts)) + untold:
        why_not = f"inconclusive, because {untold} tokens came without log-probabilities"
        return replace(check, outcome=CheckOutcome.INCONCLUSIVE, evidence=why_not), texts
    return check, texts


def _cells(places: Sequence[TokenPlace]) -> list[Cells]:
    return [whole(place) for place in places if place.top]


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
    """Plants errors in what the server returned: the same test must find them in no more tokens."""
    plants: list[Plant] = []
    for error, power in {
        f"one token in {round(1 / TILTED)} is replaced by the likeliest": 0.0,
        f"one token in {round(1 / TILTED)} is drawn again at {SOFTENED} times the temperature": 1.0 / SOFTENED,
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

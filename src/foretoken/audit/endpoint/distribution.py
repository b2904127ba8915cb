"""Whether sampled tokens follow the target's distribution, also under parameters, and whether the test would notice.

A distribution is tested over cells: the likeliest tokens one by one, and all others as one cell. Merging outcomes keeps
a test valid, so that a server's top-k log-probabilities suffice to test its samples. Under a parameter the probability
of the tokens beyond the likeliest ones is unknown; then the distribution is conditional on the token being one of the
likeliest, which is known before it is sampled, and others are skipped.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from foretoken.audit.endpoint.parameters import ParameterFinding, Seen, Treatment, answers, found
from foretoken.audit.endpoint.task import EndpointTask, inconclusive, missing, unanswered
from foretoken.audit.negative import Plant, control_check, plant_of
from foretoken.audit.sampled import sampling_check
from foretoken.audit.subject import CONTROL, AuditedCompletion, Check, CheckOutcome
from foretoken.audit.tally import BINS, Sum, TokenTally, noncentrality, normal_tail
from foretoken.probe.answers import Failed, ServerAnswer, TokenPlace
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


_CLEAR, _CLEAR_MASS = 0.1, 0.02  # nats and probability by which no two passes of a server differ
_SEEN = 0.01  # level at which the unchanged distribution is ruled out
_ROUNDING = 1e-6  # sum of scores that is 0 but for rounding
_SPREAD = 1.0  # variance from which a sum of scores is about normal
_BIASED, _BIAS = 12, -4.0  # tokens that are made less likely, and by how much
_COMPARED = 6  # tokens of the greedy texts that show whether log-probabilities are those before a parameter
_BEST = 3  # likeliest tokens of a position that are compared
_SAME = 0.05  # difference of log-probabilities that rounding explains


@dataclass(frozen=True, slots=True)
class TunedSampling:
    """Sampling parameters, as OpenAI and vLLM define them. bias: by name of token. window: see ``Dialect``."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[str, float] = field(default_factory=dict)
    window: int | None = None

    def scores(self, top: Sequence[tuple[str, float]], prompt: Sequence[str], text: Sequence[str]) -> list[float]:
        """Returns scores whose softmax is the sampling distribution before filters.

        Log-probabilities are logits up to a constant, which neither the temperature nor subtracted penalties show. A
        repetition penalty, which divides or multiplies logits, would, so there is none here. prompt, text: names of the
        prompt's tokens, which count for penalties only within ``window``, and of the tokens generated before.
        """
        counted = Counter(text if self.window is None else (*prompt, *text)[-self.window :])
        return [
            (
                value
                + self.bias.get(name, 0.0)
                - self.presence_penalty * (counted[name] > 0)
                - self.frequency_penalty * counted[name]
            )
            / self.temperature
            for name, value in top
        ]

    def kept(self, top: Sequence[tuple[str, float]]) -> list[bool] | None:
        """Returns whether each likely token passes the filters, None if rounding or other tokens decide that."""
        passed = (self._top_k(top), self._nucleus(top), self._min_p(top))
        known = [each for each in passed if each is not None]
        return None if len(known) < len(passed) else [all(each) for each in zip(*known, strict=True)]

    def _top_k(self, top: Sequence[tuple[str, float]]) -> list[bool] | None:
        if self.top_k and (len(top) <= self.top_k or top[self.top_k - 1][1] - top[self.top_k][1] < _CLEAR):
            return None
        return [not self.top_k or i < self.top_k for i in range(len(top))]

    def _nucleus(self, top: Sequence[tuple[str, float]]) -> list[bool] | None:
        """Keeps a token if all that may be likelier have less than ``top_p``, in whichever order rounding puts them.

        Two passes order near ties differently, so a token just outside of the nucleus of one may be inside that of
        another, by as much probability as the other token of the tie has.
        """
        if self.top_p >= 1.0:
            return [True] * len(top)
        kept = []
        for i, (_, value) in enumerate(top):
            others = [other for j, (_, other) in enumerate(top) if j != i]
            certain = sum(math.exp(other) for other in others if other - value > _CLEAR)
            possible = sum(math.exp(other) for other in others if value - other <= _CLEAR)
            if certain < self.top_p + _CLEAR_MASS and possible > self.top_p - _CLEAR_MASS:
                return None
            kept.append(possible < self.top_p)
        return None if kept[-1] else kept  # tokens that are not named here may be inside as well

    def _min_p(self, top: Sequence[tuple[str, float]]) -> list[bool] | None:
        if self.min_p <= 0.0:
            return [True] * len(top)
        limit = top[0][1] + math.log(self.min_p)
        if top[-1][1] >= limit or any(abs(value - limit) < _CLEAR for _, value in top):
            return None
        return [value >= limit for _, value in top]


TUNINGS: Mapping[str, TunedSampling] = {
    "temperature": TunedSampling(temperature=0.5),
    "top_k": TunedSampling(top_k=3),
    "top_p": TunedSampling(top_p=0.6),
    "min_p": TunedSampling(min_p=0.15),
    "presence_penalty": TunedSampling(presence_penalty=2.0),
    "frequency_penalty": TunedSampling(frequency_penalty=2.0),
    "logit_bias": TunedSampling(),
}


def tuned(place: TokenPlace, tuning: TunedSampling, prompt: Sequence[str], text: Sequence[str]) -> Cells | None:
    """Returns the distribution under sampling parameters, over the likeliest tokens in the order of their rank.

    Tokens outside are a last cell of probability 0 if a filter forbids them; else a position where one was sampled says
    nothing, and None is returned. The position has the log-probabilities of plain sampling.
    """
    kept = tuning.kept(place.top) if place.top else None
    if kept is None:
        return None
    scores = tuning.scores(place.top, prompt, text)
    highest = max(scores)
    weights = [math.exp(score - highest) * keep for score, keep in zip(scores, kept, strict=True)]
    total, names = sum(weights), [name for name, _ in place.top]
    outside = place.token not in names
    if outside and all(kept):
        return None
    return Cells((*(each / total for each in weights), 0.0), len(names) if outside else names.index(place.token))


@dataclass(slots=True)
class TwoHypotheses:
    """Samples under two hypotheses: the parameter is honoured, or ignored.

    The score is h/(h+o), h and o the probabilities of the sampled token under the two: bounded, and the most powerful
    against a small admixture of the other.
    """

    honoured: Sum = field(default_factory=Sum)
    ignored: Sum = field(default_factory=Sum)
    impossible: int = 0
    tokens: int = 0

    def add(self, changed: Sequence[float], unchanged: Sequence[float], at: int) -> None:
        """Adds a token. changed, unchanged: probabilities of the same cells."""
        honoured, ignored = (torch.tensor(probs, dtype=torch.float64) for probs in (changed, unchanged))
        scores = torch.nan_to_num(honoured / (honoured + ignored))  # no score where neither has any probability
        self.tokens += 1
        self.impossible += changed[at] <= 0.0
        for total, probs in ((self.honoured, honoured), (self.ignored, ignored)):
            total.add(probs, scores, at)

    def add_text(self, text: ServerAnswer, places: Sequence[TokenPlace], tuning: TunedSampling, min_top: int) -> None:
        """Adds the tokens of a text: over all cells under a filter, else given that a token is among the likeliest.

        Positions with fewer than ``min_top`` tokens are skipped: if tokens are named by their texts, some have no name.
        """
        prompt, names = tuple(map(str, text.prompt_ids)), tuple(place.token for place in places)
        for at, place in enumerate(places):
            changed = tuned(place, tuning, prompt, names[:at]) if len(place.top) >= min_top else None
            if changed is None:
                continue
            unchanged = [math.exp(value) for _, value in place.top]
            filtered = any(p == 0.0 for p in changed.probs[:-1])
            total = 1.0 if filtered else sum(unchanged)
            rest = max(0.0, 1.0 - sum(unchanged)) if filtered else 0.0
            self.add(changed.probs, [*(p / total for p in unchanged), rest], changed.at)

    def treatment(self, level: float) -> Treatment:
        """Returns the hypothesis that holds. level: at which an honoured parameter is called something else."""
        wrong = self.impossible > 0 or _bound(self.honoured) < level
        seen = self.ignored.variance >= _SPREAD and normal_tail(self.ignored.z) < _SEEN
        if wrong:
            return Treatment.OTHER if seen else Treatment.IGNORED
        return Treatment.HONOURED if seen else Treatment.UNDECIDED

    def __str__(self) -> str:
        far = [f"{one.z:+.1f}" if one.variance >= _SPREAD else "no" for one in (self.honoured, self.ignored)]
        outside = f", {self.impossible} tokens that it forbids" if self.impossible else ""
        return f"{self.tokens} tokens: {far[0]} standard errors from it, {far[1]} from the unchanged one{outside}"


def _bound(total: Sum) -> float:
    """Returns a bound on the p-value of a sum of scores in [0, 1] (Freedman 1975), which holds for few tokens too."""
    far, variance = abs(total.excess), max(0.0, total.variance)
    if far < _ROUNDING:
        return 1.0
    return min(1.0, 2.0 * math.exp(-(far**2) / (2.0 * variance + 2.0 * far / 3.0)))


def tuned_findings(task: EndpointTask) -> list[ParameterFinding]:
    """Samples under one parameter after the other on both sides, and compares with both distributions."""
    return found(task, {parameter: partial(_treated, task, parameter) for parameter in TUNINGS})


def _treated(task: EndpointTask, parameter: str, side: Side) -> Seen:
    if task.reference is Reference.NONE:
        return Treatment.UNDECIDED, "the server reports no log-probabilities"
    inline = task.reference is Reference.INLINE
    tuning, options = _expected(task, side, parameter)
    if not options or (inline and parameter == "logit_bias"):
        return Treatment.UNDECIDED, "the server reports no token ids"
    if inline and not _before(task, side, parameter, options):
        return Treatment.UNDECIDED, "the server's log-probabilities are those under the parameter"
    temperature, top = 1.0 if parameter != "temperature" else None, inline or side.needs_logprobs
    requests = [
        task.request(i, f"{parameter}/{i}", task.sizes.tuned_tokens, temperature, top=top, options=options)
        for i in range(task.sizes.tuned)
    ]
    texts = [(text, f"{parameter}/{i}") for i, text in enumerate(answers(side.complete(requests, task.concurrency)))]
    hypotheses = TwoHypotheses()
    for (text, _), places in zip(texts, task.places(side, texts), strict=True):
        if isinstance(places, Failed):
            return Treatment.UNANSWERED, places.why
        hypotheses.add_text(text, places, tuning, side.top if inline else 0)
    return hypotheses.treatment(task.level / (2 * len(TUNINGS))), str(hypotheses)


def _before(task: EndpointTask, side: Side, parameter: str, options: Mapping[str, Any]) -> bool:
    """Returns whether the log-probabilities that come with a text are those before the parameter.

    Greedy texts are compared as far as they are the same. The temperature itself changes no position but the first.
    """
    greedy, count = (None, 1) if parameter == "temperature" else (0.0, _COMPARED)
    requests = [
        task.request(0, f"before/{parameter}", count),
        task.request(0, f"before/{parameter}", count, greedy, options=options),
    ]
    one, other = (reply.places for reply in answers(side.complete(requests, task.concurrency)))
    for here, there in zip(one, other, strict=False):
        now = dict(there.top)
        if not here.top or any(abs(value - now.get(name, value + 1.0)) > _SAME for name, value in here.top[:_BEST]):
            return False
        if here.token != there.token:
            break
    return True


def _expected(task: EndpointTask, side: Side, parameter: str) -> tuple[TunedSampling, dict[str, Any]]:
    """Returns the distribution to expect, and the fields to send."""
    if parameter == "logit_bias":  # on every other one of the most frequent tokens of the plain greedy texts
        texts = [text for text in task.greedy(task.judge) if isinstance(text, ServerAnswer)]
        counts = Counter(token for text in texts for token in text.ids)
        bias = {str(token): _BIAS for token, _ in counts.most_common(2 * _BIASED)[::2]}
        return TunedSampling(bias=bias), {"logit_bias": bias} if bias else {}
    tuning = TUNINGS[parameter]
    return replace(tuning, window=side.dialect.window), {parameter: getattr(tuning, parameter)}

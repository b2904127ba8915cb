"""Parameters that change the sampling distribution: do samples follow the changed one, or the unchanged one?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretoken.audit.chance import normal_tail
from foretoken.audit.endpoint.cells import TunedSampling, tuned
from foretoken.audit.endpoint.findings import ParameterFinding, Treatment
from foretoken.audit.endpoint.work import EndpointTask
from foretoken.audit.tally import Sum
from foretoken.probe.answers import Failed, Refused, Reply, ServerAnswer, TokenPlace
from foretoken.probe.side import EndpointRequest, Reference, Side

_SEEN = 0.01  # level at which the unchanged distribution is ruled out
_ROUNDING = 1e-6  # sum of scores that is 0 but for rounding
_SPREAD = 1.0  # variance from which a sum of scores is about normal
_BIASED, _BIAS = 12, -4.0  # tokens that are made less likely, and by how much
_COMPARED = 6  # tokens of the greedy texts that show whether log-probabilities are those before a parameter
_BEST = 3  # likeliest tokens of a place that are compared
_SAME = 0.05  # difference of log-probabilities that rounding explains

TUNINGS: Mapping[str, TunedSampling] = {
    "temperature": TunedSampling(temperature=0.5),
    "top_k": TunedSampling(top_k=3),
    "top_p": TunedSampling(top_p=0.6),
    "min_p": TunedSampling(min_p=0.15),
    "presence_penalty": TunedSampling(presence_penalty=2.0),
    "frequency_penalty": TunedSampling(frequency_penalty=2.0),
    "logit_bias": TunedSampling(),
}


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
        scores = [h / (h + o) if h + o > 0.0 else 0.0 for h, o in zip(changed, unchanged, strict=True)]
        self.tokens += 1
        self.impossible += changed[at] <= 0.0
        for total, probs in ((self.honoured, changed), (self.ignored, unchanged)):
            mean = sum(p * s for p, s in zip(probs, scores, strict=True))
            total.excess += scores[at] - mean
            total.variance += sum(p * s * s for p, s in zip(probs, scores, strict=True)) - mean * mean

    def treatment(self, level: float) -> Treatment:
        """Returns which hypothesis holds. level: at which an honoured parameter is called something else."""
        wrong = self.impossible > 0 or _bound(self.honoured) < level
        seen = self.ignored.variance >= _SPREAD and normal_tail(self.ignored.z) < _SEEN
        if wrong:
            return Treatment.OTHER if seen else Treatment.IGNORED
        return Treatment.HONOURED if seen else Treatment.UNDECIDED

    def __str__(self) -> str:
        far = [f"{one.z:+.1f}" if one.variance >= _SPREAD else "no" for one in (self.honoured, self.ignored)]
        against = f"{far[0]} standard errors from it, {far[1]} from the unchanged one"
        outside = f", {self.impossible} tokens that it forbids" if self.impossible else ""
        return f"{self.tokens} tokens: {against}{outside}"


def _bound(total: Sum) -> float:
    """Returns a bound on the p-value of a sum of scores in [0, 1] (Freedman 1975), which few tokens do not break."""
    far, variance = abs(total.excess), max(0.0, total.variance)
    if far < _ROUNDING:
        return 1.0
    return min(1.0, 2.0 * math.exp(-(far**2) / (2.0 * variance + 2.0 * far / 3.0)))


def tuned_findings(task: EndpointTask) -> list[ParameterFinding]:
    """Samples under one parameter after the other on both sides, and compares with both distributions."""
    findings, level = [], task.level / (2 * len(TUNINGS))
    for parameter in TUNINGS:
        rows = [_treated(task, side, parameter, level) for side in task.sides]
        plain = rows[0][0] if len(rows) == 2 else None
        how = "; ".join(f"{side.name}: {row[1]}" for side, row in zip(task.sides, rows, strict=True))
        findings.append(ParameterFinding(parameter, plain, rows[-1][0], how))
    return findings


def _treated(task: EndpointTask, side: Side, parameter: str, level: float) -> tuple[Treatment, str]:
    if parameter in side.dialect.unknown:
        return Treatment.ABSENT, f"{side.dialect.kind} has no {parameter}"
    if task.reference is Reference.NONE:
        return Treatment.UNDECIDED, "the server tells no log-probabilities"
    inline = task.reference is Reference.INLINE
    tuning, options = _asked(task, side, parameter)
    if not options or (inline and parameter == "logit_bias"):
        return Treatment.UNDECIDED, "the server tells no token ids"
    if inline and (changed := _changed(task, side, parameter, options)):
        return changed
    temperature = 1.0 if parameter != "temperature" else None
    requests = [
        EndpointRequest(
            task.prompt(i),
            task.sizes.tuned_tokens,
            f"{parameter}/{i}",
            temperature,
            inline or side.needs_logprobs,
            options,
        )
        for i in range(task.sizes.tuned)
    ]
    replies = task.ask(side, requests)
    if stopped := _stopped(replies):
        return stopped
    texts = [(text, f"{parameter}/{i}") for i, text in enumerate(replies) if isinstance(text, ServerAnswer)]
    hypotheses = TwoHypotheses()
    for (text, _), places in zip(texts, task.places(side, texts), strict=True):
        if isinstance(places, Failed):
            return Treatment.UNANSWERED, places.why
        _add(hypotheses, text, places, tuning, side.abilities.top if inline else 0)
    return hypotheses.treatment(level), str(hypotheses)


def _changed(
    task: EndpointTask, side: Side, parameter: str, options: Mapping[str, Any]
) -> tuple[Treatment, str] | None:
    """Returns why log-probabilities that come with a text are none without the parameter, None if they are.

    Greedy texts are compared as far as they are the same. The temperature itself changes no place but the first.
    """
    greedy = None if parameter == "temperature" else 0.0
    count = 1 if parameter == "temperature" else _COMPARED
    plain = EndpointRequest(task.prompt(0), count, f"before/{parameter}")
    with_it = EndpointRequest(task.prompt(0), count, f"before/{parameter}", greedy, options=options)
    replies = task.ask(side, [plain, with_it])
    if stopped := _stopped(replies):
        return stopped
    one, other = (reply.places for reply in replies if isinstance(reply, ServerAnswer))
    for ours, theirs in zip(one, other, strict=False):
        now = dict(theirs.top)
        if not ours.top or any(abs(value - now.get(name, value + 1.0)) > _SAME for name, value in ours.top[:_BEST]):
            return Treatment.UNDECIDED, "the server's log-probabilities are those under the parameter"
        if ours.token != theirs.token:
            break
    return None


def _stopped(replies: Sequence[Reply]) -> tuple[Treatment, str] | None:
    for reply in replies:
        if isinstance(reply, Refused):
            return Treatment.REFUSED, reply.why
        if isinstance(reply, Failed):
            return Treatment.UNANSWERED, reply.why
    return None


def _asked(task: EndpointTask, side: Side, parameter: str) -> tuple[TunedSampling, dict[str, Any]]:
    """Returns the law to expect, and the fields to send."""
    if parameter == "logit_bias":
        bias = {str(token): _BIAS for token in _common(task)}
        return TunedSampling(bias=bias), {"logit_bias": bias} if bias else {}
    tuning = TUNINGS[parameter]
    return replace(tuning, window=side.dialect.window), {parameter: getattr(tuning, parameter)}


def _common(task: EndpointTask) -> list[int]:
    """Returns the most frequent token ids of the plain greedy texts, every other one."""
    counts = Counter(token for text in task.greedy(task.judge) if isinstance(text, ServerAnswer) for token in text.ids)
    return [token for token, _ in counts.most_common(2 * _BIASED)][::2]


def _add(
    hypotheses: TwoHypotheses, text: ServerAnswer, places: Sequence[TokenPlace], tuning: TunedSampling, whole: int
) -> None:
    """Adds the tokens of a text: over all cells if the parameter is a filter, else given that a token is among them.

    Args:
        hypotheses: Where they are added.
        text: The text.
        places: Its tokens.
        tuning: The parameter.
        whole: Number of tokens that a place must name. Where tokens are named by their texts, some have no name.
    """
    prompt, names = tuple(map(str, text.prompt_ids)), tuple(place.token for place in places)
    for at, place in enumerate(places):
        changed = tuned(place, tuning, prompt, names[:at]) if len(place.top) >= whole else None
        if changed is None:
            continue
        unchanged = [math.exp(value) for _, value in place.top]
        filtered = any(p == 0.0 for p in changed.probs[:-1])
        total = 1.0 if filtered else sum(unchanged)
        rest = max(0.0, 1.0 - sum(unchanged)) if filtered else 0.0
        hypotheses.add(changed.probs, [*(p / total for p in unchanged), rest], changed.at)

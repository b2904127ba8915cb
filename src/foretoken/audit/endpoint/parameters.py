"""Sampling parameters, with and without speculation; this module tries those whose effect shows in a text.

They are stop strings, lengths, seeds, choices, streams, forbidden words, repetition penalties and JSON.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from foretoken.audit.endpoint.task import OBJECT_TOKENS, OBJECTS, EndpointTask, inconclusive
from foretoken.audit.subject import Check, CheckOutcome
from foretoken.probe.answers import Refused, Reply, ServerAnswer
from foretoken.probe.server import CHAT, EndpointRequest, Side

_TEXTS, _CHOICES, _ALTERNATIVES = 4, 2, 3
_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "bright": {"type": "boolean"}},
    "required": ["colour", "bright"],
    "additionalProperties": False,
}


class Treatment(StrEnum):
    """A server's treatment of a parameter."""

    HONOURED = "honoured"
    IGNORED = "ignored"
    OTHER = "something else"  # neither the parameter's meaning nor ignored
    REFUSED = "refused"
    UNDECIDED = "undecided"  # too few tokens
    UNANSWERED = "no answer"
    ABSENT = "not offered"


Seen = tuple[Treatment, str]
"""A treatment and its evidence."""


@dataclass(frozen=True, slots=True)
class ParameterFinding:
    """A row of the table: a parameter without speculation and with it. plain: None if there is no plain side."""

    parameter: str
    plain: Treatment | None
    speculative: Treatment
    how: str

    @property
    def outcome(self) -> CheckOutcome:
        """Failed if speculation changes the treatment of a parameter that plain decoding honours."""
        if Treatment.UNANSWERED in (self.plain, self.speculative):
            return CheckOutcome.INCONCLUSIVE
        if self.plain is not Treatment.HONOURED:
            lost = self.plain is None and self.speculative is Treatment.OTHER
            return CheckOutcome.INCONCLUSIVE if lost else CheckOutcome.PASSED
        match self.speculative:
            case Treatment.HONOURED:
                return CheckOutcome.PASSED
            case Treatment.UNDECIDED:
                return CheckOutcome.INCONCLUSIVE
            case _:
                return CheckOutcome.FAILED

    def __str__(self) -> str:
        both = f"{self.plain} without speculation, {self.speculative} with"
        return f"{self.parameter} is {self.speculative if self.plain is None else both} ({self.how})"


def findings_check(name: str, findings: Sequence[ParameterFinding]) -> Check:
    """Returns the check of some parameters, with the table among its numbers."""
    numbers = {"parameters": [asdict(each) for each in findings]}
    if wrong := [str(each) for each in findings if each.outcome is CheckOutcome.FAILED]:
        return Check(name, CheckOutcome.FAILED, "; ".join(wrong), numbers)
    if doubtful := [str(each) for each in findings if each.outcome is CheckOutcome.INCONCLUSIVE]:
        return inconclusive(name, "; ".join(doubtful), numbers)
    groups: dict[Treatment, list[str]] = {}
    for each in findings:
        groups.setdefault(each.speculative, []).append(each.parameter)
    evidence = "; ".join(f"{treatment}: {', '.join(names)}" for treatment, names in groups.items())
    return Check(name, CheckOutcome.PASSED, evidence or "none", numbers)


class _NoAnswerError(Exception):
    """A request that was refused or failed. seen: the resulting treatment."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(seen[1])
        self.seen = seen


def found(task: EndpointTask, parameters: Mapping[str, Callable[[Side], Seen]]) -> list[ParameterFinding]:
    """Tries every parameter on both sides. parameters: by name, a function that tries it on a side."""
    findings = []
    for parameter, tried in parameters.items():
        rows: list[Seen] = []
        for side in task.sides:
            if parameter in side.dialect.unknown:
                rows.append((Treatment.ABSENT, f"{side.dialect.kind} has no {parameter}"))
                continue
            try:
                rows.append(tried(side))
            except _NoAnswerError as error:
                rows.append(error.seen)
        how = "; ".join(f"{side.name}: {row[1]}" for side, row in zip(task.sides, rows, strict=True))
        findings.append(ParameterFinding(parameter, rows[0][0] if len(rows) == 2 else None, rows[-1][0], how))
    return findings


def answers(replies: Sequence[Reply]) -> list[ServerAnswer]:
    """Returns the replies if all are answers; else the treatment of the parameter is REFUSED or UNANSWERED."""
    for reply in replies:
        if not isinstance(reply, ServerAnswer):
            treatment = Treatment.REFUSED if isinstance(reply, Refused) else Treatment.UNANSWERED
            raise _NoAnswerError((treatment, reply.why))
    return [reply for reply in replies if isinstance(reply, ServerAnswer)]


def exact_findings(task: EndpointTask) -> list[ParameterFinding]:
    """Tries the parameters whose effect shows in a text."""
    return found(task, {parameter: partial(tried, task) for parameter, tried in _PARAMETERS.items()})


def _greedy(task: EndpointTask, side: Side) -> list[ServerAnswer]:
    """Returns the greedy texts of the first prompts, which parity requested."""
    return answers(task.greedy(side)[:_TEXTS])


def _answers(side: Side, requests: Sequence[EndpointRequest], concurrency: int = 1) -> list[ServerAnswer]:
    return answers(side.complete(requests, concurrency))


def _of(rows: Sequence[tuple[bool, bool]], what: str) -> Seen:
    """Returns the finding of some tries. rows: (as the parameter means, as without it)"""
    if not rows:
        return Treatment.UNDECIDED, "the texts are too short"
    honoured, ignored = (sum(each) for each in zip(*rows, strict=True))
    how = f"{honoured} of {len(rows)} {what}"
    if honoured == len(rows):
        return Treatment.HONOURED, how
    return (Treatment.IGNORED if ignored == len(rows) else Treatment.OTHER), how


def _stop(task: EndpointTask, side: Side) -> Seen:
    texts, requests, uncut = _greedy(task, side), [], []
    for i, text in enumerate(texts):
        middle = len(text.text) * (i + 2) // (len(texts) + 3)
        word = text.text[middle : middle + 3]
        if word.strip():
            requests.append(task.request(i, f"stop/{i}", options={"stop": [word]}))
            uncut.append((text.text, text.text.find(word)))
    cut = list(zip(_answers(side, requests), uncut, strict=True))
    rows = [_cut(one.text, one.finish, text, at) for one, (text, at) in cut]
    seen, how = _of(list(filter(None, rows)), "texts end before the stop string")
    ends = [len(one.text) - at for (one, (_, at)), row in zip(cut, rows, strict=True) if row == (False, False)]
    return seen, f"{how}, {len(ends)} from {min(ends):+d} to {max(ends):+d} characters from there" if ends else how


def _stop_token_ids(task: EndpointTask, side: Side) -> Seen:
    texts = {i: text for i, text in enumerate(_greedy(task, side)) if len(text.ids) > 4}
    ends = {i: text.ids[len(text.ids) // 2] for i, text in texts.items()}
    requests = [task.request(i, f"stop ids/{i}", options={"stop_token_ids": [end]}) for i, end in ends.items()]
    rows = []
    for one, text, end in zip(_answers(side, requests), texts.values(), ends.values(), strict=True):
        ids = one.ids[:-1] if one.ids[-1:] == (end,) else one.ids  # with or without the token itself
        rows.append(_cut(ids, one.finish, text.ids, text.ids.index(end)))
    return _of(list(filter(None, rows)), "texts end at the token")


def _cut(text: Sequence[Any], finish: str, uncut: Sequence[Any], at: int) -> tuple[bool, bool] | None:
    """Returns whether a text ends at ``at`` of the uncut one, and whether it goes on; None if it is another text."""
    if text[:at] != uncut[: min(at, len(text))]:
        return None
    return len(text) == at and finish == "stop", text == uncut


def _max_tokens(task: EndpointTask, side: Side) -> Seen:
    lengths = range(1, 1 + 2 * _TEXTS, 2)
    texts = _answers(side, [task.request(i, f"length/{n}", n) for i, n in enumerate(lengths)])
    rows = [(text.tokens == n, text.tokens > 4 * n) for text, n in zip(texts, lengths, strict=True) if text.tokens]
    return _of([row for row, text in zip(rows, texts, strict=False) if text.finish != "stop"], "texts have that length")


def _seed(task: EndpointTask, side: Side) -> Seen:
    """One text for one seed, and another for another."""
    rows = []
    for i in range(2):
        requests = [
            task.request(i, f"seed/{i}/{way}", temperature=1.0, top=False, options={"seed": seed + i})
            for way, seed in (("first", 11), ("again", 11), ("other", 1011))
        ]
        first, again, other = (text.text for text in _answers(side, requests))
        if first != other or first != again:
            rows.append((first == again, first != again))
    return _of(rows, "seeds give one text")


def _n(task: EndpointTask, side: Side) -> Seen:
    (text,) = _answers(side, [task.request(0, "choices", 4, 1.0, top=False, options={"n": _CHOICES})])
    return _of([(len(text.choices) == _CHOICES, len(text.choices) == 1)], f"answers have {_CHOICES} choices")


def _logprobs(task: EndpointTask, side: Side) -> Seen:
    if not side.top:
        return Treatment.IGNORED, "no log-probabilities come with texts"
    (text,) = _answers(side, [task.request(0, "alternatives")])
    enough = [len(place.top) >= _ALTERNATIVES for place in text.places] or [False]
    return _of([(each, not each) for each in enough], f"tokens have {_ALTERNATIVES} alternatives")


def _stream(task: EndpointTask, side: Side) -> Seen:
    texts = _greedy(task, side)
    requests = [task.request(i, f"stream/{i}", top=False, options={"stream": True}) for i in range(len(texts))]
    pairs = [(a.text, b.text) for a, b in zip(_answers(side, requests), texts, strict=True)]
    rows = [(a == b, False) for a, b in pairs if a.startswith(b) or b.startswith(a)]  # others are other texts
    return _of(rows, "streams have the text that comes at once")


def _changed(task: EndpointTask, side: Side, i: int, text: ServerAnswer, tag: str, **options: Any) -> tuple[bool, bool]:
    """Returns whether options change a greedy text, and whether they do not."""
    (other,) = _answers(side, [task.request(i, f"{tag}/{i}", options=options)])
    return other.text != text.text, other.text == text.text


def _bad_words(task: EndpointTask, side: Side) -> Seen:
    rows = []
    for i, text in enumerate(_greedy(task, side)):
        if words := Counter(re.findall(r"(?<!\w)[A-Za-z]{3,}(?!\w)", text.text)):
            rows.append(_changed(task, side, i, text, "bad words", bad_words=[words.most_common(1)[0][0]]))
    return _of(rows, "texts change where a word is forbidden")


def _repetition(task: EndpointTask, side: Side) -> Seen:
    texts = enumerate(_greedy(task, side))
    rows = [_changed(task, side, i, text, "repetition", repetition_penalty=1.8) for i, text in texts]
    return _of([row for row in rows if row[0]] or rows, "texts change where repetition costs")


def _structured(task: EndpointTask, side: Side) -> Seen:
    fields: dict[str, Any] = {
        "top": False,
        "options": side.dialect.grammar(_SCHEMA, side.path == CHAT),
        "endless": False,
    }
    requests = [task.request(i, f"object/{i}", OBJECT_TOKENS, 1.0, **fields) for i in range(OBJECTS)]
    texts = [text for text in _answers(side, requests, task.concurrency) if text.finish != "length"]
    return _of([(_valid(text.text), not _valid(text.text)) for text in texts], "finished texts follow the schema")


def _valid(text: str) -> bool:
    try:
        value: Any = json.loads(text)
    except ValueError:
        return False
    right = isinstance(value, dict) and set(value) == {"colour", "bright"}
    return right and value["colour"] in ("red", "green", "blue") and isinstance(value["bright"], bool)


_PARAMETERS: Mapping[str, Callable[[EndpointTask, Side], Seen]] = {
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "max_tokens": _max_tokens,
    "seed": _seed,
    "n": _n,
    "logprobs": _logprobs,
    "stream": _stream,
    "bad_words": _bad_words,
    "repetition_penalty": _repetition,
    "structured output": _structured,
}

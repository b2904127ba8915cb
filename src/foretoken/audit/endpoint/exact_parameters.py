"""Parameters whose effect on a text can be read from it: stop strings, lengths, seeds, choices, streams, JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken.audit.endpoint.findings import ParameterFinding, Treatment
from foretoken.audit.endpoint.sizes import OBJECT_TOKENS, OBJECTS
from foretoken.audit.endpoint.work import EndpointTask
from foretoken.probe.answers import Failed, Refused, Reply, ServerAnswer
from foretoken.probe.side import CHAT, EndpointRequest, Side

_TEXTS, _CHOICES, _ALTERNATIVES = 4, 2, 3
_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "bright": {"type": "boolean"}},
    "required": ["colour", "bright"],
    "additionalProperties": False,
}

Seen = tuple[Treatment, str]


class _NoAnswerError(Exception):
    """A request that was refused or failed. seen: the finding that follows."""

    def __init__(self, reply: Refused | Failed) -> None:
        super().__init__(reply.why)
        self.seen: Seen = (Treatment.REFUSED if isinstance(reply, Refused) else Treatment.UNANSWERED, reply.why)


def exact_findings(task: EndpointTask) -> list[ParameterFinding]:
    """Tries every parameter on both sides."""
    findings = []
    for parameter, seen in _PARAMETERS.items():
        rows = [_tried(task, side, parameter, seen) for side in task.sides]
        how = "; ".join(f"{side.name}: {row[1]}" for side, row in zip(task.sides, rows, strict=True))
        findings.append(ParameterFinding(parameter, rows[0][0] if len(rows) == 2 else None, rows[-1][0], how))
    return findings


def _tried(task: EndpointTask, side: Side, parameter: str, seen: Callable[[EndpointTask, Side], Seen]) -> Seen:
    if parameter in side.dialect.unknown:
        return Treatment.ABSENT, f"{side.dialect.kind} has no {parameter}"
    try:
        return seen(task, side)
    except _NoAnswerError as stopped:
        return stopped.seen


def _greedy(task: EndpointTask, side: Side) -> list[ServerAnswer]:
    """Returns the greedy texts of the first prompts, which parity asked for."""
    return _sure(task.greedy(side)[:_TEXTS])


def _answered(side: Side, requests: Sequence[EndpointRequest], concurrency: int = 1) -> list[ServerAnswer]:
    return _sure(side.complete(requests, concurrency))


def _sure(replies: Sequence[Reply]) -> list[ServerAnswer]:
    if wrong := [reply for reply in replies if not isinstance(reply, ServerAnswer)]:
        raise _NoAnswerError(wrong[0])
    return [reply for reply in replies if isinstance(reply, ServerAnswer)]


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
    texts, requests, whole = _greedy(task, side), [], []
    for i, text in enumerate(texts):
        middle = len(text.text) * (i + 2) // (len(texts) + 3)
        word = text.text[middle : middle + 3]
        if word.strip():
            requests.append(
                EndpointRequest(task.prompt(i), task.sizes.parity_tokens, f"stop/{i}", options={"stop": [word]})
            )
            whole.append((text.text, text.text.find(word)))
    cut = _answered(side, requests)
    rows = [_cut(one.text, one.finish, text, at) for one, (text, at) in zip(cut, whole, strict=True)]
    seen, how = _of(list(filter(None, rows)), "texts end before the stop string")
    ends = [len(one.text) - at for one, (_, at), row in zip(cut, whole, rows, strict=True) if row == (False, False)]
    return seen, f"{how}, {len(ends)} from {min(ends):+d} to {max(ends):+d} characters from there" if ends else how


def _stop_token_ids(task: EndpointTask, side: Side) -> Seen:
    texts = {i: text for i, text in enumerate(_greedy(task, side)) if len(text.ids) > 4}
    ends = {i: text.ids[len(text.ids) // 2] for i, text in texts.items()}
    requests = [
        EndpointRequest(task.prompt(i), task.sizes.parity_tokens, f"stop ids/{i}", options={"stop_token_ids": [end]})
        for i, end in ends.items()
    ]
    rows = []
    for one, text, end in zip(_answered(side, requests), texts.values(), ends.values(), strict=True):
        own = one.ids[:-1] if one.ids[-1:] == (end,) else one.ids  # with or without the token itself
        rows.append(_cut(own, one.finish, text.ids, text.ids.index(end)))
    return _of(list(filter(None, rows)), "texts end at the token")


def _cut(text: Sequence[Any], finish: str, whole: Sequence[Any], at: int) -> tuple[bool, bool] | None:
    """Returns whether a text ends at ``at`` of the whole one, and whether it goes on; None if it is another text."""
    if text[:at] != whole[: min(at, len(text))]:
        return None
    return len(text) == at and finish == "stop", text == whole


def _max_tokens(task: EndpointTask, side: Side) -> Seen:
    lengths = range(1, 1 + 2 * _TEXTS, 2)
    texts = _answered(side, [EndpointRequest(task.prompt(i), n, f"length/{n}") for i, n in enumerate(lengths)])
    rows = [(text.tokens == n, text.tokens > 4 * n) for text, n in zip(texts, lengths, strict=True) if text.tokens]
    return _of([row for row, text in zip(rows, texts, strict=False) if text.finish != "stop"], "texts have that length")


def _seed(task: EndpointTask, side: Side) -> Seen:
    """One text for one seed, and another for another."""
    rows = []
    for i in range(2):
        requests = [
            EndpointRequest(task.prompt(i), task.sizes.parity_tokens, f"seed/{i}/{way}", 1.0, False, {"seed": seed + i})
            for way, seed in (("first", 11), ("again", 11), ("other", 1011))
        ]
        first, again, other = (text.text for text in _answered(side, requests))
        if first != other or first != again:
            rows.append((first == again, first != again))
    return _of(rows, "seeds give one text")


def _n(task: EndpointTask, side: Side) -> Seen:
    request = EndpointRequest(task.prompt(0), 4, "choices", 1.0, False, {"n": _CHOICES})
    (text,) = _answered(side, [request])
    return _of([(len(text.choices) == _CHOICES, len(text.choices) == 1)], f"answers have {_CHOICES} choices")


def _logprobs(task: EndpointTask, side: Side) -> Seen:
    if not side.abilities.top:
        return Treatment.IGNORED, "no log-probabilities come with texts"
    (text,) = _answered(side, [EndpointRequest(task.prompt(0), task.sizes.parity_tokens, "alternatives")])
    told = [len(place.top) >= _ALTERNATIVES for place in text.places]
    return _of([(each, not each) for each in told] or [(False, True)], f"tokens have {_ALTERNATIVES} alternatives")


def _stream(task: EndpointTask, side: Side) -> Seen:
    texts = _greedy(task, side)
    requests = [
        EndpointRequest(task.prompt(i), task.sizes.parity_tokens, f"stream/{i}", top=False, options={"stream": True})
        for i in range(len(texts))
    ]
    pairs = [(a.text, b.text) for a, b in zip(_answered(side, requests), texts, strict=True)]
    rows = [(a == b, False) for a, b in pairs if a.startswith(b) or b.startswith(a)]  # others are other texts
    return _of(rows, "streams have the text that comes at once")


def _bad_words(task: EndpointTask, side: Side) -> Seen:
    rows = []
    for i, text in enumerate(_greedy(task, side)):
        words = Counter(re.findall(r"(?<!\w)[A-Za-z]{3,}(?!\w)", text.text))
        if words:
            word = words.most_common(1)[0][0]
            request = EndpointRequest(
                task.prompt(i), task.sizes.parity_tokens, f"bad words/{i}", options={"bad_words": [word]}
            )
            (other,) = _answered(side, [request])
            rows.append((other.text != text.text, other.text == text.text))
    return _of(rows, "texts change where a word is forbidden")


def _repetition(task: EndpointTask, side: Side) -> Seen:
    rows = []
    for i, text in enumerate(_greedy(task, side)):
        options = {"repetition_penalty": 1.8}
        (other,) = _answered(
            side, [EndpointRequest(task.prompt(i), task.sizes.parity_tokens, f"repetition/{i}", options=options)]
        )
        rows.append((other.text != text.text, other.text == text.text))
    return _of([row for row in rows if row[0]] or rows, "texts change where repetition costs")


def _structured(task: EndpointTask, side: Side) -> Seen:
    options = side.dialect.grammar(_SCHEMA, side.abilities.path == CHAT)
    requests = [
        EndpointRequest(task.prompt(i), OBJECT_TOKENS, f"object/{i}", 1.0, False, options, endless=False)
        for i in range(OBJECTS)
    ]
    texts = [text for text in _answered(side, requests, task.concurrency) if text.finish != "length"]
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

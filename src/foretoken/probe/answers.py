"""What a server answers: texts, finish reasons, tokens, and log-probabilities as OpenAI, vLLM and llama.cpp write them.

A token is named by its id where the answer has ids, else by its text. Texts that several tokens may share (parts of
characters, special tokens, nothing at all) all get the name ``OTHER``, which is never among the likeliest tokens, so
that each place has one name for every outcome.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from foretoken.probe.counters import DraftCounts, counts_of

OTHER = ""
_MOST = 2**40  # tokens of an answer, which no server reaches
_SHARED = re.compile(r"|.*\ufffd.*|<[^<>]*>|\[[A-Z_0-9]+\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """A place of a text.

    Attributes:
        token: Name of the token there.
        logprob: Its log-probability, None if the server does not say.
        top: The likeliest tokens there, as (name, log-probability), likeliest first.
    """

    token: str
    logprob: float | None
    top: tuple[tuple[str, float], ...] = ()


class Arrival(NamedTuple):
    """A chunk of a stream that had text. tokens: those of the chunk, None if the server does not say.

    seconds: since the request was sent. characters: of the chunk's text.
    """

    seconds: float
    tokens: int | None
    characters: int


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """One completion.

    Attributes:
        text: The text.
        finish: The finish reason, "" if there is none.
        places: The generated tokens, where the server tells them.
        ids: Their ids, where the server tells them.
        prompt_ids: Those of the prompt.
        scored: The likeliest tokens at each place of the prompt, where they were asked for, and its own token, unnamed.
            The first place has none.
        choices: The texts of all choices.
        tokens: Generated tokens, as the server counts them.
        prompt_tokens: Prompt tokens, as the server counts them.
        counts: Draft tokens of this request, None if the server does not say.
        seconds: Time from the request to the answer.
        began: When the request was sent, by ``time.perf_counter``.
        arrivals: Chunks of a stream.
    """

    text: str
    finish: str = ""
    places: tuple[TokenPlace, ...] = ()
    ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    scored: tuple[TokenPlace | None, ...] = ()
    choices: tuple[str, ...] = ()
    tokens: int = 0
    prompt_tokens: int = 0
    counts: DraftCounts | None = None
    seconds: float = 0.0
    began: float = 0.0
    arrivals: tuple[Arrival, ...] = ()

    @property
    def drafted(self) -> int | None:
        """Draft tokens of this request, None if the server does not say."""
        return None if self.counts is None else int(self.counts.drafted)

    @property
    def names(self) -> tuple[str, ...]:
        """The tokens by name, or the characters of the text if the server tells no tokens."""
        if self.ids:
            return tuple(map(str, self.ids))
        return tuple(place.token for place in self.places) or tuple(self.text)


@dataclass(frozen=True, slots=True)
class Refused:
    """The server refused a request. why: in its own words."""

    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that got no usable answer after all retries. why: what happened."""

    why: str


Reply = ServerAnswer | Refused | Failed


def answer_of(data: Any, top: int, seconds: float = 0.0) -> ServerAnswer:
    """Returns the answer in the body of a completion or chat completion.

    Args:
        data: The parsed body.
        top: Number of alternatives that were asked for at each token.
        seconds: See ``ServerAnswer``.

    Raises:
        ValueError: The body is not one of OpenAI's API.
    """
    try:
        choices = data["choices"]
        first = choices[0]
        usage = data.get("usage") or {}
        texts = tuple(_text(choice) for choice in choices)
        return ServerAnswer(
            text=texts[0],
            finish=str(first.get("finish_reason") or ""),
            places=_places(first.get("logprobs"), top),
            ids=tuple(map(int, first.get("token_ids") or _content_ids(first.get("logprobs")))),
            prompt_ids=tuple(map(int, first.get("prompt_token_ids") or data.get("prompt_token_ids") or ())),
            scored=_scored(first.get("prompt_logprobs") or data.get("prompt_logprobs") or ()),
            choices=texts,
            tokens=_count(usage.get("completion_tokens")),
            prompt_tokens=_count(usage.get("prompt_tokens")),
            counts=counts_of(data),
            seconds=seconds,
        )
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"the answer is not one of OpenAI's API ({type(error).__name__}: {error})") from error


def joined(events: Sequence[Any], top: int, times: Sequence[float], seconds: float = 0.0) -> ServerAnswer:
    """Returns the answer of a stream. events: its parsed chunks. times: when each came. Raises ValueError."""
    text, finish, arrivals = "", None, []
    ids: list[int] = []
    told: dict[str, Any] = {}
    try:
        for event, came in zip(events, times, strict=True):
            if event.get("error"):
                raise ValueError(f"the stream ended with an error: {event['error']}")
            told |= {key: event[key] for key in ("usage", "metrics", "timings") if event.get(key)}
            for choice in event.get("choices") or ():
                delta = choice.get("delta")
                own = (choice.get("text") if delta is None else delta.get("content")) or ""
                thought = (delta or {}).get("reasoning_content") or (delta or {}).get("reasoning") or ""
                fresh = choice.get("token_ids") or ()
                text, finish = text + own, choice.get("finish_reason") or finish
                ids.extend(map(int, fresh))
                told |= {key: choice[key] for key in ("prompt_token_ids",) if choice.get(key)}
                if own or fresh or thought:
                    arrivals.append(Arrival(came, len(fresh) or None, len(own) + len(thought)))
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"the stream is not one of OpenAI's API ({type(error).__name__}: {error})") from error
    answer = answer_of(told | {"choices": [{"text": text, "finish_reason": finish, "token_ids": ids}]}, top, seconds)
    return replace(answer, arrivals=tuple(arrivals), tokens=answer.tokens or len(ids))


def _count(value: Any) -> int:
    number = int(value or 0)
    if not 0 <= number < _MOST:
        raise ValueError(f"a number of tokens was expected, got {str(value)[:40]}")
    return number


def _text(choice: Mapping[str, Any]) -> str:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    if text is not None and not isinstance(text, str):
        raise TypeError(f"a text was expected, got {type(text).__name__}")
    return text or ""


def _places(logprobs: Any, top: int) -> tuple[TokenPlace, ...]:
    if not logprobs:
        return ()
    if "content" in logprobs:
        return tuple(_chat_place(entry, top) for entry in logprobs["content"] or ())
    tokens, own = logprobs["tokens"], logprobs.get("token_logprobs") or ()
    every = logprobs.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        TokenPlace(_name(token), None if logprob is None else float(logprob), _likeliest((table or {}).items(), top))
        for token, logprob, table in zip(tokens, own, every, strict=True)
    )


def _chat_place(entry: Mapping[str, Any], top: int) -> TokenPlace:
    table = entry.get("top_logprobs") or ()
    if "id" in entry:
        likeliest = tuple((str(each["id"]), float(each["logprob"])) for each in table)
        return TokenPlace(str(entry["id"]), float(entry["logprob"]), _ordered(likeliest)[:top])
    pairs = [(each["token"], each["logprob"]) for each in table]
    return TokenPlace(_name(entry["token"]), float(entry["logprob"]), _likeliest(pairs, top))


def _scored(entries: Sequence[Any]) -> tuple[TokenPlace | None, ...]:
    """Reads vLLM's prompt_logprobs: tables by id. Which of the tokens is the prompt's own, the one who asked knows."""
    return tuple(
        None
        if table is None
        else TokenPlace(OTHER, None, _ordered([(name, float(each["logprob"])) for name, each in table.items()]))
        for table in entries
    )


def _content_ids(logprobs: Any) -> tuple[int, ...]:
    """Returns the ids in llama.cpp's log-probabilities."""
    content = (logprobs or {}).get("content") or ()
    return tuple(entry["id"] for entry in content) if all("id" in entry for entry in content) else ()


def _likeliest(pairs: Iterable[tuple[str, float]], top: int) -> tuple[tuple[str, float], ...]:
    ordered = _ordered([(name, float(value)) for name, value in pairs])[:top]
    return tuple((name, value) for name, value in ordered if _name(name) != OTHER)


def _ordered(pairs: Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))


def _name(text: str) -> str:
    return OTHER if _SHARED.fullmatch(text) else text

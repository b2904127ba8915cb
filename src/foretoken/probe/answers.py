"""Answers of servers: texts, finish reasons, tokens, and log-probabilities as OpenAI, vLLM and llama.cpp write them.

A token is named by its id where the answer has ids, else by its text. Texts that several tokens may share (parts of
characters, special tokens, the empty text) all get the name ``OTHER``, which is never among the likeliest tokens, so
that each position has one name for every outcome.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from foretoken.probe.counters import DraftCounts, counts_of

OTHER = ""
_MAX_TOKENS = 2**40  # of an answer; larger counts are errors
_SHARED = re.compile(r"|.*\ufffd.*|<[^<>]*>|\[[A-Z_0-9]+\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """A position of a text: its token by name, that token's log-probability if known, and the likeliest tokens."""

    token: str
    logprob: float | None
    top: tuple[tuple[str, float], ...] = ()  # (name, log-probability), likeliest first


class Arrival(NamedTuple):
    """A chunk of a stream with text. seconds: since the request. tokens: in the chunk, None if unknown."""

    seconds: float
    tokens: int | None
    characters: int


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """One completion. Fields that the server does not report are empty.

    Attributes:
        text: The text of the first choice.
        finish: The finish reason.
        places: The generated tokens with their log-probabilities.
        ids: Ids of the generated tokens.
        prompt_ids: Ids of the prompt's tokens.
        scored: The likeliest tokens at each position of the prompt, if requested. The first position has none.
        choices: The texts of all choices.
        tokens: Number of generated tokens, as the server counts them.
        prompt_tokens: Number of prompt tokens, as the server counts them.
        counts: Draft tokens of this request, None if unknown.
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
        """Draft tokens of this request, None if unknown."""
        return None if self.counts is None else int(self.counts.drafted)

    @property
    def names(self) -> tuple[str, ...]:
        """The tokens by name, or the characters of the text if the server reports no tokens."""
        if self.ids:
            return tuple(map(str, self.ids))
        return tuple(place.token for place in self.places) or tuple(self.text)


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that the server refused. why: the server's words."""

    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A request without a usable answer after all retries. why: the reason."""

    why: str


Reply = ServerAnswer | Refused | Failed


def answer_of(data: Any, top: int, seconds: float = 0.0) -> ServerAnswer:
    """Returns the answer in the parsed body of a completion or chat completion.

    Args:
        data: The parsed body.
        top: Number of alternatives that were requested at each token.
        seconds: Time from the request to the answer.

    Raises:
        ValueError: The body is not one of OpenAI's API.
    """
    try:
        choices, usage = data["choices"], data.get("usage") or {}
        first, texts = choices[0], tuple(map(_text, choices))
        logprobs = first.get("logprobs")
        return ServerAnswer(
            text=texts[0],
            finish=str(first.get("finish_reason") or ""),
            places=_places(logprobs, top),
            ids=tuple(map(int, first.get("token_ids") or _llamacpp_ids(logprobs))),
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
    body: dict[str, Any] = {}
    try:
        for event, came in zip(events, times, strict=True):
            if event.get("error"):
                raise ValueError(f"the stream ended with an error: {event['error']}")
            body |= {key: event[key] for key in ("usage", "metrics", "timings") if event.get(key)}
            for choice in event.get("choices") or ():
                delta = choice.get("delta")
                chunk = (choice.get("text") if delta is None else delta.get("content")) or ""
                thought = (delta or {}).get("reasoning_content") or (delta or {}).get("reasoning") or ""
                tokens = choice.get("token_ids") or ()
                text, finish = text + chunk, choice.get("finish_reason") or finish
                ids.extend(map(int, tokens))
                body |= {key: choice[key] for key in ("prompt_token_ids",) if choice.get(key)}
                if chunk or tokens or thought:
                    arrivals.append(Arrival(came, len(tokens) or None, len(chunk) + len(thought)))
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"the stream is not one of OpenAI's API ({type(error).__name__}: {error})") from error
    answer = answer_of(body | {"choices": [{"text": text, "finish_reason": finish, "token_ids": ids}]}, top, seconds)
    return replace(answer, arrivals=tuple(arrivals), tokens=answer.tokens or len(ids))


def _count(value: Any) -> int:
    number = int(value or 0)
    if not 0 <= number < _MAX_TOKENS:
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
        rows = ((row, row.get("top_logprobs") or ()) for row in logprobs["content"] or ())
        return tuple(
            _place(_named(row), float(row["logprob"]), [(_named(each), each["logprob"]) for each in table], top)
            for row, table in rows
        )
    tokens = logprobs["tokens"]
    tables = ((table or {}).items() for table in logprobs.get("top_logprobs") or [None] * len(tokens))
    each = zip(tokens, logprobs.get("token_logprobs") or (), tables, strict=True)
    return tuple(_place(token, logprob, table, top) for token, logprob, table in each)


def _scored(tables: Sequence[Any]) -> tuple[TokenPlace | None, ...]:
    """Parses vLLM's prompt_logprobs, tables by token id. The prompt's own token is not marked in them."""
    return tuple(
        None if table is None else _place(OTHER, None, [(name, each["logprob"]) for name, each in table.items()])
        for table in tables
    )


def _named(entry: Mapping[str, Any]) -> str:
    return str(entry["id"]) if "id" in entry else entry["token"]  # llama.cpp has both


def _llamacpp_ids(logprobs: Any) -> tuple[int, ...]:
    content = (logprobs or {}).get("content") or ()
    return tuple(entry["id"] for entry in content) if all("id" in entry for entry in content) else ()


def _place(token: str, logprob: Any, table: Iterable[tuple[str, Any]], top: int | None = None) -> TokenPlace:
    likeliest = sorted(((name, float(value)) for name, value in table), key=lambda pair: -pair[1])[:top]
    named = tuple((name, value) for name, value in likeliest if _name(name) != OTHER)
    return TokenPlace(_name(token), None if logprob is None else float(logprob), named)


def _name(text: str) -> str:
    return OTHER if _SHARED.fullmatch(text) else text

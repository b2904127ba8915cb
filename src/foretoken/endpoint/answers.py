"""What a server answers: texts, finish reasons, tokens, and log-probabilities as OpenAI, vLLM and llama.cpp write them.

A token is named by its id where the answer has ids, else by its text. Texts that several tokens may share (parts of
characters, special tokens, nothing at all) all get the name ``OTHER``, which is never among the likeliest tokens, so
that each place has one name for every outcome.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OTHER = ""
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
        drafted: Draft tokens of this request, None if the server does not say.
        seconds: Time from the request to the answer.
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
    drafted: int | None = None
    seconds: float = 0.0

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
            tokens=int(usage.get("completion_tokens") or 0),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            drafted=_drafted(data),
            seconds=seconds,
        )
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"the answer is not one of OpenAI's API ({type(error).__name__}: {error})") from error


def joined(events: Sequence[Any], top: int, seconds: float = 0.0) -> ServerAnswer:
    """Returns the answer of a stream. events: its parsed chunks. Raises ValueError."""
    text, finish = "", None
    try:
        for choice in (each for event in events for each in event.get("choices") or ()):
            delta = choice.get("delta")
            text += (choice.get("text") if delta is None else delta.get("content")) or ""
            finish = choice.get("finish_reason") or finish
        usage = next((event["usage"] for event in reversed(events) if event.get("usage")), None)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the stream is not one of OpenAI's API ({type(error).__name__}: {error})") from error
    return answer_of({"choices": [{"text": text, "finish_reason": finish}], "usage": usage}, top, seconds)


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


def _drafted(data: Mapping[str, Any]) -> int | None:
    """Returns the draft tokens that our server or llama.cpp reports."""
    metrics = (data.get("metrics") or {}).get("speculative_decoding")
    if metrics is not None:
        return int(metrics["num_draft_tokens"])
    timings = data.get("timings")
    return None if timings is None else int(timings.get("draft_n") or 0)

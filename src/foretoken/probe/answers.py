"""Answers of servers as OpenAI, vLLM and llama.cpp write them: texts, tokens, log-probabilities and draft counts.

A token is named by its id where the answer has ids, else by its text. Texts that several tokens may share (parts of
characters, special tokens, the empty text) all get the name ``OTHER``, which is never among the likeliest tokens, so
that each position has one name for every outcome.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

_COUNTER = re.compile(r"^(?:\w+:)(\w+?)(?:_total)?(\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_PREFIX = "spec_decode_num_"
_GENERATED = ("generation_tokens", "tokens_predicted")  # of all requests: vLLM, SGLang and ours; llama.cpp
OTHER = ""
_MAX_TOKENS = 2**40  # of an answer; larger counts are errors
_SHARED = re.compile(r"|.*\ufffd.*|<[^<>]*>|\[[A-Z_0-9]+\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of speculation. by_position: steps that accepted the draft token there, empty if unknown."""

    drafted: float
    accepted: float
    steps: float | None = None  # steps that verified a draft
    by_position: tuple[float, ...] = ()

    def plus(self, other: "DraftCounts", sign: float = 1.0) -> "DraftCounts":
        """Returns the sum, or with ``sign`` -1 the difference."""
        steps = None if self.steps is None or other.steps is None else self.steps + sign * other.steps
        positions = zip_longest(self.by_position, other.by_position, fillvalue=0.0)
        return DraftCounts(
            self.drafted + sign * other.drafted,
            self.accepted + sign * other.accepted,
            steps,
            tuple(a + sign * b for a, b in positions),
        )

    @property
    def per_step(self) -> float | None:
        """Draft tokens of a step, None if unknown."""
        return self.drafted / self.steps if self.steps else None

    @property
    def contradiction(self) -> str:
        """The reason why the counts are impossible, "" if they are possible."""
        if min(self.drafted, self.accepted, self.steps or 0.0, *self.by_position) < 0:
            return "a counter fell"
        if self.accepted > self.drafted:
            return f"{self.accepted:,.0f} tokens were accepted of {self.drafted:,.0f} drafted"
        if any(after > before for before, after in pairwise(self.by_position)):
            return "later draft tokens were accepted more often than those before them"
        return ""


def summed(counts: Iterable[DraftCounts | None]) -> DraftCounts | None:
    """Returns the sum, None if one of the counts is missing."""
    total = DraftCounts(0.0, 0.0, 0.0)
    for each in counts:
        if each is None:
            return None
        total = total.plus(each)
    return total


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """Counters of a Prometheus page since the server started, None if the page has none."""

    speculation: DraftCounts | None = None
    generated: float | None = None  # tokens of all requests
    accept_length: float | None = None  # SGLang's gauge of tokens per pass, over its latest passes

    def since(self, earlier: "ServerCounters", tokens: float) -> DraftCounts | None:
        """Returns the counts since ``earlier``, None if the server has no counters.

        A gauge becomes counts by the number of ``tokens`` generated since. It does not say how many tokens were
        drafted; at least the accepted ones were.
        """
        if self.speculation is not None and earlier.speculation is not None:
            return self.speculation.plus(earlier.speculation, -1.0)
        if self.accept_length is None or self.accept_length < 1.0:
            return None
        accepted = tokens * (1.0 - 1.0 / self.accept_length)
        return DraftCounts(accepted, accepted)

    @staticmethod
    def of(page: str) -> "ServerCounters":
        """Returns the counters of a page, summed over engines and models."""
        sums: dict[str, float] = {}
        positions: dict[int, float] = {}
        lengths: list[float] = []
        for name, labels, text in _COUNTER.findall(page):
            position, value = _POSITION.search(labels), _finite(text)
            if value is None:
                continue
            if name == f"{_PREFIX}accepted_tokens_per_pos" and position:
                positions[int(position[1])] = positions.get(int(position[1]), 0.0) + value
            elif name == "spec_accept_length":
                lengths.append(value)
            else:
                sums[name] = sums.get(name, 0.0) + value
        generated = next((sums[name] for name in _GENERATED if name in sums), None)
        drafted, accepted = sums.get(f"{_PREFIX}draft_tokens"), sums.get(f"{_PREFIX}accepted_tokens")
        if drafted is None or accepted is None:
            return ServerCounters(None, generated, sum(lengths) / len(lengths) if lengths else None)
        by_position = tuple(positions[at] for at in sorted(positions))
        return ServerCounters(DraftCounts(drafted, accepted, sums.get(f"{_PREFIX}drafts"), by_position), generated)


def counts_of(answer: Mapping[str, Any]) -> DraftCounts | None:
    """Returns the counts in our and vLLM's ``metrics`` or llama.cpp's ``timings``. Raises ValueError for wrong ones."""
    metrics = (answer.get("metrics") or {}).get("speculative_decoding")
    if metrics is not None:
        histogram, steps = metrics.get("acceptance_histogram") or (), metrics.get("num_spec_steps")
        return DraftCounts(
            _draft_count(metrics["num_draft_tokens"]),
            _draft_count(metrics.get("num_accepted_draft_tokens") or 0),
            None if steps is None else _draft_count(steps),
            tuple(sum(map(_draft_count, histogram[at:])) for at in range(1, len(histogram))),
        )
    timings = answer.get("timings")
    if timings is None:
        return None
    return DraftCounts(_draft_count(timings.get("draft_n") or 0), _draft_count(timings.get("draft_n_accepted") or 0))


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _draft_count(value: Any) -> float:
    if (number := _finite(value)) is None:
        raise ValueError(f"a count of draft tokens was expected, got {str(value)[:40]!r}")
    return number


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
    """One completion. Fields that the server does not report are empty."""

    text: str  # of the first choice
    finish: str = ""  # the finish reason
    places: tuple[TokenPlace, ...] = ()  # the generated tokens with their log-probabilities
    ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    scored: tuple[TokenPlace | None, ...] = ()  # positions of the prompt, if requested; the first one has no tokens
    choices: tuple[str, ...] = ()  # the texts of all choices
    tokens: int = 0  # as the server counts them
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens of the prefix cache
    counts: DraftCounts | None = None  # of this request
    seconds: float = 0.0  # from the request to the answer
    began: float = 0.0  # when the request was sent, by time.perf_counter
    arrivals: tuple[Arrival, ...] = ()  # chunks of a stream

    @property
    def drafted(self) -> int | None:
        """Draft tokens of this request, None if unknown."""
        return None if self.counts is None else int(self.counts.drafted)

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks with text (ITL), of which each has one token or more."""
        return [after.seconds - before.seconds for before, after in pairwise(self.arrivals)]

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first (TPOT); None for a single chunk."""
        return sum(self.gaps) / (self.tokens - 1) if self.gaps and self.tokens > 1 else None

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
    """Returns the answer in the parsed body of a completion or chat completion. Raises ValueError for other bodies.

    top: number of alternatives that were requested at each token. seconds: from the request to the answer.
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
            tokens=_token_count(usage.get("completion_tokens")),
            prompt_tokens=_token_count(usage.get("prompt_tokens")),
            cached_tokens=_token_count((usage.get("prompt_tokens_details") or {}).get("cached_tokens")),
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


def _token_count(value: Any) -> int:
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

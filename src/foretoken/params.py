"""What a request may ask for. Bad values are refused here, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.core.checks import integer
from foretoken.core.context import Exactness
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import MAX_SEED, MIN_SEED

_SMALLEST, _BIAS = 1e-6, 1e6


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters by vLLM's names and meanings.

    speculative_tokens: drafted tokens per round; None takes the engine's, 0 is plain decoding.
    seed: an integer of 64 bits with its sign, each another text; -1 is one of them. None: the engine's seed and the
    request's number decide. The first of ``n`` completions has the text of ``n=1``.
    exactness: ``"distribution"``, ``"trajectory"`` or ``"lossy-typical"``; None means trajectory when ``seed``
    is set, else distribution.
    speculative_method: which of the loaded methods drafts; None takes the engine's choice.
    structured_outputs: what the text has to be, as vLLM's: one of {"json": schema}, {"json_object": True},
    {"regex": pattern}, {"choice": [texts]} and {"grammar": Lark or GBNF}; the law then is the model's own, restricted
    at every token to what the text can still go on with. JSON is spaced as json.dumps spaces it; "whitespace": True
    beside it allows any.
    logprobs, prompt_logprobs: so many of the likeliest tokens at every place of the output and of the prompt.
    explain: every piece says what the target and the draft thought of each drafted token; see ``StreamPiece``.
    prediction: a text (or its token ids) that the output is expected to follow in the main, as OpenAI's predicted
    outputs. Methods that read it ("prediction", mixtures with it) draft from it; it never changes what comes out.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    speculative_tokens: int | None = None
    speculative_method: str | None = None
    exactness: str | None = None
    prediction: str | Sequence[int] | None = None
    explain: bool = False

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf, "a number of at least 0 (0 is greedy)")
        _number("top_p", self.top_p, 0.0, 1.0, "a number above 0 and at most 1", above=True)
        _number("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, "a number from -2 to 2")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "a number from -2 to 2")
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "a number above 0", above=True)
        integer("n", self.n, 1)
        integer("max_tokens", self.max_tokens, 1)
        integer("min_tokens", self.min_tokens, 0)
        integer("top_k", self.top_k, -1)
        for name in ("logprobs", "prompt_logprobs", "speculative_tokens"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), 0)
        # Smaller ones leave float32 nothing to compute with.
        if 0.0 < self.temperature < _SMALLEST or self.top_p < _SMALLEST or self.repetition_penalty < _SMALLEST:
            raise InvalidRequest(
                f"temperature must be 0 or at least {_SMALLEST:g}, top_p and repetition_penalty at least "
                f"{_SMALLEST:g}; got {self.temperature!r}, {self.top_p!r} and {self.repetition_penalty!r}"
            )
        for token, bias in (self.logit_bias or {}).items():
            _number(f"logit_bias of token {token}", bias, -_BIAS, _BIAS, f"a number from -{_BIAS:g} to {_BIAS:g}")
        integer("seed", self.seed, MIN_SEED, MAX_SEED, optional=True)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})")
        if self.exactness is not None and self.exactness not in list(Exactness):
            raise InvalidRequest(f"exactness must be one of {', '.join(Exactness)}, got {self.exactness!r}")
        if any(not s for s in self.stops):
            raise InvalidRequest("stop strings must not be empty")
        if self.structured_outputs is not None:
            _structured(self.structured_outputs)
            if self.ignore_eos:
                raise InvalidRequest(
                    "structured_outputs end with the end-of-text token, so ignore_eos has no meaning beside them; "
                    "leave one of them out"
                )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def grade(self) -> Exactness:
        if self.exactness is not None:
            return Exactness(self.exactness)
        return Exactness.DISTRIBUTION if self.seed is None else Exactness.TRAJECTORY

    def law(self, vocab_size: int, bad_words: Sequence[tuple[int, ...]], end_ids: Sequence[int]) -> SamplingLaw:
        """The sampling law of this request. ``end_ids`` are what ``min_tokens`` holds back."""
        for token in (*(self.logit_bias or {}), *(self.stop_token_ids or ())):
            if not 0 <= int(token) < vocab_size:
                raise InvalidRequest(f"token id {token} is outside the vocabulary of {vocab_size}")
        return SamplingLaw(
            temperature=float(self.temperature),
            top_k=max(0, self.top_k),
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            repetition_penalty=float(self.repetition_penalty),
            logit_bias=tuple((int(k), float(v)) for k, v in (self.logit_bias or {}).items()),
            bad_words=tuple(bad_words),
            min_tokens=self.min_tokens,
            end_ids=tuple(end_ids),
        )


_STRUCTURED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "json": ("a JSON schema: a dict, True, or its JSON", lambda v: isinstance(v, Mapping | str | bool)),
    "json_object": ("True", lambda v: v is True),
    "regex": ("a pattern that is not empty", lambda v: isinstance(v, str) and v != ""),
    "choice": ("a list of texts that is not empty", lambda v: _texts(v) and len(v) > 0),
    "grammar": ("a grammar in Lark or GBNF", lambda v: isinstance(v, str) and v.strip() != ""),
}


def _texts(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(text, str) for text in value)


def _structured(value: Any) -> None:
    """Exactly one of the known keys, with a value of its kind; keys that hold None are not there."""
    known = f"one of {', '.join(_STRUCTURED)}, and for JSON also 'whitespace'"
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"structured_outputs must be a mapping with {known}, got {value!r}")
    given = {key: item for key, item in value.items() if item is not None}
    kinds = [key for key in given if key != "whitespace"]
    if len(kinds) != 1 or kinds[0] not in _STRUCTURED:
        raise InvalidRequest(f"structured_outputs must have {known}, got {sorted(map(str, given)) or 'nothing'}")
    expected, fits = _STRUCTURED[kinds[0]]
    if not fits(given[kinds[0]]):
        raise InvalidRequest(f"structured_outputs[{kinds[0]!r}] must be {expected}, got {given[kinds[0]]!r}")
    if "whitespace" in given and (not kinds[0].startswith("json") or not isinstance(given["whitespace"], bool)):
        raise InvalidRequest("structured_outputs['whitespace'] goes with 'json' or 'json_object', and is True or False")


def _number(name: str, value: Any, low: float, high: float, expected: str, above: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high or (above and value == low):
        raise InvalidRequest(f"{name} must be {expected}, got {value!r}")

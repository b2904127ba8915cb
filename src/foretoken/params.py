"""Sampling parameters of a request, and their validation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import MAX_SEED, MIN_SEED, integer, is_integer, is_number, shown
from foretoken.core.errors import InvalidRequest
from foretoken.core.verdict import KINDS, Exactness

if TYPE_CHECKING:
    from foretoken.core.sampling import SamplingLaw

MAX_COUNT = 2**31 - 1  # counts of the compiled kernels have 32 bits
MAX_N = 16384  # as in vLLM
MAX_SPECULATIVE_TOKENS = 4096
SMALLEST, LARGEST = 1e-6, 1e6  # float32 loses all precision beyond them
MAX_SALT = 1024  # characters of a cache_salt


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter by name, as in vLLM.

    Args:
        lora_name: Name of the adapter.
        lora_int_id: vLLM's number of the adapter, which is not used.
        lora_path: Folder or hub name of the adapter. It is loaded if no adapter has this name. Empty for one that is
            loaded already.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters by vLLM's names and meanings. The following differ from vLLM or are not in vLLM.

    Args:
        seed: A signed 64-bit integer. Every seed, -1 included, selects a different output. None derives a seed from the
            engine's seed and the request's number. The first of ``n`` completions equals that of ``n=1``.
        logprobs: Number of most probable tokens to return at every position of the output.
        prompt_logprobs: Number of most probable tokens to return at every position of the prompt.
        structured_outputs: As in vLLM, one of {"json": schema}, {"json_object": True}, {"regex": pattern},
            {"choice": [texts]} and {"grammar": Lark or GBNF}. The distribution is the model's, restricted at every
            token to those that continue a matching text. JSON has the whitespace of json.dumps; with
            "whitespace": True beside it, any.
        speculative_tokens: Draft tokens per step. None takes the engine's, 0 is plain decoding.
        speculative_method: Name of the loaded method that drafts. None takes the engine's default, "none" is plain
            decoding.
        exactness: ``"distribution"``, ``"trajectory"`` or ``"lossy-typical"``. None is trajectory when ``seed`` is set,
            else distribution.
        prediction: A text (or its token ids) that the output is expected to resemble, like OpenAI's predicted outputs.
            The methods "prediction" and mixtures with it draft from it. It never changes the distribution.
        cache_salt: Requests share the prefix cache and the proposers' stores only with requests of the same salt, as in
            vLLM. Requests without a salt share among themselves.
        lora: Name of the loaded LoRA adapter that computes the request. None is the model without an adapter.
        acceptance_stop: Kinds of improbable runs of acceptance that end the output, with the kind as its finish reason:
            ``"repetition"`` (512 draft tokens accepted in a row, in text that repeats itself), ``"all_accepted"`` (the
            same in other text), ``"none_accepted"`` (256 rejected drafts in a row). The length then depends on drafts.
        explain: Whether every piece has the target's and the draft's probability of each draft token. See
            ``StreamPiece``.

    Raises:
        InvalidRequest: A value is not valid.
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
    allowed_token_ids: Sequence[int] | None = None
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
    cache_salt: str | None = None
    lora: str | None = None
    acceptance_stop: Sequence[str] | None = None
    explain: bool = False

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _by_token_id(self.logit_bias))
        for name, (lowest, highest, expected) in _NUMBERS.items():
            _number(name, getattr(self, name), lowest, highest, expected)
        for name, (low, high) in _INTEGERS.items():
            integer(name, getattr(self, name), low, high)
        for name, (low, high) in _OPTIONAL_INTEGERS.items():
            integer(name, getattr(self, name), low, high, optional=True)
        if 0.0 < self.temperature < SMALLEST:
            raise InvalidRequest(
                f"temperature must be 0 (greedy) or at least {SMALLEST:g}, got {self.temperature!r}",
                param="temperature",
            )
        for token, bias in (self.logit_bias or {}).items():
            _number(
                f"logit_bias of token {token}", bias, -LARGEST, LARGEST, f"a number from -{LARGEST:g} to {LARGEST:g}"
            )
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})", param="min_tokens"
            )
        if self.exactness is not None and self.exactness not in list(Exactness):
            raise InvalidRequest(
                f"exactness must be one of {', '.join(Exactness)}, got {shown(self.exactness)}", param="exactness"
            )
        salt = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT):
            got = f"one of {len(salt)}" if isinstance(salt, str) else shown(salt)
            raise InvalidRequest(
                f"cache_salt must be a string of 1 to {MAX_SALT} characters or None, got {got}", param="cache_salt"
            )
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise InvalidRequest("allowed_token_ids must not be empty; omit it to allow all", param="allowed_token_ids")
        if any(not s for s in self.stops):
            raise InvalidRequest("stop strings must not be empty", param="stop")
        if self.structured_outputs is not None:
            _structured(self.structured_outputs)
            if self.ignore_eos:
                raise InvalidRequest(
                    "structured_outputs end with the end-of-text token, so ignore_eos has no meaning beside them; "
                    "leave one of them out",
                    param="ignore_eos",
                )

    def _check_kinds(self) -> None:
        """Raises InvalidRequest for a value of the wrong type."""
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "explain"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be True or False, got {shown(getattr(self, name))}", param=name)
        for name, (fits, expected) in _KINDS.items():
            value = getattr(self, name)
            if value is not None and not fits(value):
                raise InvalidRequest(f"{name} must be {expected}, got {shown(value)}", param=name)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def grade(self) -> Exactness:
        """The grade of exactness: ``exactness``, or its default."""
        if self.exactness is not None:
            return Exactness(self.exactness)
        return Exactness.DISTRIBUTION if self.seed is None else Exactness.TRAJECTORY

    def law(self, vocab_size: int, bad_words: Sequence[tuple[int, ...]], end_ids: Sequence[int]) -> SamplingLaw:
        """Returns the sampling law of this request.

        Args:
            vocab_size: Number of logits of the model.
            bad_words: Tokens of the bad words.
            end_ids: Ids that ``min_tokens`` forbids.

        Raises:
            InvalidRequest: A token id in one of the parameters is outside the vocabulary.
        """
        from foretoken.core.restrictions import BadWords
        from foretoken.core.sampling import SamplingLaw  # imports torch, which validation does not need

        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise InvalidRequest(
                        f"{name} holds token id {token}, which is outside the vocabulary of {vocab_size}", param=name
                    )
        return SamplingLaw(
            temperature=float(self.temperature),
            top_k=max(0, self.top_k),
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            repetition_penalty=float(self.repetition_penalty),
            logit_bias=tuple((token, float(bias)) for token, bias in (self.logit_bias or {}).items()),
            allowed_ids=tuple(sorted(set(self.allowed_token_ids or ()))),
            bad_words=BadWords.of(bad_words),
            min_tokens=self.min_tokens,
            end_ids=tuple(end_ids),
        )


_NUMBERS = {
    "temperature": (0.0, LARGEST, f"a number from 0 (greedy) to {LARGEST:g}"),
    "top_p": (SMALLEST, 1.0, f"a number from {SMALLEST:g} to 1"),
    "min_p": (0.0, 1.0, "a number from 0 to 1"),
    "presence_penalty": (-2.0, 2.0, "a number from -2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "a number from -2 to 2"),
    "repetition_penalty": (SMALLEST, LARGEST, f"a number from {SMALLEST:g} to {LARGEST:g}"),
}
_DECIMAL = re.compile("[0-9]{1,10}")
_INTEGERS = {"n": (1, MAX_N), "max_tokens": (1, MAX_COUNT), "min_tokens": (0, MAX_COUNT), "top_k": (-1, MAX_COUNT)}
_OPTIONAL_INTEGERS = {
    "seed": (MIN_SEED, MAX_SEED),
    "logprobs": (0, MAX_COUNT),
    "prompt_logprobs": (0, MAX_COUNT),
    "speculative_tokens": (0, MAX_SPECULATIVE_TOKENS),
}


def _texts(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(text, str) for text in value)


def _ids(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return listed and all(is_integer(token) and 0 <= token <= MAX_COUNT for token in value)


def _by_token_id(bias: Any) -> dict[int, Any]:
    """Returns ``bias`` with integer keys. Decimal strings are accepted, because JSON has only string keys."""
    if isinstance(bias, Mapping):
        texts = {key for key in bias if isinstance(key, str) and _DECIMAL.fullmatch(key)}
        by_id = {int(key) if key in texts else key: value for key, value in bias.items()}
        if _ids(list(by_id)) and len(by_id) == len(bias):
            return by_id
    raise InvalidRequest(
        f"logit_bias must be a mapping of token ids, each given once, to numbers, got {shown(bias)}", param="logit_bias"
    )


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "stop": (lambda v: isinstance(v, str) or _texts(v), "a text or a list of texts"),
    "bad_words": (_texts, "a list of texts"),
    "allowed_token_ids": (_ids, "a list of token ids, which are integers of at least 0"),
    "stop_token_ids": (_ids, "a list of token ids, which are integers of at least 0"),
    "prediction": (lambda v: isinstance(v, Sequence) and not isinstance(v, bytes), "a text or a list of token ids"),
    "speculative_method": (lambda v: isinstance(v, str), "the name of a method that was loaded"),
    "lora": (lambda v: isinstance(v, str), "the name of an adapter that was loaded"),
    "acceptance_stop": (lambda v: _texts(v) and {*v} <= {*KINDS}, f"a list of {', '.join(map(repr, KINDS))}"),
}
_STRUCTURED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "json": ("a JSON schema: a dict, True, or its JSON", lambda v: isinstance(v, Mapping | str | bool)),
    "json_object": ("True", lambda v: v is True),
    "regex": ("a pattern that is not empty", lambda v: isinstance(v, str) and v != ""),
    "choice": ("a list of texts that is not empty", lambda v: _texts(v) and len(v) > 0),
    "grammar": ("a grammar in Lark or GBNF", lambda v: isinstance(v, str) and v.strip() != ""),
}


def _structured(value: Any) -> None:
    """Checks for exactly one of the known keys, with a valid value. Keys whose value is None are ignored."""
    expected_keys = f"one of {', '.join(_STRUCTURED)}, and for JSON also 'whitespace'"
    if not isinstance(value, Mapping):
        raise InvalidRequest(
            f"structured_outputs must be a mapping with {expected_keys}, got {shown(value)}", param="structured_outputs"
        )
    items = {key: item for key, item in value.items() if item is not None}
    kinds = [key for key in items if key != "whitespace"]
    if len(kinds) != 1 or kinds[0] not in _STRUCTURED:
        raise InvalidRequest(
            f"structured_outputs must have {expected_keys}, got {shown(list(items)) if items else 'nothing'}",
            param="structured_outputs",
        )
    expected, fits = _STRUCTURED[kinds[0]]
    if not fits(items[kinds[0]]):
        raise InvalidRequest(
            f"structured_outputs[{kinds[0]!r}] must be {expected}, got {shown(items[kinds[0]])}",
            param="structured_outputs",
        )
    if "whitespace" in items and (not kinds[0].startswith("json") or not isinstance(items["whitespace"], bool)):
        raise InvalidRequest(
            "structured_outputs['whitespace'] goes with 'json' or 'json_object', and is True or False",
            param="structured_outputs",
        )


def _number(name: str, value: Any, low: float, high: float, expected: str) -> None:
    if not is_number(value) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be {expected}, got {shown(value)}", param=name.partition(" ")[0])

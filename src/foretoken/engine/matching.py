"""Grammars by llguidance: compiling them, and following one text through them.

This module must not import torch, so that ``grammar_process`` starts quickly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from foretoken.core.errors import InvalidRequest
from foretoken.core.schema import subschemas

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# By default llguidance forces the tokenizer's own tokenization of forced text. The last such option takes effect.
_FREE = '\n%llguidance {"no_forcing": true}\n'
_FIXED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Formats that llguidance has patterns for. All others are annotations, as JSON Schema says; pydantic writes "path".
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
_CANNOT_GO_ON = "structured_outputs cannot be followed any further"
# Several times llguidance's defaults, which a schema of 2,000 objects exceeds.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 100_000,
    "step_max_items": 1_000_000,
    "initial_lexer_fuel": 10_000_000,
    "step_lexer_fuel": 2_000_000,
    "max_grammar_size": 5_000_000,
}


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """A tokenizer's vocabulary for llguidance."""

    tokens: list[bytes]  # bytes of each id; the last entry is an additional id for the end of a text
    special: list[int]  # ids that are allowed only where a grammar names them

    @property
    def end(self) -> int:
        return len(self.tokens) - 1

    def load(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(_Wrapper(self.tokens, self.special, self.end))  # type: ignore[arg-type]  # any such object


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """The attributes that llguidance reads of a tokenizer."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: bytes | str) -> list[int]:
        return []  # llguidance calls this only to tokenize forced text, and no text is forced


class GrammarFollower(Protocol):
    """Follows one text through a grammar."""

    def reset(self) -> None: ...

    def extend(self, tokens: Sequence[int]) -> None: ...

    def allowed(self, path: Sequence[int]) -> bytes | None:
        """Returns the tokens allowed after the text and ``path``, one bit each; None if the grammar refuses them.

        Raises InvalidRequest if llguidance reached one of its limits.
        """
        ...


class CompiledGrammar(Protocol):
    """A compiled grammar that any number of texts can follow."""

    @property
    def memory_bytes(self) -> int: ...

    @property
    def alive(self) -> bool:
        """Whether texts can still follow it."""
        ...

    def follower(self) -> GrammarFollower:
        """Returns a follower for one text."""
        ...


class LocalGrammar:
    """A grammar compiled in this process. Raises InvalidRequest if the grammar is not valid, or no text matches it.

    Args:
        tokenizer: llguidance's tokenizer.
        spec: As ``SamplingParams.structured_outputs``, except "choice".
    """

    alive = True

    def __init__(self, tokenizer: LLTokenizer, spec: Mapping[str, Any]) -> None:
        from llguidance import LLMatcher, LLParserLimits

        lark = lark_of(spec)
        try:
            self.memory_bytes = 100 * len(lark.encode())
        except UnicodeError as error:
            raise refusal(f"structured_outputs hold text that is no Unicode: {error}") from error
        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        self._matcher = LLMatcher(tokenizer, lark, log_level=0, limits=limits)
        if not self._matcher.is_error():
            self._matcher.compute_bitmask()  # fails if no text matches
        check(self._matcher, "structured_outputs cannot be followed")

    def follower(self) -> MatcherFollower:
        return MatcherFollower(self._matcher)


class MatcherFollower:
    """A ``GrammarFollower`` with a matcher of llguidance in this process.

    The matcher consumes the text alone, and each path is followed on a copy of it: in llguidance 1.9, a rollback or a
    refused token can change later masks.
    compiled: A matcher that has consumed nothing. It is copied.
    """

    def __init__(self, compiled: LLMatcher) -> None:
        self._compiled = compiled
        self._text: list[int] = []
        self._restart()

    def reset(self) -> None:
        self._text.clear()
        self._restart()

    def extend(self, tokens: Sequence[int]) -> None:
        self._text += tokens

    def allowed(self, path: Sequence[int]) -> bytes | None:
        """See ``GrammarFollower``. After an error the matcher cannot be used any more, so it is replaced."""
        try:
            if not self._catch_up():
                return None
            matcher = self._matcher.deep_copy() if path else self._matcher
            if not _accepts(matcher, path):
                return None
            mask = matcher.compute_bitmask()
            check(matcher, _CANNOT_GO_ON)
        except InvalidRequest:
            self._restart()
            raise
        return mask

    def _restart(self) -> None:
        self._matcher = self._compiled.deep_copy()
        self._taken = 0  # tokens of the text that the matcher has consumed
        self._refused = False  # whether it refused one of them

    def _catch_up(self) -> bool:
        """Moves the matcher to the end of the text. Returns whether the grammar accepts it."""
        if self._taken < len(self._text) and not self._refused:
            self._refused = not _accepts(self._matcher, self._text[self._taken :])
            self._taken = len(self._text)
        return not self._refused


def _accepts(matcher: LLMatcher, tokens: Sequence[int]) -> bool:
    """Returns whether the grammar accepts all tokens. Raises InvalidRequest where llguidance reached a limit."""
    taken = matcher.try_consume_tokens(list(tokens)) if tokens else 0
    check(matcher, _CANNOT_GO_ON)
    return taken == len(tokens)


def refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="structured_outputs")


def check(matcher: LLMatcher, failure: str) -> None:
    """Raises InvalidRequest with ``failure`` and llguidance's message if the matcher is in its error state."""
    if not matcher.is_error():
        return
    message = re.split(r"\n\s*(?:\d+ \| |<state>|<backtrace>)", matcher.get_error())[0].strip()
    if message.startswith("panic"):
        message = "the grammar is too large for llguidance; make it smaller"
    elif "recursion limit exceeded" in message:
        message = "the schema is nested too deeply; use definitions and $ref"
    elif not message or message.startswith("NoExtension"):
        message = "no token of the model can come"
    raise refusal(f"{failure}: {message}")


def lark_of(spec: Mapping[str, Any]) -> str:
    """Returns a restriction in llguidance's dialect of Lark. Raises InvalidRequest."""
    import llguidance

    whitespace = bool(spec.get("whitespace"))
    if spec.get("json") is not None:
        return _json(spec["json"], whitespace)
    if spec.get("json_object") is not None:
        return _json({"type": "object"}, whitespace)
    if spec.get("regex") is not None:
        return f"start: /{llguidance.regex_to_lark(spec['regex'], use_ascii='')}/{_FREE}"
    try:
        return llguidance.gbnf_to_lark.any_to_lark(spec["grammar"]) + _FREE
    except RecursionError as error:
        raise refusal("structured_outputs['grammar'] is nested too deeply; write it with more rules") from error
    except Exception as error:  # llguidance raises its own class, and others on unexpected input
        raise refusal(f"structured_outputs['grammar'] is neither Lark nor GBNF: {error}") from error


def _json(schema: Any, whitespace: bool) -> str:
    """Returns the Lark grammar of a JSON schema, which is given as an object or as JSON. Raises InvalidRequest."""
    try:
        written = schema if isinstance(schema, str) else json.dumps(schema)
        schema = json.loads(written)  # of an object a copy, which is changed below
    except (ValueError, TypeError, RecursionError) as error:
        raise refusal(f"structured_outputs['json'] is not JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise refusal(f"structured_outputs['json'] must be a JSON schema: an object or true, got {written[:200]}")
    for _, part in subschemas(schema):
        part.pop("uniqueItems", None)  # no grammar can compare items
        if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
            del part["format"]
    own = schema.get("x-guidance")
    options = {"whitespace_flexible": True} if whitespace else _FIXED
    schema = schema | {"x-guidance": (own if isinstance(own, dict) else {}) | options}
    return f"start: %json {json.dumps(schema, ensure_ascii=False)}{_FREE}"

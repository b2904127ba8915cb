"""Grammars by llguidance: how they are compiled, and how one text follows them.

Nothing here imports torch, so that ``grammar_process`` starts quickly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from foretoken.core.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# llguidance's own choice would be the tokenizer's spelling of whatever text is forced; the last word on it counts.
_FREE = '\n%llguidance {"no_forcing": true}\n'
_FIXED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Several times llguidance's own, which a schema of 2,000 objects exceeds.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 100_000, "step_max_items": 1_000_000, "initial_lexer_fuel": 10_000_000,
    "step_lexer_fuel": 2_000_000, "max_grammar_size": 5_000_000,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What llguidance has to know of a tokenizer.

    Args:
        tokens: bytes by id, and last of all an id for the end of a text.
        special: ids that come only where a grammar names them.
    """

    tokens: list[bytes]
    special: list[int]

    @property
    def end(self) -> int:
        """The id for the end of a text."""
        return len(self.tokens) - 1

    def load(self) -> LLTokenizer:
        """Returns the same as llguidance's object."""
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
        return []  # it is asked for the tokenizer's own spelling of forced texts only, and no text is forced


class Follower(Protocol):
    """Follows one text through a grammar."""

    def reset(self) -> None:
        """Forget the text."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """The text went on with ``tokens``."""
        ...

    def allowed(self, path: Sequence[int]) -> bytes | None:
        """Returns the tokens that can come after the text and ``path``, one bit each, or None where they do not fit.

        Raises InvalidRequest where llguidance cannot tell.
        """
        ...


class CompiledGrammar(Protocol):
    """A grammar that any number of texts can follow."""

    @property
    def memory_bytes(self) -> int:
        """An estimate."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it can still be followed."""
        ...

    def follower(self) -> Follower:
        """Returns a follower for one text."""
        ...


class LocalGrammar:
    """A grammar compiled in this process. Raises InvalidRequest.

    wanted: as ``SamplingParams.structured_outputs``, but a choice.
    """

    alive = True

    def __init__(self, tokenizer: LLTokenizer, wanted: Mapping[str, Any]) -> None:
        from llguidance import LLMatcher, LLParserLimits

        lark = lark_of(wanted)
        try:
            self.memory_bytes = 100 * len(lark.encode())
        except UnicodeError as error:
            raise InvalidRequest(f"structured_outputs hold text that is no Unicode: {error}") from error
        limits = LLParserLimits(**_LIMITS, verbose_errors=False)
        self._matcher = LLMatcher(tokenizer, lark, log_level=0, limits=limits)
        if not self._matcher.is_error():
            self._matcher.compute_bitmask()  # fails if no text at all fits
        check(self._matcher, "structured_outputs cannot be followed")

    def follower(self) -> MatcherFollower:
        """See ``CompiledGrammar``."""
        return MatcherFollower(self._matcher)


class MatcherFollower:
    """A ``Follower`` with a matcher of llguidance's in this process."""

    def __init__(self, compiled: LLMatcher) -> None:
        self._compiled = compiled
        self._text: list[int] = []
        self._restart()

    def reset(self) -> None:
        """See ``Follower``."""
        self._text.clear()
        self._restart()

    def extend(self, tokens: Sequence[int]) -> None:
        """See ``Follower``."""
        self._text += tokens

    def allowed(self, path: Sequence[int]) -> bytes | None:
        """See ``Follower``. After an error the matcher is of no more use, so another one takes its place."""
        try:
            if not (self._catch_up() and self._walk(tuple(path))):
                return None
            mask = self._matcher.compute_bitmask()
            check(self._matcher, "structured_outputs cannot be followed any further")
        except InvalidRequest:
            self._restart()
            raise
        return mask

    def _restart(self) -> None:
        self._matcher = self._compiled.deep_copy()
        self._taken = 0  # tokens of the text that the matcher has seen
        self._refused = False  # whether it refused one of them
        self._path: tuple[int, ...] = ()  # what it has seen beyond the text

    def _catch_up(self) -> bool:
        """Go to the end of the text. Returns whether the grammar accepts it."""
        if self._taken < len(self._text) and not self._refused:
            self._walk(())
            fresh = self._text[self._taken :]
            self._refused = self._consume(fresh) < len(fresh)
            self._taken = len(self._text)
        return not self._refused

    def _walk(self, path: tuple[int, ...]) -> bool:
        """Go to ``path`` from wherever the last one led. Returns whether the grammar accepts it."""
        same = 0
        while same < min(len(path), len(self._path)) and path[same] == self._path[same]:
            same += 1
        self._matcher.rollback(len(self._path) - same)
        self._path = path[:same]
        if self._consume(path[same:]) == len(path) - same:
            self._path = path
            return True
        self._restart()  # what a refused token leaves in the matcher can show in later masks
        return False

    def _consume(self, tokens: Sequence[int]) -> int:
        """Returns how many of ``tokens`` the grammar accepts; a limit of llguidance's is an error, not a refusal."""
        taken = self._matcher.try_consume_tokens(list(tokens))
        check(self._matcher, "structured_outputs cannot be followed any further")
        return taken


def check(matcher: LLMatcher, failure: str) -> None:
    """Raises InvalidRequest with ``failure`` and llguidance's words if the matcher is in its error state."""
    if not matcher.is_error():
        return
    said = re.split(r"\n\s*(?:\d+ \| |<state>|<backtrace>)", matcher.get_error())[0].strip()
    if said.startswith("panic"):
        said = "the grammar is too large for llguidance; make it smaller"
    elif "recursion limit exceeded" in said:
        said = "the schema is nested too deeply; use definitions and $ref"
    elif not said or said.startswith("NoExtension"):
        said = "no token of the model can come"
    raise InvalidRequest(f"{failure}: {said}")


def lark_of(wanted: Mapping[str, Any]) -> str:
    """Returns ``wanted`` in llguidance's dialect of Lark. Raises InvalidRequest."""
    import llguidance

    whitespace = bool(wanted.get("whitespace"))
    if wanted.get("json") is not None:
        return _json(wanted["json"], whitespace)
    if wanted.get("json_object") is not None:
        return _json({"type": "object"}, whitespace)
    if wanted.get("regex") is not None:
        return f"start: /{llguidance.regex_to_lark(wanted['regex'], use_ascii='')}/{_FREE}"
    try:
        return llguidance.gbnf_to_lark.any_to_lark(wanted["grammar"]) + _FREE
    except RecursionError as error:
        raise InvalidRequest("structured_outputs['grammar'] is nested too deeply; write it with more rules") from error
    except Exception as error:  # it raises a class of its own, and others where it stumbles
        raise InvalidRequest(f"structured_outputs['grammar'] is neither Lark nor GBNF: {error}") from error


def _json(schema: Any, whitespace: bool) -> str:
    """schema: what JSON can hold, or JSON of it."""
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        written = json.dumps(schema)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs['json'] is not JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest(
            f"structured_outputs['json'] must be a JSON schema: an object or true, got {written[:200]}"
        )
    own = schema.get("x-guidance")
    options = {"whitespace_flexible": True} if whitespace else _FIXED
    schema = schema | {"x-guidance": (own if isinstance(own, dict) else {}) | options}
    return f"start: %json {json.dumps(schema, ensure_ascii=False)}{_FREE}"

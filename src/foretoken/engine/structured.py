"""Structured outputs: what a request asks for as a grammar over the model's tokens, by llguidance.

A token may come if the text with it is still the beginning of a text of the grammar, and an end id (EOS or one of
stop_token_ids) only where the text is complete. All spellings of a text count, not only the tokenizer's own.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import History
from foretoken.propose.pieces import Pieces

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT = 64  # compiled grammars that wait to be asked for again
# llguidance's own choice would be the tokenizer's spelling of whatever text is forced; the last word on it counts.
_FREE = '\n%llguidance {"no_forcing": true}\n'
_FIXED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Grammars over one tokenizer; what was compiled is kept for the next who asks for the same.

    vocab_size: the width of the model's rows; ids that the tokenizer does not know are never allowed.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def new(self, wanted: Mapping[str, Any], ends: Collection[int]) -> MatcherGrammar:
        """What one sequence follows. ends: ids that end a text. Raises InvalidRequest, with llguidance's own words.

        wanted: as ``SamplingParams.structured_outputs``.
        """
        if not ends:
            raise InvalidRequest(
                "structured_outputs need a token to end with, and this model names no end-of-text token; "
                "name one in stop_token_ids"
            )
        try:
            lark = lark_of(wanted)
            lark.encode()
        except UnicodeError as error:
            raise InvalidRequest(f"structured_outputs hold text that is no Unicode: {error}") from error
        if lark not in self._compiled:
            self._compiled[lark] = self._compile(lark)
        self._compiled.move_to_end(lark)
        while len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return MatcherGrammar(self._compiled[lark].deep_copy(), self._vocab_size, self._end, sorted(ends))

    def _compile(self, lark: str) -> LLMatcher:
        from llguidance import LLMatcher

        if self._vocabulary is None:
            self._vocabulary = _vocabulary(Pieces(self._tokenizer))
        matcher = LLMatcher(self._vocabulary, lark, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # fails if no text at all fits
        if matcher.is_error():
            raise InvalidRequest(f"structured_outputs cannot be followed: {_error(matcher)}")
        return matcher

    @property
    def _end(self) -> int:
        """The id that stands for the end of a text, behind the tokenizer's own."""
        assert self._vocabulary is not None
        return self._vocabulary.vocab_size - 1


class MatcherGrammar:
    """A ``Grammar`` of llguidance's, for one sequence. It follows the tokens as they grow, and each path from there.

    Masks are kept until the sequence grows: verification asks again for what the draft asked for.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, end: int, ends: Sequence[int]) -> None:
        """end: the matcher's id for the end of a text; ends: the model's, allowed where the matcher allows that."""
        self._matcher, self._vocab_size, self._end, self._ends = matcher, vocab_size, end, list(ends)
        self._tokens: Sequence[int] | None = None
        self._committed = 0  # generated tokens that the matcher has seen
        self._path: tuple[int, ...] = ()  # and what it has seen beyond them
        self._refused = False
        self._masks: dict[tuple[int, ...], Tensor | None] = {}
        self._bits = np.zeros((1, end // 32 + 1), dtype=np.int32)

    def allowed(self, history: History) -> Tensor | None:
        """See ``Grammar``."""
        self._follow(history)
        if history.path not in self._masks:
            # What the grammar refuses has probability 0 in the target's law at the node where it left the grammar, so
            # nothing below is ever emitted, and any law does. That holds for what follows an end as well.
            self._masks[history.path] = self._mask() if self._walk(history.path) else None
        return self._masks[history.path]

    def _follow(self, history: History) -> None:
        """See what was committed since."""
        generated = len(history.tokens) - history.prompt_length
        if history.tokens is not self._tokens or generated < self._committed:
            self._matcher.reset()
            self._tokens, self._committed, self._path, self._refused = history.tokens, 0, (), False
            self._masks.clear()
        if generated > self._committed:
            self._walk(())
            fresh = list(history.tokens[history.prompt_length + self._committed :])
            self._refused = self._refused or self._matcher.try_consume_tokens(fresh) < len(fresh)
            self._committed = generated
            self._masks.clear()

    def _walk(self, path: tuple[int, ...]) -> bool:
        """Go to ``path`` from wherever the last one led. -> whether the grammar lets it come"""
        if self._refused:
            return False
        same = 0
        while same < min(len(path), len(self._path)) and path[same] == self._path[same]:
            same += 1
        self._matcher.rollback(len(self._path) - same)
        taken = self._matcher.try_consume_tokens(list(path[same:]))
        self._path = path[: same + taken]
        return len(self._path) == len(path)

    def _mask(self) -> Tensor:
        """What may come where the matcher is, bool [V]."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits)
        flags = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little").view(np.bool_)
        known = min(self._end, self._vocab_size)
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[:known] = flags[:known]
        mask[self._ends] = flags[self._end]
        if self._matcher.is_error() or not mask.any():
            raise InvalidRequest(f"structured_outputs cannot be followed any further: {_error(self._matcher)}")
        return torch.from_numpy(mask)


def lark_of(wanted: Mapping[str, Any]) -> str:
    """``wanted`` in llguidance's dialect of Lark. Raises InvalidRequest."""
    try:
        import llguidance
    except ImportError as error:
        raise InvalidRequest("structured_outputs need llguidance; pip install 'foretoken[serve]'") from error
    whitespace = bool(wanted.get("whitespace"))
    if wanted.get("json") is not None:
        return _json(wanted["json"], whitespace)
    if wanted.get("json_object") is not None:
        return _json({"type": "object"}, whitespace)
    if wanted.get("regex") is not None:
        return f"start: /{llguidance.regex_to_lark(wanted['regex'], use_ascii='')}/{_FREE}"
    if wanted.get("choice") is not None:
        return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted["choice"]) + _FREE
    try:
        return llguidance.gbnf_to_lark.any_to_lark(wanted["grammar"]) + _FREE
    except Exception as error:  # it raises a class of its own, and others where it stumbles
        raise InvalidRequest(f"structured_outputs['grammar'] is neither Lark nor GBNF: {error}") from error


def _json(schema: Any, whitespace: bool) -> str:
    """schema: a dict, a bool, or JSON of either."""
    try:
        schema = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs['json'] is not JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest(
            f"structured_outputs['json'] must be a JSON schema: an object or true, got {json.dumps(schema)}"
        )
    own = schema.get("x-guidance")
    options = {"whitespace_flexible": True} if whitespace else _FIXED
    schema = schema | {"x-guidance": (own if isinstance(own, dict) else {}) | options}
    return f"start: %json {json.dumps(schema, ensure_ascii=False)}{_FREE}"


def _error(matcher: LLMatcher) -> str:
    """What llguidance says, without the grammar as we wrote it and without its own state."""
    said = re.split(r"\n\s*(?:\d+ \| |<state>)", matcher.get_error())[0].strip()
    return "no token of the model can come" if not said or said.startswith("NoExtension") else said


@dataclass
class _Spelling:
    """A tokenizer as llguidance reads one: bytes by id, and last of all an id for the end of a text."""

    tokens: list[bytes]
    special_token_ids: list[int]
    pieces: Pieces
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    @property
    def eos_token_id(self) -> int:
        return len(self.tokens) - 1

    def __call__(self, text: bytes | str) -> list[int]:
        return self.pieces.encode(text if isinstance(text, bytes) else text.encode())


def _vocabulary(pieces: Pieces) -> LLTokenizer:
    """The tokens of ``pieces``; special and meaningless ones come only where a grammar names them: <|name|>, <[id]>."""
    from llguidance import LLTokenizer

    special = [token for token, piece in enumerate(pieces.spelled) if not piece]
    tokens = [piece or b"" for piece in pieces.spelled]
    for token in special:
        tokens[token] = pieces.specials.get(token, f"<[{token}]>").encode()
    spelling = _Spelling([*tokens, b"<[end]>"], [*special, len(tokens)], pieces)
    return LLTokenizer(spelling)  # type: ignore[arg-type]  # it asks for these names, not for the class

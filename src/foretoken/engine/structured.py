"""Structured outputs: restrictions of a request, compiled to grammars over the model's tokens.

A token is allowed if the text with it is still a prefix of a text of the grammar. An end id (EOS or one of
stop_token_ids) is allowed only where the text is complete. All tokenizations of a text are allowed, not only the
tokenizer's own. Lists of texts are searched in sorted order.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.core.history import History
from foretoken.core.restrictions import Grammar
from foretoken.engine.grammar_process import GrammarLimits, GrammarServer
from foretoken.engine.matching import CompiledGrammar, GrammarFollower, GrammarVocabulary, LocalGrammar, refusal
from foretoken.propose.pieces import Pieces

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_CACHED_MASKS = 64  # cached masks of each list of texts


class TokenList:
    """A tokenizer's tokens in the order of their bytes.

    Args:
        spelled: Bytes of each id. Tokens without bytes, such as special tokens, are never part of a text.
        vocab_size: Number of logits of the model. Larger ids are omitted.
    """

    def __init__(self, spelled: Sequence[bytes | None], vocab_size: int) -> None:
        self.spelled, self.vocab_size = spelled[:vocab_size], vocab_size
        pairs = sorted((piece, token) for token, piece in enumerate(self.spelled) if piece)
        self.texts, self.ids = [piece for piece, _ in pairs], [token for _, token in pairs]

    def text(self, tokens: Sequence[int]) -> bytes | None:
        """Returns the bytes of ``tokens``; None if one of them has none."""
        pieces = [self.spelled[token] if token < len(self.spelled) else None for token in tokens]
        return b"".join(piece or b"" for piece in pieces) if all(pieces) else None


class Choices:
    """A ``Restriction`` to one of several texts. Raises InvalidRequest if no token begins one of them."""

    alive = True

    def __init__(self, texts: Collection[str], tokens: TokenList) -> None:
        self.tokens = tokens
        self._texts = sorted({text.encode() for text in texts})
        self._masks: OrderedDict[bytes, tuple[Tensor, bool] | None] = OrderedDict()
        beginning = self.after(b"")
        if beginning is None or not (beginning[1] or beginning[0].any()):
            raise refusal("structured_outputs cannot be followed: no token of the model can come")

    @property
    def memory_bytes(self) -> int:
        return sum(map(len, self._texts)) + 64 * len(self._texts) + _CACHED_MASKS * self.tokens.vocab_size

    def follow(self, ends: Collection[int]) -> ChoiceGrammar:
        """Returns a grammar for one sequence. ends: ids that end a text."""
        return ChoiceGrammar(self, ends)

    def after(self, text: bytes) -> tuple[Tensor, bool] | None:
        """Returns the tokens allowed after ``text``, bool [V], and whether ``text`` is complete.

        Returns None if none of the texts begins with ``text``.
        """
        if text not in self._masks:
            self._masks[text] = self._search(text)
            if len(self._masks) > _CACHED_MASKS:
                self._masks.popitem(last=False)
        return self._masks[text]

    def _search(self, text: bytes) -> tuple[Tensor, bool] | None:
        depth = len(text)
        start = bisect_left(self._texts, text)
        end = bisect_right(self._texts, text, start, key=lambda choice: choice[:depth])
        if start == end:
            return None
        mask = torch.zeros(self.tokens.vocab_size, dtype=torch.bool)
        mask[self._beginnings(start, end, depth)] = True
        return mask, len(self._texts[start]) == depth

    def _beginnings(self, start: int, end: int, depth: int) -> list[int]:
        """Returns the tokens that continue the texts from ``start`` to ``end`` after their first ``depth`` bytes.

        Both lists are sorted, so the texts and the tokens that continue with the same bytes are one range of each.
        """
        texts, tokens, ids = self._texts, self.tokens.texts, list[int]()
        ranges = [(start, end, 0, len(tokens), 0)]  # ranges of texts and tokens, and the number of bytes they share
        while ranges:
            start, end, first, last, shared = ranges.pop()
            while first < last and len(tokens[first]) == shared:
                ids.append(self.tokens.ids[first])
                first += 1
            start += len(texts[start]) == depth + shared
            in_text, in_token = itemgetter(depth + shared), itemgetter(shared)
            while start < end and first < last:
                byte = texts[start][depth + shared]
                stop = bisect_right(texts, byte, start, end, key=in_text)
                first = bisect_left(tokens, byte, first, last, key=in_token)
                after = bisect_right(tokens, byte, first, last, key=in_token)
                if first < after:
                    ranges.append((start, stop, first, after, shared + 1))
                start, first = stop, after
        return ids


class ChoiceGrammar:
    """A ``Grammar`` that allows one of the texts of ``choices``, then one of ``ends``."""

    def __init__(self, choices: Choices, ends: Collection[int]) -> None:
        self._choices, self._ends = choices, sorted(ends)

    def allowed(self, history: History) -> Tensor | None:
        """See ``Grammar``. Returns None after an end id, and after tokens that begin none of the texts."""
        text = self._choices.tokens.text((*history.tokens[history.prompt_length :], *history.path))
        after = None if text is None else self._choices.after(text)
        if after is None:
            return None
        mask = after[0].clone()
        mask[self._ends] = after[1]
        if not mask.any():
            raise refusal("structured_outputs cannot be followed any further: no token of the model can come")
        return mask


MAX_CHARACTERS = 2**24  # of a schema, a pattern, a grammar or all choices
_CACHED, _CACHED_BYTES = 64, 2**29  # limits of the cache of compiled grammars


class Restriction(Protocol):
    """A compiled restriction of a request's texts. Any number of sequences share it."""

    @property
    def memory_bytes(self) -> int: ...

    @property
    def alive(self) -> bool:
        """Whether sequences can still follow it."""
        ...

    def follow(self, ends: Collection[int]) -> Grammar:
        """Returns a grammar for one sequence. ends: ids that end a text."""
        ...


class Grammars:
    """Compiles grammars for one tokenizer and caches the latest ones. Thread-safe.

    Args:
        tokenizer: The model's tokenizer.
        vocab_size: Number of logits of the model. Ids that the tokenizer lacks are never allowed.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiled: OrderedDict[str, Restriction] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, spec: Mapping[str, Any]) -> Restriction:
        """Returns the restriction of ``SamplingParams.structured_outputs``. Raises InvalidRequest."""
        key = _written(spec)
        with self._lock:
            known = self._compiled.get(key)
        restriction = known if known is not None and known.alive else self._made(json.loads(key))
        with self._lock:
            self._compiled[key] = restriction
            self._compiled.move_to_end(key)
            while len(self._compiled) > _CACHED or (len(self._compiled) > 1 and self._memory_bytes > _CACHED_BYTES):
                self._compiled.popitem(last=False)
        return restriction

    def new(self, spec: Mapping[str, Any], ends: Collection[int]) -> Grammar:
        """Returns a grammar for one sequence. ends: ids that end a text. Raises InvalidRequest."""
        return self.compile(spec).follow(ends)

    def close(self) -> None:
        with self._lock:
            self._compiled.clear()

    def _made(self, spec: Mapping[str, Any]) -> Restriction:
        if spec.get("choice") is not None:
            return Choices(spec["choice"], self._token_list)
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise refusal("structured_outputs need llguidance; pip install 'foretoken[serve]'") from error
        return GrammarRestriction(self._compile(spec), self.vocabulary.end, self._vocab_size)

    def _compile(self, spec: Mapping[str, Any]) -> CompiledGrammar:
        return LocalGrammar(self._llguidance, spec)

    @property
    def _memory_bytes(self) -> int:
        return sum(restriction.memory_bytes for restriction in self._compiled.values())

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self.tokenizer)

    @cached_property
    def _token_list(self) -> TokenList:
        return TokenList(self._pieces.spelled, self._vocab_size)

    @cached_property
    def vocabulary(self) -> GrammarVocabulary:
        """The tokens for llguidance. Special tokens are allowed only where a grammar names them: <|name|>, <[id]>."""
        special = [token for token, piece in enumerate(self._pieces.spelled) if not piece]
        tokens = [piece or b"" for piece in self._pieces.spelled]
        for token in special:
            tokens[token] = self._pieces.specials.get(token, f"<[{token}]>").encode()
        return GrammarVocabulary([*tokens, b"<[end]>"], [*special, len(tokens)])

    @cached_property
    def _llguidance(self) -> LLTokenizer:
        return self.vocabulary.load()


class IsolatedGrammars(Grammars):
    """Like ``Grammars``, with every grammar of llguidance in separate processes. See ``grammar_process``."""

    def __init__(self, tokenizer: Any, vocab_size: int, limits: GrammarLimits | None = None) -> None:
        super().__init__(tokenizer, vocab_size)
        self._server = GrammarServer(lambda: self.vocabulary, limits)

    def close(self) -> None:
        """Clears the cache and ends the processes."""
        super().close()
        self._server.close()

    def _compile(self, spec: Mapping[str, Any]) -> CompiledGrammar:
        return self._server.compile(spec)


class GrammarRestriction:
    """A ``Restriction`` compiled by llguidance.

    Args:
        grammar: The compiled grammar.
        end: llguidance's id for the end of a text, after the tokenizer's ids.
        vocab_size: See ``Grammars``.
    """

    def __init__(self, grammar: CompiledGrammar, end: int, vocab_size: int) -> None:
        self._grammar, self._end, self._vocab_size = grammar, end, vocab_size

    @property
    def memory_bytes(self) -> int:
        return self._grammar.memory_bytes

    @property
    def alive(self) -> bool:
        return self._grammar.alive

    def follow(self, ends: Collection[int]) -> MatcherGrammar:
        return MatcherGrammar(self._grammar.follower(), self._vocab_size, self._end, sorted(ends))


class MatcherGrammar:
    """A ``Grammar`` of llguidance for one sequence. It follows the committed tokens, and draft paths from there.

    Masks and errors are cached until the sequence grows, because verification needs the masks that drafting computed.

    Args:
        follower: Follows the text through the grammar.
        vocab_size: Number of logits of the model.
        end: The follower's id for the end of a text.
        ends: The model's ids that end a text, allowed where the follower allows ``end``.
    """

    def __init__(self, follower: GrammarFollower, vocab_size: int, end: int, ends: Sequence[int]) -> None:
        self._follower, self._vocab_size, self._end, self._ends = follower, vocab_size, end, list(ends)
        self._tokens: Sequence[int] | None = None
        self._committed = 0  # generated tokens that the follower has seen
        self._masks: dict[tuple[int, ...], Tensor | str | None] = {}  # a str is an error message
        self._last_bits, self._last_mask = b"", torch.empty(0)  # most positions inside a string have equal masks

    def allowed(self, history: History) -> Tensor | None:
        self._follow(history)
        if history.path not in self._masks:
            try:
                # A refused token has probability 0 in the target's distribution where the path left the grammar, so
                # nothing below it is ever emitted and any mask will do. The same holds for tokens after an end id.
                flags = self._follower.allowed(history.path)
                self._masks[history.path] = None if flags is None else self._mask(flags)
            except InvalidRequest as error:
                self._masks[history.path] = str(error)
        known = self._masks[history.path]
        if isinstance(known, str):
            raise refusal(known)
        return known

    def _follow(self, history: History) -> None:
        """Passes tokens that were committed since the last call to the follower."""
        generated = len(history.tokens) - history.prompt_length
        if history.tokens is not self._tokens or generated < self._committed:
            self._follower.reset()
            self._tokens, self._committed = history.tokens, 0
            self._masks.clear()
        if generated > self._committed:
            self._follower.extend(list(history.tokens[history.prompt_length + self._committed :]))
            self._committed = generated
            self._masks.clear()

    def _mask(self, bits: bytes) -> Tensor:
        """Returns the allowed tokens, bool [V]."""
        if bits == self._last_bits:
            return self._last_mask
        flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)
        known = min(self._end, self._vocab_size)
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[:known] = flags[:known]
        mask[self._ends] = flags[self._end]
        if not mask.any():
            raise refusal(
                "structured_outputs cannot be followed any further: no token of the model can come; check that the "
                "grammar can end, and that the tokenizer has tokens for its characters"
            )
        self._last_bits, self._last_mask = bits, torch.from_numpy(mask)
        return self._last_mask


def _written(spec: Mapping[str, Any]) -> str:
    """Returns ``spec`` as JSON. Raises InvalidRequest."""
    kind = next(iter(spec), "")
    try:
        written = json.dumps(dict(spec), ensure_ascii=False)
        written.encode()
    except UnicodeError as error:
        raise refusal(f"structured_outputs hold text that is no Unicode: {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise refusal(f"structured_outputs[{kind!r}] is not JSON: {error}") from error
    if len(written) > MAX_CHARACTERS:
        raise refusal(
            f"structured_outputs[{kind!r}] has {len(written)} characters; at most {MAX_CHARACTERS} are accepted"
        )
    return written

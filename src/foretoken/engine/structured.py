"""Structured outputs: what a request asks for as a grammar over the model's tokens.

A token may come if the text with it is still the beginning of a text of the grammar, and an end id (EOS or one of
stop_token_ids) only where the text is complete. All spellings of a text count, not only the tokenizer's own.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.core.grammar import Grammar
from foretoken.core.sampling import History
from foretoken.engine.choices import Choices, TokenList
from foretoken.engine.grammar_process import GrammarLimits, GrammarServer
from foretoken.engine.matching import CompiledGrammar, Follower, LocalGrammar, Vocabulary
from foretoken.propose.pieces import Pieces

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_CHARACTERS = 2**24  # of a schema, a pattern, a grammar or all choices
_CACHED, _CACHED_BYTES = 64, 2**29  # compiled grammars that are kept for further requests


class Restriction(Protocol):
    """What the texts of a request have to be, compiled. Any number of sequences share it."""

    @property
    def memory_bytes(self) -> int:
        """An estimate."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it can still be followed."""
        ...

    def follow(self, ends: Collection[int]) -> Grammar:
        """Returns a grammar for one sequence. ends: ids that end a text."""
        ...


class Grammars:
    """Grammars over one tokenizer; the latest compiled ones are kept. Safe for threads.

    vocab_size: the width of the model's rows; ids that the tokenizer does not know are never allowed.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiled: OrderedDict[str, Restriction] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, wanted: Mapping[str, Any]) -> Restriction:
        """Returns ``wanted`` compiled, as ``SamplingParams.structured_outputs``. Raises InvalidRequest."""
        key = _written(wanted)
        with self._lock:
            known = self._compiled.get(key)
        restriction = known if known is not None and known.alive else self._made(json.loads(key))
        with self._lock:
            self._compiled[key] = restriction
            self._compiled.move_to_end(key)
            while len(self._compiled) > _CACHED or (len(self._compiled) > 1 and self._memory_bytes > _CACHED_BYTES):
                self._compiled.popitem(last=False)
        return restriction

    def new(self, wanted: Mapping[str, Any], ends: Collection[int]) -> Grammar:
        """Returns what one sequence follows. ends: ids that end a text. Raises InvalidRequest."""
        return self.compile(wanted).follow(ends)

    def close(self) -> None:
        """Forget what was compiled."""
        with self._lock:
            self._compiled.clear()

    def _made(self, wanted: Mapping[str, Any]) -> Restriction:
        if wanted.get("choice") is not None:
            return Choices(wanted["choice"], self._token_list)
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise InvalidRequest("structured_outputs need llguidance; pip install 'foretoken[serve]'") from error
        return GrammarRestriction(self._compile(wanted), self._vocabulary.end, self._vocab_size)

    def _compile(self, wanted: Mapping[str, Any]) -> CompiledGrammar:
        return LocalGrammar(self._llguidance, wanted)

    @property
    def _memory_bytes(self) -> int:
        return sum(restriction.memory_bytes for restriction in self._compiled.values())

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self._tokenizer)

    @cached_property
    def _token_list(self) -> TokenList:
        return TokenList(self._pieces.spelled, self._vocab_size)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        """Special and meaningless tokens come only where a grammar names them: <|name|>, <[id]>."""
        special = [token for token, piece in enumerate(self._pieces.spelled) if not piece]
        tokens = [piece or b"" for piece in self._pieces.spelled]
        for token in special:
            tokens[token] = self._pieces.specials.get(token, f"<[{token}]>").encode()
        return Vocabulary([*tokens, b"<[end]>"], [*special, len(tokens)])

    @cached_property
    def _llguidance(self) -> LLTokenizer:
        return self._vocabulary.load()


class IsolatedGrammars(Grammars):
    """The same, with every grammar of llguidance's in processes of its own: see ``grammar_process``."""

    def __init__(self, tokenizer: Any, vocab_size: int, limits: GrammarLimits | None = None) -> None:
        super().__init__(tokenizer, vocab_size)
        self._server = GrammarServer(lambda: self._vocabulary, limits)

    def close(self) -> None:
        """Forget what was compiled, and end the processes."""
        super().close()
        self._server.close()

    def _compile(self, wanted: Mapping[str, Any]) -> CompiledGrammar:
        return self._server.compile(wanted)


class GrammarRestriction:
    """A grammar of llguidance's, compiled.

    end: llguidance's id for the end of a text, behind the tokenizer's own. vocab_size: see ``Grammars``.
    """

    def __init__(self, grammar: CompiledGrammar, end: int, vocab_size: int) -> None:
        self._grammar, self._end, self._vocab_size = grammar, end, vocab_size

    @property
    def memory_bytes(self) -> int:
        """See ``Restriction``."""
        return self._grammar.memory_bytes

    @property
    def alive(self) -> bool:
        """See ``Restriction``."""
        return self._grammar.alive

    def follow(self, ends: Collection[int]) -> MatcherGrammar:
        """See ``Restriction``."""
        return MatcherGrammar(self._grammar.follower(), self._vocab_size, self._end, sorted(ends))


class MatcherGrammar:
    """A ``Grammar`` of llguidance's, for one sequence. It follows the tokens as they grow, and each path from there.

    Masks are kept until the sequence grows: verification asks again for what the draft asked for. So are errors.
    """

    def __init__(self, follower: Follower, vocab_size: int, end: int, ends: Sequence[int]) -> None:
        """end: the follower's id for the end of a text; ends: the model's, allowed where the follower allows that."""
        self._follower, self._vocab_size, self._end, self._ends = follower, vocab_size, end, list(ends)
        self._tokens: Sequence[int] | None = None
        self._committed = 0  # generated tokens that the follower knows of
        self._masks: dict[tuple[int, ...], Tensor | str | None] = {}  # texts are errors

    def allowed(self, history: History) -> Tensor | None:
        """See ``Grammar``."""
        self._follow(history)
        if history.path not in self._masks:
            try:
                # What the grammar refuses has probability 0 in the target's law at the node where it left the grammar,
                # so nothing below is ever emitted, and any law does. That holds for what follows an end as well.
                flags = self._follower.allowed(history.path)
                self._masks[history.path] = None if flags is None else self._mask(flags)
            except InvalidRequest as error:
                self._masks[history.path] = str(error)
        known = self._masks[history.path]
        if isinstance(known, str):
            raise InvalidRequest(known)
        return known

    def _follow(self, history: History) -> None:
        """See what was committed since."""
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
        """What may come, bool [V]."""
        flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)
        known = min(self._end, self._vocab_size)
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[:known] = flags[:known]
        mask[self._ends] = flags[self._end]
        if not mask.any():
            raise InvalidRequest(
                "structured_outputs cannot be followed any further: no token of the model can come; check that the "
                "grammar can end, and that the tokenizer has tokens for its characters"
            )
        return torch.from_numpy(mask)


def _written(wanted: Mapping[str, Any]) -> str:
    """Returns ``wanted`` as JSON. Raises InvalidRequest."""
    kind = next(iter(wanted), "")
    try:
        written = json.dumps(dict(wanted), ensure_ascii=False)
        written.encode()
    except UnicodeError as error:
        raise InvalidRequest(f"structured_outputs hold text that is no Unicode: {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs[{kind!r}] is not JSON: {error}") from error
    if len(written) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"structured_outputs[{kind!r}] has {len(written)} characters; at most {MAX_CHARACTERS} are taken"
        )
    return written

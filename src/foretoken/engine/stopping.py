"""Ends of sequences: EOS, stop ids, stop strings, length. Tested after every token, also inside a block.

Tokens end a sequence before the engine begins the next step. Their text may be read while a device computes that step.

Detokenization is incremental: whole characters only are emitted, also where they span several tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6  # prompt tokens that decide the spacing of the first new token


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class Detokenizer:
    """Decodes incrementally by the difference of two windows, which is correct for byte-level and sentencepiece.

    Args:
        tokenizer: Decodes token ids.
        prompt: Tokens of the prompt.
        skip_special_tokens: Whether special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._read = 0, len(self._ids)
        self._texts: dict[int, str] = {}  # of single tokens

    def push(self, token: int) -> str:
        """Returns the text that ``token`` completes; empty while a character is incomplete."""
        self._ids.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """Returns the remaining text after the last token: an incomplete character as U+FFFD."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._text_before()
        after = self._tokenizer.decode(self._ids[self._start :], skip_special_tokens=self._skip)
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not final):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _text_before(self) -> str:
        """Returns the text of the tokens before the new ones: usually one token, and texts repeat their tokens."""
        before = self._ids[self._start : self._read]
        text = self._texts.get(before[0]) if len(before) == 1 else None
        if text is None:
            text = self._tokenizer.decode(before, skip_special_tokens=self._skip)
            if len(before) == 1:
                self._texts[before[0]] = text
        return text


class Stopping(ABC):
    """Decides after each token whether the sequence ends.

    Attributes:
        tokens_left: Number of tokens that may still be emitted.
    """

    tokens_left: int

    @abstractmethod
    def push(self, token: int) -> str | None:
        """Returns the finish reason if a token ends the sequence, whatever its text, else None."""

    def read(self, token: int) -> str | None:
        """Returns the finish reason if the text of a token ends the sequence, or ``push`` did, else None.

        Called once for each token, after ``push``, in engines that run ahead after all tokens of the step.
        """
        return None

    def alarmed(self, kind: str) -> str | None:
        """Returns the finish reason if an improbable run of acceptance of this kind ends the sequence, else None."""
        return None


@dataclass
class Length(Stopping):
    """Stopping by token ids and length, for callers that do not need the text."""

    tokens_left: int  # number of tokens that may be emitted; the reason is then "length"
    ends: Collection[int] = ()  # ids that end the sequence, with the reason "stop"
    # number of tokens after which the sequence ends with the reason "stop", or None; unlike ``tokens_left`` it does not
    # bound drafts, so a recorded text is replayed like one whose end is not known
    stop_after: int | None = None

    def push(self, token: int) -> str | None:
        self.tokens_left -= 1
        if self.stop_after is not None:
            self.stop_after -= 1
        if token in self.ends or self.stop_after == 0:
            return "stop"
        return "length" if self.tokens_left == 0 else None


class TextStopping(Stopping):
    """Stopping by token ids, stop strings and length. It also holds the text.

    ``stop_reason`` is the stop string or stop id that matched, None for EOS and length, as in vLLM.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,  # turns tokens into text
        max_tokens: int,  # number of tokens after which the sequence ends
        min_tokens: int = 0,  # number of tokens before which stop strings are ignored
        eos_ids: Collection[int] = (),  # ids that end the sequence without a stop reason
        stop_ids: Collection[int] = (),  # ids that end the sequence and are its stop reason
        stops: Sequence[str] = (),  # stop strings
        include_stop: bool = False,  # whether the text keeps the stop string
        # kinds of improbable runs of acceptance that end the sequence; they are its finish reason
        acceptance_stop: Collection[str] = (),
    ) -> None:
        self._detokenizer = detokenizer
        self.tokens_left, self._max, self._min = max_tokens, max_tokens, min_tokens
        self._eos, self._ends = frozenset(eos_ids), frozenset((*eos_ids, *stop_ids))
        self._stops, self._include = tuple(stops), include_stop
        self._acceptance_stop = acceptance_stop
        self._longest = max(map(len, self._stops), default=0)
        self._count, self._taken = 0, 0  # tokens whose text was read, characters that were taken
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def push(self, token: int) -> str | None:
        self.tokens_left -= 1
        if token in self._ends:
            return "stop"
        return "length" if self.tokens_left <= 0 else None

    def read(self, token: int) -> str | None:
        self._count += 1
        known, ends = len(self.text), token in self._ends
        if not ends:
            self.text += self._detokenizer.push(token)
        if ends or self._count >= self._max:
            self.text += self._detokenizer.flush()
        if self._count >= self._min and self._cut(known):
            self.finish_reason = "stop"
        elif ends:
            self.finish_reason, self.stop_reason = "stop", None if token in self._eos else token
        elif self._count >= self._max:
            self.finish_reason = "length"
        return self.finish_reason

    def alarmed(self, kind: str) -> str | None:
        if kind in self._acceptance_stop and self._count >= self._min:
            known = len(self.text)
            self.text += self._detokenizer.flush()
            self.finish_reason = "stop" if self._cut(known) else kind
        return self.finish_reason

    def take(self) -> str:
        """Returns the text since the last call, without an ending that may still become a stop string."""
        end = len(self.text) if self.finish_reason else len(self.text) - self._held_back()
        piece, self._taken = self.text[self._taken : end], max(self._taken, end)
        return piece

    def _cut(self, known: int) -> bool:
        """Cuts the text at a stop string that ends after its first ``known`` characters. Returns whether there is one.

        If several match, the one that begins first is taken, and of these the shortest. The search starts where a match
        can begin at the earliest, so a stop string that was complete before ``min_tokens`` is ignored.
        """
        if not self._stops:
            return False
        matches = [(at, s) for s in self._stops if (at := self.text.find(s, max(0, known - len(s) + 1))) >= 0]
        if not matches:
            return False
        at, stop = min(matches, key=lambda match: (match[0], len(match[1])))
        self.text, self.stop_reason = self.text[: at + (len(stop) if self._include else 0)], stop
        return True

    def _held_back(self) -> int:
        """Returns the length of the longest ending of the text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self.text) - self._taken), 0, -1):
            tail = self.text[len(self.text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

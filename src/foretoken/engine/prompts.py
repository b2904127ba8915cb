"""What users give as a prompt: text, token ids, or vLLM's dicts of either, for decoders and for encoder-decoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from foretoken.core.checks import shown
from foretoken.core.errors import ContextLengthExceeded, InvalidRequest

Prompt = str | Sequence[int] | Mapping[str, Any]

_PLAIN = {"prompt", "prompt_token_ids"}
_BOTH = ("encoder_prompt", "decoder_prompt")


@dataclass(frozen=True, slots=True)
class Given:
    """A prompt that was read. text: as it was given, where it was text. tokens: what the model is to go on from.

    source: what its encoder reads, if it has one. That is the user's prompt then, and ``tokens`` the decoder's start.
    """

    text: str | None
    tokens: list[int]
    source: tuple[int, ...] = ()

    @property
    def ids(self) -> list[int]:
        """The user's prompt in tokens."""
        return list(self.source) or self.tokens


def check_characters(text: str, what: str) -> None:
    """Raises InvalidRequest for a text with half of a surrogate pair, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InvalidRequest(
            f"{what} holds {half!r} at position {error.start}, half of a surrogate pair; decode its bytes as UTF-8"
        ) from error


@dataclass(frozen=True)
class ContextLimit:
    """What is too long for a model, told before it is tokenized: that would take time, however it ends.

    tokens: of the model's context. phrase: what an error says before that number.
    """

    tokenizer: Any
    tokens: int
    phrase: str = "the model's context length is"

    @cached_property
    def characters(self) -> int:
        """Characters of the longest text that fits: as many of the longest token as the context holds."""
        return self.tokens * max(map(len, self.tokenizer.get_vocab()))

    def check(self, given: str | Sequence[int], what: str) -> None:
        """Raises ContextLengthExceeded for a text or ids that cannot fit. what: "the prompt", for the message."""
        if len(given) <= self.tokens:
            return
        if not isinstance(given, str):
            raise ContextLengthExceeded(f"{what} has {len(given)} tokens; {self.phrase} {self.tokens} tokens")
        if len(given) > self.characters:
            raise ContextLengthExceeded(
                f"{what} has {len(given)} characters; {self.phrase} {self.tokens} tokens, which are {self.characters} "
                "characters at most"
            )


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Tokenizes prompts and predictions.

    start: how the decoder of an encoder-decoder begins; empty for models without an encoder.
    limit, source_limit: refuse what is too long for the decoder and for the encoder; None refuses nothing.
    """

    tokenizer: Any
    vocab_size: int
    start: tuple[int, ...] = ()
    limit: ContextLimit | None = None
    source_limit: ContextLimit | None = None

    def read(self, prompt: Prompt) -> Given:
        """Raises InvalidRequest for an empty prompt, and for ids that are not the model's."""
        if not self.start:
            text, ids = self._one(prompt, self.limit)
            return Given(text, ids)
        beginning: Prompt | None = None
        if isinstance(prompt, Mapping) and not _PLAIN.issuperset(prompt):
            if _BOTH[0] not in prompt or not set(_BOTH).issuperset(prompt):
                raise InvalidRequest(
                    "a prompt dict of an encoder-decoder holds 'prompt', 'prompt_token_ids', or 'encoder_prompt' and, "
                    f"if wanted, 'decoder_prompt'; got {sorted(prompt)}"
                )
            beginning = prompt.get(_BOTH[1])
            prompt = prompt[_BOTH[0]]
        text, source = self._one(prompt, self.source_limit)
        return Given(text, self._beginning(beginning), tuple(source))

    def prediction(self, prediction: str | Sequence[int] | None) -> tuple[int, ...]:
        """Tokens of a text that the output may follow. Raises InvalidRequest."""
        if isinstance(prediction, str):
            prediction = self._text(prediction, "the prediction", self.limit, add_special_tokens=False)
        _check_length(prediction or (), "the prediction", self.limit)
        return tuple(self.checked(list(prediction or ()), "a prediction"))

    def rendered(self, text: str) -> list[int]:
        """Tokens of a conversation that a chat template wrote, special tokens included. Raises InvalidRequest."""
        limit = self.source_limit if self.start else self.limit
        return self._text(text, "the prompt", limit, add_special_tokens=False)

    def _text(self, text: str, what: str, limit: ContextLimit | None, **options: Any) -> list[int]:
        """Tokens of a text that is not too long, if the model has them all."""
        _check_length(text, what, limit)
        check_characters(text, what)
        return self.known(list(self.tokenizer(text, **options)["input_ids"]), what)

    def checked(self, ids: list[Any], what: str) -> list[int]:
        """``ids`` if the vocabulary has them all."""
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise InvalidRequest(
                    f"{what} of token ids holds {shown(token)}; integers from 0 to {self.vocab_size - 1} are expected"
                )
        return ids

    def known(self, ids: list[int], what: str) -> list[int]:
        """Returns the ids of a tokenized text. Raises InvalidRequest where the model does not have them all."""
        if max(ids, default=0) >= self.vocab_size:
            raise InvalidRequest(
                f"{what} has token {max(ids)} of the tokenizer, and the model's vocabulary ends at "
                f"{self.vocab_size - 1}; leave that token out, or use the tokenizer of this model"
            )
        return ids

    def _one(self, prompt: Prompt, limit: ContextLimit | None) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not _PLAIN.issuperset(prompt):
                raise InvalidRequest(f"a prompt dict holds either 'prompt' or 'prompt_token_ids', got {sorted(prompt)}")
            prompt = next(iter(prompt.values()))
        text = prompt if isinstance(prompt, str) else None
        if text is None:
            _check_length(prompt, "the prompt", limit)
            ids = self.checked(list(prompt), "a prompt")
        else:
            ids = self._text(text, "the prompt", limit)
        if text == "" or not ids:
            raise InvalidRequest("the prompt is empty; at least one token is needed to continue from")
        return text, ids

    def _beginning(self, prompt: Prompt | None) -> list[int]:
        """The decoder's start, and what it is made to begin with; ids that have the start are taken as they are."""
        if prompt is None:
            return list(self.start)
        if isinstance(prompt, str):
            return [*self.start, *self._text(prompt, "the decoder's prompt", self.limit, add_special_tokens=False)]
        _, ids = self._one(prompt, self.limit)
        return ids if ids[0] == self.start[0] else [*self.start, *ids]


def _check_length(given: Any, what: str, limit: ContextLimit | None) -> None:
    if limit is not None:
        limit.check(given, what)

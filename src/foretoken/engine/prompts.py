"""Prompts: text, token ids, or vLLM's dicts of either, for decoders and encoder-decoders; chat templates; bad words.

This module must not import torch, so that the server's side process starts quickly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import shown
from foretoken.core.errors import CONTEXT_LENGTH, ContextLengthExceeded, ForetokenError, InvalidRequest
from foretoken.core.files import read_text

if TYPE_CHECKING:
    from foretoken.core.restrictions import BadWords


def read_template(file: Path | None) -> str | None:
    """Returns the template in ``file``. Raises InvalidRequest if it is not a text file, or not valid Jinja."""
    if file is None:
        return None
    template = read_text("the chat template", file, "a Jinja file")
    check_template(template, f"the chat template {file}")
    return template


def check_template(template: str | Mapping[str, str] | None, name: str) -> None:
    """Raises InvalidRequest if a template is not valid Jinja.

    Args:
        template: a template, or several by their names.
        name: its name in the message.
    """
    from jinja2.exceptions import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template  # has the tags that transformers adds

    for text in template.values() if isinstance(template, Mapping) else [template]:
        if not isinstance(text, str):
            continue
        try:
            _compile_jinja_template(text)
        except TemplateSyntaxError as error:
            raise InvalidRequest(f"{name} is not valid Jinja (line {error.lineno}: {error.message})") from error


def own_template(tokenizer: Any, model: str, advice: str) -> Any:
    """Returns the chat template of a tokenizer, or several by their names.

    Args:
        model: the model's name in the message.
        advice: alternatives to this template, for the message.

    Raises:
        InvalidRequest: there is none, or it is not valid Jinja.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise InvalidRequest(f"{model} has no chat template; {advice}", param="messages")
    try:
        check_template(template, f"the chat template of {model}")
    except InvalidRequest as error:
        raise InvalidRequest(f"{error}; {advice}", param="messages") from error
    return template


def apply_template(tokenizer: Any, messages: Iterable[Any], **options: Any) -> Any:
    """Returns the result of the tokenizer's ``apply_chat_template``.

    Raises InvalidRequest if the template refuses the messages, or fails for them.
    """
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except ForetokenError:
        raise
    except Exception as error:  # templates raise exceptions of any class, some on purpose
        from jinja2.exceptions import TemplateRuntimeError, UndefinedError

        broken = isinstance(error, TemplateRuntimeError) and not isinstance(error, UndefinedError)
        problem = "the chat template is broken" if broken else "messages do not fit the chat template"
        raise InvalidRequest(f"{problem}: {error}", param="messages") from error


Prompt = str | Sequence[int] | Mapping[str, Any]

_PLAIN = {"prompt", "prompt_token_ids"}
_BOTH = ("encoder_prompt", "decoder_prompt")

MAX_BAD_WORDS = 100_000
MAX_BAD_WORD_TOKENS = 512
MAX_BAD_CHARACTERS = 2**24  # of all bad words together
_BATCH = 1024  # texts per tokenizer call


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt in tokens."""

    text: str | None  # the prompt's text, or None for token ids
    tokens: list[int]  # tokens that the model continues
    # encoder input of an encoder-decoder; it is then the user's prompt, and ``tokens`` the decoder's start
    source: tuple[int, ...] = ()

    @property
    def ids(self) -> list[int]:
        return list(self.source) or self.tokens


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns one prompt or many as a list. Raises InvalidRequest for none."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items: list[Any] = list(prompts)
    if not items:
        raise InvalidRequest("no prompts were given; pass a string, token ids, or a list of them")
    return [items] if all(isinstance(item, int) for item in items) else items


def check_characters(text: str, what: str) -> None:
    """Raises InvalidRequest for text with half of a surrogate pair, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InvalidRequest(
            f"{what} holds {half!r} at position {error.start}, half of a surrogate pair; decode its bytes as UTF-8",
            param=_field(what),
        ) from error


def _field(what: str) -> str:
    """Returns the parameter that an error about "the prompt", for instance, names: the last word."""
    return what.rpartition(" ")[2]


@dataclass(frozen=True)
class ContextLimit:
    """Refuses texts that exceed a model's context length before they are tokenized, which would take long."""

    tokenizer: Any  # the model's tokenizer
    tokens: int  # the context length
    phrase: str = CONTEXT_LENGTH  # words of the error message before that number

    @cached_property
    def characters(self) -> int:
        """Length of the longest text that fits: the context filled with the longest token."""
        return self.tokens * max(map(len, self.tokenizer.get_vocab()))

    def check(self, prompt: str | Sequence[int], what: str) -> None:
        """Raises ContextLengthExceeded for a text or ids that cannot fit. what: "the prompt", for the message."""
        if len(prompt) <= self.tokens:
            return
        if not isinstance(prompt, str):
            raise ContextLengthExceeded.of(what, len(prompt), self.tokens, self.phrase, param=_field(what))
        if len(prompt) > self.characters:
            raise ContextLengthExceeded(
                f"{what} has {len(prompt)} characters; {self.phrase} {self.tokens} tokens, which are {self.characters} "
                "characters at most",
                param=_field(what),
            )


@dataclass(frozen=True, slots=True)
class PromptTokenizer:
    """Tokenizes prompts, predictions and bad words."""

    tokenizer: Any  # the model's tokenizer
    vocab_size: int  # number of ids of the model
    start: tuple[int, ...] = ()  # first decoder tokens of an encoder-decoder; empty for models without an encoder
    limit: ContextLimit | None = None  # limit of the decoder, or None
    source_limit: ContextLimit | None = None  # limit of the encoder, or None

    def tokenize(self, prompt: Prompt, special: bool = True) -> TokenizedPrompt:
        """Returns a prompt in tokens; of an empty one the token for the beginning of a text (BOS).

        Raises InvalidRequest if an id is outside the vocabulary, or the prompt is empty and there is no BOS.
        special: Whether a text gets the tokenizer's special tokens, such as a beginning-of-text token.
        """
        if not self.start:
            text, ids = self._one(prompt, self.limit, special)
            return TokenizedPrompt(text, ids)
        beginning: Prompt | None = None
        if isinstance(prompt, Mapping) and not _PLAIN.issuperset(prompt):
            if _BOTH[0] not in prompt or not set(_BOTH).issuperset(prompt):
                raise InvalidRequest(
                    "a prompt dict of an encoder-decoder holds 'prompt', 'prompt_token_ids', or 'encoder_prompt' and "
                    f"optionally 'decoder_prompt'; got {sorted(prompt)}",
                    param="prompt",
                )
            beginning = prompt.get(_BOTH[1])
            prompt = prompt[_BOTH[0]]
        text, source = self._one(prompt, self.source_limit, special)
        return TokenizedPrompt(text, self._beginning(beginning), tuple(source))

    def prediction(self, prediction: str | Sequence[int] | None) -> tuple[int, ...]:
        """Returns the tokens of a predicted output. Raises InvalidRequest."""
        if isinstance(prediction, str):
            prediction = self._text(prediction, "the prediction", self.limit, add_special_tokens=False)
        _check_length(prediction or (), "the prediction", self.limit)
        return tuple(self.checked(list(prediction or ()), "a prediction"))

    def rendered(self, text: str, special: bool = False) -> list[int]:
        """Returns the tokens of a rendered chat template, which has its special tokens. Raises InvalidRequest.

        Args:
            text: The rendered template.
            special: Whether the tokenizer adds its special tokens all the same.
        """
        limit = self.source_limit if self.start else self.limit
        return self._text(text, "the prompt", limit, add_special_tokens=special)

    def text(self, text: str, what: str, special: bool) -> list[int]:
        """Returns the tokens of a text, with the tokenizer's special tokens if ``special``. Raises InvalidRequest."""
        return self._text(text, what, self.limit, add_special_tokens=special)

    def bad_words(self, words: Sequence[str]) -> BadWords:
        """Returns the tokens of each word at the start of a text and after a space. Raises InvalidRequest."""
        from foretoken.core.restrictions import BadWords  # takes numpy, which the help of commands need not load

        characters = sum(map(len, words))
        if len(words) > MAX_BAD_WORDS or characters > MAX_BAD_CHARACTERS:
            raise InvalidRequest(
                f"bad_words holds {len(words)} words of {characters} characters; at most {MAX_BAD_WORDS} words of "
                f"{MAX_BAD_CHARACTERS} characters are taken",
                param="bad_words",
            )
        if (blank := next((word for word in words if not word.strip()), None)) is not None:
            raise InvalidRequest(f"bad_words must not be empty or blank, got {shown(blank)}", param="bad_words")
        for word in words:
            check_characters(word, "bad_words")
        variants = [variant for word in words for variant in (word.lstrip(), " " + word.lstrip())]
        spellings: dict[tuple[int, ...], None] = {}
        for start in range(0, len(variants), _BATCH):
            batch = variants[start : start + _BATCH]
            for variant, ids in zip(batch, self.tokenizer(batch, add_special_tokens=False)["input_ids"], strict=True):
                if len(ids) > MAX_BAD_WORD_TOKENS:
                    raise InvalidRequest(
                        f"bad_words holds {shown(variant)}, which has {len(ids)} tokens; at most {MAX_BAD_WORD_TOKENS} "
                        "are taken",
                        param="bad_words",
                    )
                if ids and max(ids) < self.vocab_size:  # others cannot be generated
                    spellings[tuple(ids)] = None
        bad_words = BadWords(spellings)
        _ = bad_words.lookup  # built here rather than in the engine's thread
        return bad_words

    def _text(self, text: str, what: str, limit: ContextLimit | None, **options: Any) -> list[int]:
        """Returns the tokens of a text. Raises InvalidRequest if it is too long or has tokens the model lacks."""
        _check_length(text, what, limit)
        check_characters(text, what)
        return self.known(list(self.tokenizer(text, **options)["input_ids"]), what)

    def checked(self, ids: list[Any], what: str) -> list[int]:
        """Returns ``ids``. Raises InvalidRequest for an id outside the vocabulary."""
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise InvalidRequest(
                    f"{what} of token ids holds {shown(token)}; integers from 0 to {self.vocab_size - 1} are expected",
                    param=_field(what),
                )
        return ids

    def known(self, ids: list[int], what: str) -> list[int]:
        """Returns the ids of a tokenized text. Raises InvalidRequest for an id that the model lacks."""
        if max(ids, default=0) >= self.vocab_size:
            raise InvalidRequest(
                f"{what} has token {max(ids)} of the tokenizer, and the model's vocabulary ends at "
                f"{self.vocab_size - 1}; leave that token out, or use the tokenizer of this model",
                param=_field(what),
            )
        return ids

    def _one(self, prompt: Prompt, limit: ContextLimit | None, special: bool = True) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not _PLAIN.issuperset(prompt):
                raise InvalidRequest(
                    f"a prompt dict holds either 'prompt' or 'prompt_token_ids', got {sorted(prompt)}", param="prompt"
                )
            prompt = next(iter(prompt.values()))
        text = prompt if isinstance(prompt, str) else None
        if text is None:
            _check_length(prompt, "the prompt", limit)
            ids = self.checked(list(prompt), "a prompt")
        else:
            ids = self._text(text, "the prompt", limit, add_special_tokens=special)
        return text, ids or [self._bos()]

    def _bos(self) -> int:
        """Returns the token from which an empty prompt continues. Raises InvalidRequest if there is none."""
        bos: int | None = getattr(self.tokenizer, "bos_token_id", None)
        if bos is None:
            raise InvalidRequest(
                "the prompt is empty, and this model has no token for the beginning of a text (BOS) to continue from; "
                "give at least one token",
                param="prompt",
            )
        return self.known([bos], "the beginning of a text")[0]

    def _beginning(self, prompt: Prompt | None) -> list[int]:
        """Returns the decoder's first tokens: the start and the decoder prompt, which may begin with the start."""
        if prompt is None or prompt in ("", [], ()):
            return list(self.start)
        if isinstance(prompt, str):
            return [*self.start, *self._text(prompt, "the decoder's prompt", self.limit, add_special_tokens=False)]
        _, ids = self._one(prompt, self.limit)
        return ids if ids[0] == self.start[0] else [*self.start, *ids]


def _check_length(prompt: Any, what: str, limit: ContextLimit | None) -> None:
    if limit is not None:
        limit.check(prompt, what)

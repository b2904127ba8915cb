"""From a user's request to sequences the engine runs, and back to outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from foretoken.core.bad_words import BadWords
from foretoken.core.checks import shown
from foretoken.core.context import Context
from foretoken.core.errors import InvalidRequest
from foretoken.core.streams import SeedDomain, Streams, derived_seed
from foretoken.engine.detokenize import Detokenizer
from foretoken.engine.prompts import ContextLimit, Given, Prompt, PromptReader, check_characters
from foretoken.engine.sequence import Sequence as Running
from foretoken.engine.sequence import TokenLogprobs
from foretoken.engine.stopping import TextStopping
from foretoken.engine.structured import Grammars, Restriction
from foretoken.outputs import CompletionOutput, Logprob, RequestOutput
from foretoken.params import SamplingParams

PromptLogprobs = tuple[dict[int, Logprob] | None, ...]

MAX_BAD_WORDS = 100_000
MAX_BAD_WORD_TOKENS = 512
MAX_BAD_CHARACTERS = 2**24  # of all bad words together
_BATCH = 1024  # texts that are tokenised at once


@dataclass(frozen=True, slots=True)
class Restrictions:
    """What takes long to make of a request's parameters. Its prompts and completions share it."""

    bad_words: BadWords
    structured: Restriction | None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with its parameters; ``members`` are its n sequences' identifiers and stopping records.

    prompt_ids: the user's prompt, which an encoder reads where there is one.
    """

    id: int
    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    members: tuple[int, ...]
    stoppings: tuple[TextStopping, ...]

    def completion(self, index: int, running: Running, tokenizer: Any) -> CompletionOutput:
        """The finished sequence as the user sees it."""
        stopping, context = self.stoppings[index], running.context
        logprobs = tuple(logprob_entries(recorded, tokenizer) for recorded in running.recorded)
        return CompletionOutput(
            index=index,
            text=stopping.text,
            token_ids=tuple(context.tokens[context.prompt_length :]),
            finish_reason=running.finish_reason,
            stop_reason=stopping.stop_reason,
            logprobs=None if running.wanted.logprobs is None else logprobs,
            stats=running.counts.freeze(),
            exactness=str(context.exactness),
        )

    def output(self, completions: Sequence[CompletionOutput], of_prompt: PromptLogprobs | None = None) -> RequestOutput:
        return RequestOutput(self.id, self.prompt, self.prompt_ids, tuple(completions), of_prompt)


class RequestBuilder:
    """Tokenises prompts and gives every sequence its law, its random numbers and its end."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], seed: int, methods: Sequence[str] = (),
        start: Sequence[int] = (), max_length: int | None = None, source_length: int = 0,
    ) -> None:  # fmt: skip
        """methods: what a request may name as its ``speculative_method``. start: see ``PromptReader``.

        max_length: the model's, in tokens; longer texts end there with the reason "length". None: there is no limit.
        source_length: what its encoder reads at most, in tokens; 0 without an encoder.
        """
        self.tokenizer, self._vocab_size, self._seed = tokenizer, vocab_size, seed
        limit = None if max_length is None else ContextLimit(tokenizer, max_length)
        source_limit = ContextLimit(tokenizer, source_length, "the encoder reads at most") if source_length else None
        self._reader = PromptReader(tokenizer, vocab_size, tuple(start), limit, source_limit)
        self._methods, self._max_length = tuple(methods), max_length
        self._eos = tuple(token for token in eos_ids if 0 <= token < vocab_size)
        self.grammars = Grammars(tokenizer, vocab_size)
        self._requests, self._sequences = count(), count()  # a server builds requests in several threads

    @property
    def start(self) -> tuple[int, ...]:
        """How the decoder of an encoder-decoder begins; empty for models without an encoder."""
        return self._reader.start

    def restrictions(self, params: SamplingParams) -> Restrictions:
        """Tokenise bad words and compile structured outputs, for any number of prompts. Safe for threads."""
        structured = params.structured_outputs
        return Restrictions(
            self._bad_words(params.bad_words or ()), None if structured is None else self.grammars.compile(structured)
        )

    def build(
        self, prompt: Prompt, params: SamplingParams, restrictions: Restrictions | None = None
    ) -> tuple[Request, list[Context]]:
        """A request and one context for each of its ``n`` completions.

        Args:
            restrictions: those of ``params``, where they are made already.
        """
        given = self.read(prompt)
        if given.source and params.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs: an encoder reads the prompt whole and gives its tokens no probabilities; leave it out"
            )
        if params.speculative_method is not None and params.speculative_method not in self._methods:
            raise InvalidRequest(
                f"speculative_method {shown(params.speculative_method)} is not loaded; "
                f"loaded: {', '.join(self._methods)}"
            )
        eos = () if params.ignore_eos else self._eos
        stop_ids = tuple(params.stop_token_ids or ())
        ends = (*eos, *stop_ids)
        if params.structured_outputs is not None and not ends:
            raise InvalidRequest(
                "structured_outputs need a token to end with, and this model names no end-of-text token; "
                "name one in stop_token_ids"
            )
        restrictions = restrictions or self.restrictions(params)
        law, structured = params.law(self._vocab_size, restrictions.bad_words, ends), restrictions.structured
        laws = [replace(law, grammar=None if structured is None else structured.follow(ends)) for _ in range(params.n)]
        prediction = self.prediction(params.prediction)
        number = next(self._requests)
        contexts, stoppings = [], []
        for index in range(params.n):
            contexts.append(
                Context(
                    id=next(self._sequences),
                    tokens=list(given.tokens),
                    prompt_length=len(given.tokens),
                    law=laws[index],
                    streams=Streams(self._seed_of(params.seed, number, index)),
                    exactness=params.grade,
                    depth=params.speculative_tokens,
                    prediction=prediction,
                    method=params.speculative_method,
                    source=given.source,
                    cache_salt=params.cache_salt,
                )
            )
            stoppings.append(self._stopping(given.tokens, params, eos, stop_ids))
        request = Request(
            number, given.text, tuple(given.ids), params, tuple(c.id for c in contexts), tuple(stoppings)
        )  # fmt: skip
        return request, contexts

    def read(self, prompt: Prompt) -> Given:
        """Text (where there is one) and tokens of a prompt."""
        return self._reader.read(prompt)

    def prediction(self, prediction: str | Sequence[int] | None) -> tuple[int, ...]:
        """Tokens of a text that the output may follow. Raises InvalidRequest."""
        return self._reader.prediction(prediction)

    def rendered(self, text: str) -> list[int]:
        """Tokens of a conversation that a chat template wrote. Raises InvalidRequest."""
        return self._reader.rendered(text)

    def _seed_of(self, seed: int | None, number: int, index: int) -> int:
        """The seed of completion ``index`` of request ``number``, which has the user's ``seed`` or none."""
        if seed is None:
            return derived_seed(SeedDomain.REQUEST, self._seed, number, index)
        return seed if index == 0 else derived_seed(SeedDomain.COMPLETION, seed, index)

    def _stopping(
        self, ids: Sequence[int], params: SamplingParams, eos: Sequence[int], stop_ids: Sequence[int]
    ) -> TextStopping:
        left = params.max_tokens if self._max_length is None else self._max_length - len(ids)
        return TextStopping(
            Detokenizer(self.tokenizer, ids, params.skip_special_tokens),
            min(params.max_tokens, left),
            params.min_tokens,
            eos,
            stop_ids,
            params.stops,
            params.include_stop_str_in_output,
        )

    def _bad_words(self, words: Sequence[str]) -> BadWords:
        """Each word as it is tokenised at the start of a text and after a space."""
        characters = sum(map(len, words))
        if len(words) > MAX_BAD_WORDS or characters > MAX_BAD_CHARACTERS:
            raise InvalidRequest(
                f"bad_words holds {len(words)} words of {characters} characters; at most {MAX_BAD_WORDS} words of "
                f"{MAX_BAD_CHARACTERS} characters are taken"
            )
        if (blank := next((word for word in words if not word.strip()), None)) is not None:
            raise InvalidRequest(f"bad_words must not be empty or blank, got {shown(blank)}")
        for word in words:
            check_characters(word, "bad_words")
        variants = [variant for word in words for variant in (word.lstrip(), " " + word.lstrip())]
        spelled: dict[tuple[int, ...], None] = {}
        for start in range(0, len(variants), _BATCH):
            batch = variants[start : start + _BATCH]
            for variant, ids in zip(batch, self.tokenizer(batch, add_special_tokens=False)["input_ids"], strict=True):
                if len(ids) > MAX_BAD_WORD_TOKENS:
                    raise InvalidRequest(
                        f"bad_words holds {shown(variant)}, which has {len(ids)} tokens; at most {MAX_BAD_WORD_TOKENS} "
                        "are taken"
                    )
                if ids and max(ids) < self._vocab_size:  # others cannot be generated
                    spelled[tuple(ids)] = None
        made = BadWords(spelled)
        _ = made.lookup  # built here rather than in the engine's thread
        return made


def prompt_logprobs(sequence: Running, tokenizer: Any) -> PromptLogprobs | None:
    """By token of the prompt, None for the first, which nothing comes before; None at all where not asked for."""
    if sequence.wanted.prompt_logprobs is None:
        return None
    return (None, *(logprob_entries(recorded, tokenizer) for recorded in sequence.of_prompt))


def logprob_entries(recorded: TokenLogprobs, tokenizer: Any) -> dict[int, Logprob]:
    """The likeliest tokens and the one that came, by token id."""
    entries = {
        token: Logprob(value, rank, tokenizer.decode([token]))
        for rank, (token, value) in enumerate(recorded.top, start=1)
    }
    entries.setdefault(recorded.token, Logprob(recorded.logprob, recorded.rank, tokenizer.decode([recorded.token])))
    return entries

"""From a user's request to sequences the engine runs, and back to outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from foretoken.core.checks import shown
from foretoken.core.context import Context
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import SeedDomain, Streams, derived_seed
from foretoken.engine.detokenize import Detokenizer
from foretoken.engine.prompts import ContextLimit, Given, Prompt, PromptReader, check_characters
from foretoken.engine.sequence import Sequence as Running
from foretoken.engine.sequence import TokenLogprobs
from foretoken.engine.stopping import TextStopping
from foretoken.engine.structured import Grammars
from foretoken.outputs import CompletionOutput, Logprob, RequestOutput
from foretoken.params import SamplingParams

PromptLogprobs = tuple[dict[int, Logprob] | None, ...]


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
        limit = None if max_length is None else ContextLimit(tokenizer, max(max_length, source_length))
        self._reader = PromptReader(tokenizer, vocab_size, tuple(start), limit)
        self._methods, self._max_length = tuple(methods), max_length
        self._eos = tuple(token for token in eos_ids if 0 <= token < vocab_size)
        self._grammars = Grammars(tokenizer, vocab_size)
        self._requests, self._sequences = count(), count()  # a server builds requests in several threads

    @property
    def start(self) -> tuple[int, ...]:
        """How the decoder of an encoder-decoder begins; empty for models without an encoder."""
        return self._reader.start

    def build(self, prompt: Prompt, params: SamplingParams) -> tuple[Request, list[Context]]:
        """A request and one context for each of its ``n`` completions."""
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
        law = params.law(self._vocab_size, self._bad_words(params.bad_words or ()), ends)
        laws = [self._restricted(law, params.structured_outputs, ends) for _ in range(params.n)]
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

    def _restricted(self, law: SamplingLaw, wanted: Mapping[str, Any] | None, ends: Sequence[int]) -> SamplingLaw:
        """``law`` for one sequence: a grammar remembers where its own sequence is."""
        return law if wanted is None else replace(law, grammar=self._grammars.new(wanted, ends))

    def _bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Each word as it is tokenised at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if not word.strip():
                raise InvalidRequest(f"bad_words must not be empty or blank, got {shown(word)}")
            check_characters(word, "bad_words")
            for variant in (word.lstrip(), " " + word.lstrip()):
                found[tuple(self.tokenizer.encode(variant, add_special_tokens=False))] = None
        return [word for word in found if word and max(word) < self._vocab_size]  # others cannot be generated


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

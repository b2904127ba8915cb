"""Turns a user's request into sequences of the engine, and their steps into outputs and pieces of them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from foretoken.core.checks import shown
from foretoken.core.context import Context
from foretoken.core.errors import ENCODER_LENGTH, InvalidRequest
from foretoken.core.restrictions import BadWords
from foretoken.core.step import StepOutput
from foretoken.core.streams import SeedDomain, Streams, derived_seed
from foretoken.engine.loop import Engine
from foretoken.engine.prompts import ContextLimit, Prompt, PromptTokenizer, TokenizedPrompt
from foretoken.engine.sequence import OutputOptions, TokenLogprobs
from foretoken.engine.sequence import Sequence as Running
from foretoken.engine.stopping import Detokenizer, TextStopping
from foretoken.engine.structured import Grammars, IsolatedGrammars, Restriction
from foretoken.outputs import CompletionOutput, Logprob, RequestOutput, StreamPiece
from foretoken.params import SamplingParams
from foretoken.propose.methods import NONE

MAX_TEXTS = 2**15  # decoded tokens that are kept for each tokenizer
_TEXTS: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()

PromptLogprobs = tuple[dict[int, Logprob] | None, ...]


@dataclass(frozen=True, slots=True)
class Restrictions:
    """Tokenized bad words and the compiled grammar of a request, shared by its prompts and completions."""

    bad_words: BadWords
    structured: Restriction | None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with its parameters."""

    id: int  # number of the request
    prompt: str | None  # the prompt's text, or None for token ids
    prompt_ids: tuple[int, ...]  # the prompt's tokens; they are the encoder's input where there is one
    params: SamplingParams  # sampling parameters
    members: tuple[int, ...]  # identifiers of its n sequences
    stoppings: tuple[TextStopping, ...]  # stopping of each sequence

    def completion(self, index: int, running: Running, tokenizer: Any) -> CompletionOutput:
        """Returns the output of a finished sequence."""
        stopping, context = self.stoppings[index], running.context
        logprobs = tuple(logprob_entries(recorded, tokenizer) for recorded in running.recorded)
        return CompletionOutput(
            index=index,
            text=stopping.text,
            token_ids=tuple(context.tokens[context.prompt_length :]),
            finish_reason=running.finish_reason,
            stop_reason=stopping.stop_reason,
            logprobs=None if running.options.logprobs is None else logprobs,
            stats=running.counts.freeze(),
            exactness=str(context.exactness),
        )

    def output(
        self, completions: Sequence[CompletionOutput], prompt_logprobs: PromptLogprobs | None = None
    ) -> RequestOutput:
        return RequestOutput(self.id, self.prompt, self.prompt_ids, tuple(completions), prompt_logprobs)


class RequestBuilder:
    """Builds requests: tokenizes prompts and gives every sequence its law, random numbers and stopping."""

    def __init__(
        self,
        tokenizer: Any,  # the model's tokenizer
        vocab_size: int,  # number of logits of the model
        eos_ids: Sequence[int],  # ids that end a text
        seed: int,  # seed of requests without a seed
        methods: Sequence[str] = (),  # values that a request may give as ``speculative_method``
        start: Sequence[int] = (),  # see ``PromptTokenizer``
        # context length; longer texts end there with the reason "length"; None is no limit
        max_length: int | None = None,
        source_length: int = 0,  # maximum length of the encoder's input; 0 without an encoder
        # whether to compile grammars in processes of their own; see ``IsolatedGrammars``
        isolate_grammars: bool = False,
        adapter_key: Callable[[str], str] = str,  # see ``LoadedAdapters.key``
    ) -> None:
        self.tokenizer, self._vocab_size, self._seed = tokenizer, vocab_size, seed
        limit = None if max_length is None else ContextLimit(tokenizer, max_length)
        source_limit = ContextLimit(tokenizer, source_length, ENCODER_LENGTH) if source_length else None
        self.prompt_tokenizer = PromptTokenizer(tokenizer, vocab_size, tuple(start), limit, source_limit)
        self._methods, self._max_length, self._adapter_key = tuple(methods), max_length, adapter_key
        self._eos = tuple(token for token in eos_ids if 0 <= token < vocab_size)
        self.grammars = (IsolatedGrammars if isolate_grammars else Grammars)(tokenizer, vocab_size)
        self._requests, self._sequences = count(), count()  # a server builds requests in several threads

    @property
    def start(self) -> tuple[int, ...]:
        """First decoder tokens of an encoder-decoder; empty for models without an encoder."""
        return self.prompt_tokenizer.start

    def restrictions(self, params: SamplingParams, bad_words: BadWords | None = None) -> Restrictions:
        """Tokenizes bad words and compiles structured outputs, for any number of prompts. Thread-safe.

        Args:
            params: Sampling parameters.
            bad_words: The tokens of the bad words, if already computed.
        """
        structured = params.structured_outputs
        return Restrictions(
            self.prompt_tokenizer.bad_words(params.bad_words or ()) if bad_words is None else bad_words,
            None if structured is None else self.grammars.compile(structured),
        )

    def build(
        self, prompt: Prompt, params: SamplingParams, restrictions: Restrictions | None = None
    ) -> tuple[Request, list[Context]]:
        """Returns a request and one context for each of its ``n`` completions.

        Args:
            prompt: Text, token ids, or a dict of either.
            params: Sampling parameters.
            restrictions: Result of ``restrictions(params)``, if already computed.

        Raises:
            InvalidRequest: A parameter or the prompt is not valid for this model.
        """
        tokenized = self.tokenize(prompt)
        eos = () if params.ignore_eos else self._eos
        stop_ids = tuple(params.stop_token_ids or ())
        ends = (*eos, *stop_ids)
        self._check(tokenized, params, ends)
        restrictions = restrictions or self.restrictions(params)
        law, structured = params.law(self._vocab_size, restrictions.bad_words, ends), restrictions.structured
        sampling_laws = [
            replace(law, grammar=None if structured is None else structured.follow(ends)) for _ in range(params.n)
        ]
        prediction = self.prediction(params.prediction)
        adapter = None if params.lora is None else self._adapter_key(params.lora)
        plain = params.speculative_method == NONE
        number = next(self._requests)
        contexts, stoppings = [], []
        for index in range(params.n):
            contexts.append(
                Context(
                    id=next(self._sequences),
                    tokens=list(tokenized.tokens),
                    prompt_length=len(tokenized.tokens),
                    law=sampling_laws[index],
                    streams=Streams(self._seed_of(params.seed, number, index)),
                    exactness=params.grade,
                    depth=0 if plain else params.speculative_tokens,
                    prediction=prediction,
                    method=None if plain else params.speculative_method,
                    source=tokenized.source,
                    cache_salt=params.cache_salt,
                    adapter=adapter,
                )
            )
            stoppings.append(self._stopping(tokenized.tokens, params, eos, stop_ids))
        members = tuple(context.id for context in contexts)
        request = Request(number, tokenized.text, tuple(tokenized.ids), params, members, tuple(stoppings))
        return request, contexts

    def _check(self, prompt: TokenizedPrompt, params: SamplingParams, ends: Sequence[int]) -> None:
        """Raises InvalidRequest for parameters that this model does not support."""
        if prompt.source and params.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs: an encoder reads the prompt whole and gives its tokens no probabilities; leave it "
                "out",
                param="prompt_logprobs",
            )
        if params.speculative_method not in (None, NONE, *self._methods):
            raise InvalidRequest(
                f"speculative_method {shown(params.speculative_method)} is not loaded; "
                f"loaded: {', '.join(self._methods)}; {NONE!r} is plain decoding",
                param="speculative_method",
            )
        if params.structured_outputs is not None and not ends:
            raise InvalidRequest(
                "structured_outputs need a token to end with, and this model names no end-of-text token; "
                "name one in stop_token_ids",
                param="structured_outputs",
            )

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        return self.prompt_tokenizer.tokenize(prompt)

    def prediction(self, prediction: str | Sequence[int] | None) -> tuple[int, ...]:
        """Returns the tokens of a predicted output. Raises InvalidRequest."""
        return self.prompt_tokenizer.prediction(prediction)

    def rendered(self, text: str) -> list[int]:
        """Returns the tokens of a rendered chat template. Raises InvalidRequest."""
        return self.prompt_tokenizer.rendered(text)

    def _seed_of(self, seed: int | None, number: int, index: int) -> int:
        """Returns the seed of completion ``index`` of request ``number``. seed: the user's, or None."""
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
            params.acceptance_stop or (),
        )


def prompt_logprobs(sequence: Running, tokenizer: Any) -> PromptLogprobs | None:
    """Returns one entry per prompt token, None for the first. Returns None if none were requested."""
    if sequence.options.prompt_logprobs is None:
        return None
    return (None, *(logprob_entries(recorded, tokenizer) for recorded in sequence.prompt_recorded))


def logprob_entries(recorded: TokenLogprobs, tokenizer: Any) -> dict[int, Logprob]:
    """Returns the most probable tokens and the emitted one, by token id."""
    texts = _TEXTS.setdefault(tokenizer, {})
    if len(texts) > MAX_TEXTS:
        texts.clear()
    for token in (recorded.token, *(token for token, _ in recorded.top)):
        if token not in texts:
            texts[token] = tokenizer.decode([token])
    entries = {token: Logprob(value, rank, texts[token]) for rank, (token, value) in enumerate(recorded.top, start=1)}
    entries.setdefault(recorded.token, Logprob(recorded.logprob, recorded.rank, texts[recorded.token]))
    return entries


class Assembler:
    """Queues requests and maps the outputs of ``engine.step()`` back to them."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._owners: dict[int, tuple[Request, int]] = {}

    def add(self, request: Request, contexts: Sequence[Context], priority: int = 0) -> None:
        """Queues all sequences of a request. ``contexts`` has one for each completion."""
        self._owners.update({member: (request, index) for index, member in enumerate(request.members)})
        params = request.params
        options = OutputOptions(params.logprobs, params.prompt_logprobs, params.explain)
        for context, stopping in zip(contexts, request.stoppings, strict=True):
            self._engine.add(context, stopping, options, priority=priority)

    def forget(self, request: Request) -> None:
        """Removes a request whose outputs are not needed any more. Unknown ones are ignored."""
        for member in request.members:
            self._owners.pop(member, None)

    @property
    def open(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._owners)

    def owner(self, sequence: int) -> Request | None:
        """Returns the request of a sequence, None for one that is finished or was added elsewhere."""
        owned = self._owners.get(sequence)
        return owned[0] if owned else None

    def piece(self, step: StepOutput) -> StreamPiece:
        """Returns the piece that ``step`` added to its request. Takes a finished sequence from the engine.

        Raises:
            Exception: The error that ended the sequence.
        """
        request, index = self._owners[step.sequence]
        ended = step.finish_reason is not None
        if ended:
            del self._owners[step.sequence]
        sequence = self._engine.take(step.sequence) if ended else self._engine.unfinished(step.sequence)
        if sequence.error is not None:
            raise sequence.error
        recorded = sequence.recorded[step.position : step.position + len(step.tokens)]
        return StreamPiece(
            request_id=request.id,
            index=index,
            text=request.stoppings[index].take(),
            token_ids=step.tokens,
            step=step,
            output=request.completion(index, sequence, self._tokenizer) if ended else None,
            logprobs=tuple(logprob_entries(r, self._tokenizer) for r in recorded) if recorded else None,
            explained=sequence.explained[-1] if sequence.explained else None,
            prompt_logprobs=prompt_logprobs(sequence, self._tokenizer) if ended or not step.position else None,
        )


@contextmanager
def completion_progress(total: int, show: bool | None) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each finished completion, which advances a progress bar on stderr.

    Args:
        total: Number of completions.
        show: Whether to show the bar. None shows it for several completions on a terminal.
    """
    if not (total > 1 and sys.stderr.isatty() if show is None else show):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("completions"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)

"""``LLM``: a target, perhaps a proposer, and the engine between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from foretoken import zoo
from foretoken.control.controls import GoodputConfig
from foretoken.control.tempo import Tempo
from foretoken.core.checks import integer
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.files import atomic_directory
from foretoken.core.streams import MAX_DERIVED_SEED, MIN_SEED
from foretoken.engine.assemble import Assembler, submit
from foretoken.engine.loop import Engine, draining
from foretoken.engine.pace import PromptRows
from foretoken.engine.prompts import Prompt
from foretoken.engine.rehearsal import rehearse
from foretoken.engine.requests import PromptLogprobs, Request, RequestBuilder
from foretoken.engine.room import share_memory
from foretoken.models.base import Model
from foretoken.models.checkpoint import load_generation_settings, load_model, load_tokenizer, resolve
from foretoken.outputs import CompletionOutput, RequestOutput, StreamPiece
from foretoken.params import MAX_COUNT, SamplingParams
from foretoken.propose.adaptive import AdaptConfig, Adaptive, adaptive
from foretoken.propose.selection import Selection
from foretoken.speculation import Builder, SpeculativeConfig, selection, with_draft
from foretoken.verify import choose


class LLM:
    """A Hugging Face model with exact speculative decoding: a causal one, or an encoder-decoder.

    model, draft_model: folders or hub names; ``LLM()`` alone is the bundled pair.
    speculative_config: as in vLLM, see ``SpeculativeConfig``; a ``draft_model`` alone implies it.
    dtype: "auto" is bfloat16 where the hardware computes it, else float32.
    max_model_len: prompt and output together; None takes the checkpoint's.
    seed: where requests without a seed of their own get their random numbers from.
    backend: "native" is our runtime, "hf" transformers' modules, "auto" ours where it knows the architecture.
    max_num_seqs: sequences that share a pass; more wait.
    quantization: "int8" quantises the target's weights and, row by row, what they multiply. It is then another
    target, and exact with respect to itself. None leaves the checkpoint as it is stored.
    adapt: the draft model learns from what the target verifies, in the background; True, or keys of ``AdaptConfig``.
    methods: more ways to speculate, each a configuration or a method's name, that a request may choose by
    ``speculative_method``; ``llm.methods`` lists their names, the usual one first.
    kv_memory: bytes that keys and values may take; who finds no room waits. None is no bound.
    enable_prefix_caching: a prompt that begins as an earlier one did finds that beginning computed.
    max_num_batched_tokens: prompt tokens that one round may read, so that a long prompt does not hold up the others;
    "auto" is what hardly shows in their pace, None reads prompts whole.
    tensor_parallel_size: processes, started by torchrun, that share the target through transformers' modules. The first
    one goes on; in the others this does their part of its passes until it ends, and then raises SystemExit.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft_model: str | Path | None = None,
        *,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        tokenizer: str | Path | None = None,
        dtype: Any = "auto",
        device: Any = "auto",
        max_model_len: int | None = None,
        seed: int = 0,
        backend: str = "auto",
        max_num_seqs: int = 16,
        quantization: str | None = None,
        adapt: bool | Mapping[str, Any] = False,
        methods: Sequence[str | Mapping[str, Any]] = (),
        kv_memory: int | None = None,
        enable_prefix_caching: bool = False,
        max_num_batched_tokens: PromptRows = None,
        tensor_parallel_size: int = 1,
    ) -> None:
        integer("seed", seed, MIN_SEED, MAX_DERIVED_SEED)
        integer("max_num_seqs", max_num_seqs, 1, MAX_COUNT)
        integer("max_model_len", max_model_len, 2, MAX_COUNT, optional=True)
        integer("kv_memory", kv_memory, 1, optional=True)
        config = SpeculativeConfig.of(speculative_config)
        if model is None:
            model = zoo.path("target")
            if draft_model is None and config.model is None and config.method in (None, "draft_model"):
                draft_model = zoo.path("draft")
        self.speculative_config = config = with_draft(config, draft_model)
        path = resolve(model)
        options = {"dtype": dtype, "device": device, "backend": backend, "max_length": max_model_len}
        self.tokenizer = load_tokenizer(resolve(tokenizer) if tokenizer else path)
        self.target: Model = load_model(
            path, quantization=quantization, tensor_parallel_size=tensor_parallel_size, **options
        )
        self.model, self.draft_model = str(model), config.model
        builder = Builder(self.target, self.tokenizer, path, lambda other: load_model(resolve(other), **options))
        self._proposer = builder.build(config)
        tempo = self._rehearsed(config, Tempo(builder.passes))
        if adapt is not False:
            self._proposer = adaptive(self._proposer, config.model, AdaptConfig.of(adapt))
        chosen = selection(builder, config, self._proposer, methods)
        self.methods = tuple(chosen.members) if isinstance(chosen, Selection) else (config.method_in_force,)
        capacity = share_memory(self.target, chosen, kv_memory, enable_prefix_caching, max_num_seqs)
        self.engine = Engine(
            self.target,
            chosen,
            config.controller(self.target.device, tempo),
            rule=partial(choose, rejection=config.rejection),
            max_sequences=max_num_seqs,
            prompt_rows=max_num_batched_tokens,
            capacity=capacity,
        )
        ends = eos_ids(path, self.tokenizer, self.target.vocab_size)
        start = start_ids(path, self.target.vocab_size) if self.target.takes_source else ()
        self.requests = RequestBuilder(
            self.tokenizer,
            self.target.vocab_size,
            ends,
            seed,
            self.methods,
            start,
            self.target.max_length,
            self.target.source_length,
        )

    def _rehearsed(self, config: SpeculativeConfig, tempo: Tempo) -> Tempo:
        """What rounds take, as far as it can be known before the first request."""
        if isinstance(config.control_in_force, GoodputConfig):
            rehearse(self.target, self._proposer, tempo, config.most)
        return tempo

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, of any lengths, in one batch. -> one output per prompt, in order

        use_tqdm: show progress on stderr; None shows it for several prompts when stderr is a terminal.
        """
        from foretoken.engine.progress import progress

        requests = self._add(prompts, sampling_params)
        done: dict[int, dict[int, CompletionOutput]] = {request.id: {} for request in requests}
        of_prompt: dict[int, PromptLogprobs | None] = {}
        total = sum(request.params.n for request in requests)
        with progress(total, use_tqdm) as advance:
            for piece in self._run(requests):
                if piece.output is not None:
                    done[piece.request_id][piece.index] = piece.output
                    of_prompt[piece.request_id] = piece.prompt_logprobs
                    advance()
        return [r.output([done[r.id][i] for i in range(r.params.n)], of_prompt[r.id]) for r in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamPiece]:
        """Pieces as they are accepted. Dropping the iterator cancels what is left."""
        return self._run(self._add(prompts, sampling_params))

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """``generate`` on one conversation or several through the tokenizer's chat template."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise InvalidRequest(f"the tokenizer of {self.model} has no chat template; use generate()")
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if single else list(messages)
        prompts: list[Prompt] = [
            self.tokenizer.apply_chat_template(list(c), add_generation_prompt=True, return_dict=False)
            for c in conversations
        ]
        return self.generate(prompts, sampling_params)

    def save_draft(self, folder: str | Path) -> None:
        """Write the draft as it has adapted, as an ordinary checkpoint. Raises InvalidRequest without ``adapt``."""
        if not isinstance(self._proposer, Adaptive):
            raise InvalidRequest("there is no draft that learned anything; open the LLM with adapt=True")
        with atomic_directory(Path(folder).expanduser().absolute()) as partial:
            self._proposer.save(partial)

    def close(self) -> None:
        """Cancel everything; the models are freed with the object."""
        self.engine.clear()

    def _add(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        """Check and queue everything, or nothing."""
        each = _as_list(prompts)
        settings = [params or SamplingParams()] * len(each) if not isinstance(params, Sequence) else list(params)
        if len(settings) != len(each):
            raise InvalidRequest(f"{len(settings)} sampling_params for {len(each)} prompts; give one, or one each")
        built = [self.requests.build(prompt, p) for prompt, p in zip(each, settings, strict=True)]
        for _, contexts in built:
            for context in contexts:
                self.engine.check(context)
        for request, contexts in built:
            submit(self.engine, request, contexts)
        return [request for request, _ in built]

    def _run(self, requests: Sequence[Request]) -> Iterator[StreamPiece]:
        assembler = Assembler(self.engine, self.tokenizer)
        for request in requests:
            assembler.add(request)
        with draining(self.engine, [member for request in requests for member in request.members]):
            while assembler.open:
                for step in self.engine.step():
                    if assembler.owner(step.sequence) is not None:
                        yield assembler.piece(step)


def eos_ids(path: Path, tokenizer: Any, vocab_size: int) -> list[int]:
    """Every end-of-sequence id that the checkpoint names and the vocabulary has. Raises ModelLoadError for no id."""
    found = [token for settings in load_generation_settings(path) for token in settings.eos_token_id]
    if tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return sorted(token for token in set(found) if token < vocab_size)


def start_ids(path: Path, vocab_size: int) -> tuple[int, ...]:
    """What the decoder of an encoder-decoder begins with: its start, and the token it is made to say first, if any.

    Raises ModelLoadError where the checkpoint does not say, or names an id beyond its vocabulary.
    """
    settings = load_generation_settings(path)

    def named(name: str) -> int | None:
        return next((value for s in settings if (value := getattr(s, name)) is not None), None)

    start = named("decoder_start_token_id")
    if start is None:
        start = named("bos_token_id")
    if start is None:
        raise ModelLoadError(f"{path} names no decoder_start_token_id in generation_config.json or config.json")
    forced = named("forced_bos_token_id")
    start_tokens = (start,) if forced is None else (start, forced)
    if max(start_tokens) >= vocab_size:
        raise ModelLoadError(
            f"{path} begins texts with the token {max(start_tokens)} (decoder_start_token_id, forced_bos_token_id), "
            f"but the model's vocabulary has {vocab_size} tokens"
        )
    return start_tokens


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items: list[Any] = list(prompts)
    if not items:
        raise InvalidRequest("no prompts were given; pass a string, token ids, or a list of them")
    return [items] if all(isinstance(item, int) for item in items) else items

"""``LLM``: a target model, a proposer, and the engine that runs them."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foretoken import zoo
from foretoken.control.config import GoodputConfig
from foretoken.core.artifacts import Destination
from foretoken.core.checks import integer, shown
from foretoken.core.context import Context
from foretoken.core.errors import InvalidRequest
from foretoken.core.streams import MAX_DERIVED_SEED, MIN_SEED
from foretoken.engine.footprint import PROMPT_ROWS, MemoryOptions, memory_checked, split_kv_memory
from foretoken.engine.loop import Engine, draining
from foretoken.engine.prefill_pace import PromptRows
from foretoken.engine.prompts import Prompt, apply_template, own_template, prompt_list
from foretoken.engine.requests import Assembler, PromptLogprobs, Request, RequestBuilder, completion_progress
from foretoken.engine.warmup import warm_up
from foretoken.models.adapters import LoadedAdapters
from foretoken.models.base import Model
from foretoken.models.formats.checkpoint import eos_ids, load_tokenizer, resolve, start_ids
from foretoken.models.loading import load_model
from foretoken.models.options import check_adapters, drafts_format
from foretoken.models.runners.native.cache import write_kept
from foretoken.outputs import CompletionOutput, RequestOutput, StreamPiece
from foretoken.params import MAX_COUNT, LoRARequest, SamplingParams
from foretoken.propose.adaptive import Adapt, learner_in
from foretoken.propose.base import Proposer
from foretoken.propose.per_request import PerRequestProposer, guarded
from foretoken.speculation import (
    AUTO,
    Builder,
    LoadedMethods,
    SpeculativeConfig,
    load_methods,
    with_draft,
    with_method,
    with_published,
)
from foretoken.verify import choose

LoraChoice = LoRARequest | str | Sequence[LoRARequest | str | None] | None


class LLM:
    """A Hugging Face model, causal or encoder-decoder, with exact speculative decoding.

    Args:
        model: Folder or hub name of the target. ``LLM()`` alone loads the bundled pair.
        draft_model: Folder or hub name of a draft model, or of heads. "auto" is the best published one on this machine,
            which ``foretoken drafts MODEL`` lists and ``llm.drafter`` names; nothing is downloaded.
        speculative_config: As in vLLM. See ``SpeculativeConfig``. Without a method, "auto": copied text, and the draft
            model or heads, or those that the target ships. With a number of tokens or other keys, and with ``adapt``, a
            draft model drafts by "draft_model", heads by their method.
        tokenizer: Folder or hub name of the tokenizer. None takes the target's.
        dtype: "auto" is bfloat16 where the hardware supports it, else float32.
        device: "auto" or a torch device.
        max_model_len: Context length, prompt and output together. None takes the checkpoint's.
        seed: Seed of requests without a seed of their own.
        backend: "native" is the compiled runtime, "hf" runs transformers' modules, "auto" takes the compiled runtime
            where it supports the architecture.
        max_num_seqs: Number of sequences in one forward pass. Further ones wait.
        quantization: "int8" or "int4" quantizes the target's weights on loading, and activations row by row. The result
            is another target, and decoding is exact with respect to it. None keeps the checkpoint's weights.
        weight_format: How the compiled runtime holds bfloat16 weights in memory. "raw" is as they are, "packed"
            is 12 bits each without loss, and "auto" packs where passes of few rows gain. Results are the same bits.
            "packed" is for the target; draft models then follow "auto".
        kv_cache_dtype: Type of the target's cached keys and values. "auto" is the model's dtype. "int8" has a scale for
            each token and head, and about twice as many tokens fit. The result is another target, and decoding is exact
            with respect to it. "bfloat16" halves the cache of a float32 model. Draft models keep their own dtype.
        adapt: Whether the draft model or EAGLE-3 head is trained in the background on verified tokens: True, the share
            of the idle time such as 0.1, or keys of ``AdaptConfig``. As the key of ``speculative_config``.
        methods: Further methods, each a configuration or a method's name, that a request may choose by
            ``speculative_method``. ``llm.methods`` lists all names, the default first.
        kv_cache_memory_bytes: Memory of the KV cache. Requests that do not fit wait. None is no limit.
        enable_prefix_caching: Whether to reuse KV blocks of prompts with a common prefix.
        max_num_batched_tokens: Prompt tokens in one step (chunked prefill). "auto" limits the added latency of running
            requests. None prefills prompts whole, or for heads 2,048 tokens at a time.
        tensor_parallel_size: Number of processes, started by torchrun, that share the target through transformers'
            modules. In the first process the constructor returns. In the others it serves the forward passes until the
            first process ends, and then raises SystemExit.
        gguf_file: Name of a GGUF file in the target's folder or repository.
        lora: LoRA adapters in PEFT's format: folders or hub names by the names that requests choose.
        isolate_failures: For servers. Requests continue without drafts if the proposer fails, and every grammar
            compiles in its own process with limits on time and memory (POSIX only).

    Raises:
        InvalidRequest: An argument is not valid.
        ModelLoadError: A model or tokenizer cannot be loaded.
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
        weight_format: str = "auto",
        kv_cache_dtype: str = "auto",
        adapt: Adapt = False,
        methods: Sequence[str | Mapping[str, Any]] = (),
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = False,
        max_num_batched_tokens: PromptRows = None,
        tensor_parallel_size: int = 1,
        gguf_file: str | None = None,
        lora: Mapping[str, str | Path] | None = None,
        isolate_failures: bool = False,
    ) -> None:
        integer("seed", seed, MIN_SEED, MAX_DERIVED_SEED)
        integer("max_num_seqs", max_num_seqs, 1, MAX_COUNT)
        integer("max_model_len", max_model_len, 2, MAX_COUNT, optional=True)
        integer("kv_cache_memory_bytes", kv_cache_memory_bytes, 1, optional=True)
        check_adapters(lora or (), backend, tensor_parallel_size)
        config = SpeculativeConfig.of(speculative_config)
        config = config if adapt is False else replace(config, adapt=adapt)
        path, config = self._resolve(model, draft_model, config, gguf_file)
        adapters = {name: resolve(folder) for name, folder in (lora or {}).items()}  # fails before the model is read
        load = partial(load_model, dtype=dtype, device=device, backend=backend, max_length=max_model_len)
        self.tokenizer = load_tokenizer(resolve(tokenizer) if tokenizer else path)
        sizes = (max_model_len, kv_cache_memory_bytes)
        memory = MemoryOptions(dtype, device, backend, quantization, weight_format, kv_cache_dtype, *sizes)
        checked = memory_checked(path, config, memory, methods) if tensor_parallel_size == 1 else nullcontext()
        with checked:
            self.target: Model = load(
                path,
                quantization=quantization,
                tensor_parallel_size=tensor_parallel_size,
                weight_format=weight_format,
                kv_cache_dtype=kv_cache_dtype,
            )
            self.adapters = LoadedAdapters(self.target)
            for name, folder in adapters.items():
                self.load_lora(name, folder)
            load_draft = partial(load, weight_format=drafts_format(weight_format))
            builder = Builder(
                self.target, self.tokenizer, path, lambda name, **other: load_draft(resolve(name), **other)
            )
            guard = partial(guarded, vocab_size=self.target.vocab_size) if isolate_failures else _unguarded
            self._methods = self._load_methods(builder, config, methods, guard)
        chosen, config = self._methods.proposer, self.speculative_config
        capacity = split_kv_memory(self.target, chosen, kv_cache_memory_bytes, enable_prefix_caching, max_num_seqs)
        rows = max_num_batched_tokens
        if rows is None and self.target.chunk_invariant and chosen.needs.taps:
            rows = PROMPT_ROWS
        self.engine = Engine(
            self.target,
            chosen,
            self._methods.controller(self.target.device, builder.policy),
            rule=partial(choose, rejection=config.rejection),
            max_sequences=max_num_seqs,
            prompt_rows=rows,
            capacity=capacity,
            ahead=self.target.runs_ahead,
        )
        self.requests = self._request_builder(path, seed, isolate_failures)

    def _resolve(
        self, model: str | Path | None, draft_model: str | Path | None, config: SpeculativeConfig, gguf_file: str | None
    ) -> tuple[Path, SpeculativeConfig]:
        """Returns the target's path and the configuration with its drafter and method; sets the models' names."""
        if model is None:
            model = zoo.path("target")
            if draft_model is None and config.model is None and config.method in (None, AUTO, "draft_model"):
                draft_model = zoo.path("draft")
        path = resolve(model, gguf_file)
        config, self.chosen_drafter = with_published(with_draft(config, draft_model), path)
        config = with_method(config)
        self.model, self.draft_model = str(model), config.model
        return path, config if config.adapt is False else config.unmixed  # a draft model learns alone

    def _load_methods(
        self,
        builder: Builder,
        config: SpeculativeConfig,
        methods: Sequence[str | Mapping[str, Any]],
        guard: Callable[[Proposer], Proposer],
    ) -> LoadedMethods:
        """Builds the default proposer and those of ``methods``, and measures passes where a controller needs that."""
        config, self._proposer, line = builder.build_default(config)
        self.chosen_drafter = self.chosen_drafter or line
        if isinstance(config.control_in_force, GoodputConfig):
            warm_up(self.target, self._proposer, builder.costs, config.max_tokens)
        self.speculative_config = config
        write_kept()
        loaded = load_methods(builder, config, self._proposer, methods, guard)
        if loaded.adaptive is not None and not isinstance(config.control_in_force, GoodputConfig):
            member = loaded.member(loaded.adaptive)
            warm_up(self.target, member, builder.costs, loaded.configs[loaded.adaptive].max_tokens)
        self.methods = tuple(loaded.configs)
        return loaded

    @property
    def drafter(self) -> str:
        """One line on the draft model or heads of ``LLM``'s default method, and the reason for them."""
        if self.chosen_drafter:
            return self.chosen_drafter
        named = f"{self.draft_model}, as configured" if self.draft_model else "none"
        return f"drafter: {named} (method {self.speculative_config.method_in_force})"

    def _request_builder(self, path: Path, seed: int, isolate_failures: bool) -> RequestBuilder:
        ends = eos_ids(path, self.tokenizer, self.target.vocab_size)
        start = start_ids(path, self.target.vocab_size) if self.target.takes_source else ()
        return RequestBuilder(
            self.tokenizer,
            self.target.vocab_size,
            ends,
            seed,
            self.methods,
            start,
            self.target.max_length,
            self.target.source_length,
            isolate_grammars=isolate_failures and os.name == "posix",
            adapter_key=self.adapters.key,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        lora_request: LoraChoice = None,
    ) -> list[RequestOutput]:
        """Completes one prompt or many, of any lengths, in one batch.

        Args:
            prompts: Text, token ids, vLLM's dicts of either, or a list of these.
            sampling_params: One for all prompts, or one for each. None takes the defaults.
            use_tqdm: Whether to show progress on stderr. None shows it for several completions on a terminal.
            lora_request: LoRA adapter of all prompts, or one for each. None takes ``SamplingParams.lora``.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidRequest: A prompt or parameter is not valid, or a request failed.
        """
        assembler, requests = self._add(prompts, sampling_params, lora_request)
        done: dict[int, dict[int, CompletionOutput]] = {request.id: {} for request in requests}
        prompt_logprobs: dict[int, PromptLogprobs | None] = {}
        total = sum(request.params.n for request in requests)
        with completion_progress(total, use_tqdm) as advance:
            for piece in self._run(assembler, requests):
                if piece.output is not None:
                    done[piece.request_id][piece.index] = piece.output
                    prompt_logprobs[piece.request_id] = piece.prompt_logprobs
                    advance()
        return [r.output([done[r.id][i] for i in range(r.params.n)], prompt_logprobs[r.id]) for r in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoraChoice = None,
    ) -> Iterator[StreamPiece]:
        """Yields pieces of the outputs as tokens are accepted. Closing the iterator cancels unfinished requests."""
        return self._run(*self._add(prompts, sampling_params, lora_request))

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoraChoice = None,
    ) -> list[RequestOutput]:
        """Applies the tokenizer's chat template to one conversation or several, and completes them.

        Raises:
            InvalidRequest: The model has no valid chat template, or the messages do not fit it.
        """
        own_template(self.tokenizer, self.model, "use generate()")
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if single else list(messages)
        prompts: list[Prompt] = [
            apply_template(self.tokenizer, c, add_generation_prompt=True, return_dict=False) for c in conversations
        ]
        return self.generate(prompts, sampling_params, lora_request=lora_request)

    def load_lora(self, name: str, path: str | Path) -> None:
        """Loads a LoRA adapter in PEFT's format. Requests choose it by its name.

        Args:
            name: Its name. No other adapter has it.
            path: Its folder or hub name.

        Raises:
            InvalidRequest: The name is taken, or this model computes no adapters.
            ModelLoadError: It cannot be loaded, or is not for this model.
        """
        self.adapters.check_free(name)  # before anything is read
        self.adapters.add(name, self.adapters.read(resolve(path)))

    def unload_lora(self, name: str) -> None:
        """Unloads a LoRA adapter. Its name may be given to another one then. Unfinished requests keep it.

        Raises:
            InvalidRequest: It is not loaded.
        """
        self.adapters.retire(name)
        self.sweep_adapters()

    def sweep_adapters(self) -> None:
        """Frees the memory of unloaded adapters that no request uses any more. Not to be called during a step."""
        self.adapters.sweep(lambda: self.engine.adapters_in_use)

    def save_draft(self, folder: str | Path, force: bool = False) -> int:
        """Writes the adapted draft model or head as a checkpoint. Any thread may call it.

        Args:
            folder: Folder to write.
            force: Whether to replace an earlier model there.

        Returns:
            The number of updates that were taken.

        Raises:
            InvalidRequest: The LLM was opened without ``adapt``, or ``folder`` must not be written.
            WriteError: A file could not be written.
        """
        if (learner := learner_in(self._proposer)) is None:
            raise InvalidRequest("there is no adapted draft model or head; open the LLM with adapt=True")
        inputs = [Path(name) for name in (self.model, self.draft_model) if name is not None]
        with Destination.checked(Path(folder), learner.student.artifact, inputs, force).folder() as partial:
            return learner.save(partial)

    def use_method(self, method: str) -> None:
        """Makes one of ``methods`` the default of new requests. Open ones keep theirs. Not to be called during a step.

        Raises:
            InvalidRequest: It is not loaded.
        """
        if method not in self.methods:
            raise InvalidRequest(
                f"method must be one of those that are loaded, {', '.join(self.methods)}; got {method!r}",
                param="method",
            )
        if isinstance(self._methods.proposer, PerRequestProposer):
            self._methods.proposer.make_usual(method)
        self.methods = (method, *(other for other in self.methods if other != method))

    def method_of(self, context: Context) -> str:
        """Returns the one of ``methods`` that drafts for a sequence."""
        chosen = self._methods.proposer
        return chosen.of(context) if isinstance(chosen, PerRequestProposer) else self.methods[0]

    def proposer_of(self, method: str) -> Proposer:
        """Returns the proposer of one of ``methods``."""
        return self._methods.member(method)

    def draft_tokens_of(self, context: Context) -> int:
        """Returns the configured number of draft tokens per step of a sequence, or that which it asks for."""
        return self._methods.configs[self.method_of(context)].tokens if context.depth is None else context.depth

    def close(self) -> None:
        """Cancels all requests and ends processes of grammars. The models are freed with the object."""
        self.engine.clear()
        self.requests.grammars.close()

    def _add(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        lora: LoraChoice,
    ) -> tuple[Assembler, list[Request]]:
        """Checks and queues all requests, or none."""
        self.sweep_adapters()
        each = prompt_list(prompts)
        given = params if isinstance(params, Sequence) else params or SamplingParams()
        settings = _one_each("sampling_params", given, not isinstance(given, Sequence), len(each))
        adapters = _one_each("lora_request", lora, isinstance(lora, str) or not isinstance(lora, Sequence), len(each))
        settings = [self._with_adapter(p, adapter) for p, adapter in zip(settings, adapters, strict=True)]
        built = [self.requests.build(prompt, p) for prompt, p in zip(each, settings, strict=True)]
        for _, contexts in built:
            for context in contexts:
                self.engine.check(context)
        assembler = Assembler(self.engine, self.tokenizer)
        for request, contexts in built:
            assembler.add(request, contexts)
        return assembler, [request for request, _ in built]

    def _with_adapter(self, params: SamplingParams, lora: LoRARequest | str | None) -> SamplingParams:
        """Returns the parameters of a request with an adapter, which is loaded if it is given with its path."""
        if lora is None:
            return params
        if isinstance(lora, str):
            return replace(params, lora=lora)
        if not isinstance(lora, LoRARequest):
            raise InvalidRequest(f"lora_request must be the name of an adapter or a LoRARequest, got {shown(lora)}")
        if lora.lora_path and lora.lora_name not in self.adapters.names:
            self.load_lora(lora.lora_name, lora.lora_path)
        return replace(params, lora=lora.lora_name)

    def _run(self, assembler: Assembler, requests: Sequence[Request]) -> Iterator[StreamPiece]:
        with draining(self.engine, [member for request in requests for member in request.members]):
            while assembler.open:
                for step in self.engine.step():
                    if assembler.owner(step.sequence) is not None:
                        yield assembler.piece(step)


def _unguarded(proposer: Proposer) -> Proposer:
    return proposer


def _one_each(name: str, given: Any, single: bool, count: int) -> list[Any]:
    """Returns one value for each of ``count`` prompts. Raises InvalidRequest where a list has another length.

    Args:
        name: Name of the argument.
        given: A value for all prompts, or one for each.
        single: Whether it is for all.
        count: Number of prompts.
    """
    values = [given] * count if single else list(given)
    if len(values) != count:
        raise InvalidRequest(f"{len(values)} {name} for {count} prompts; give one, or one each")
    return values

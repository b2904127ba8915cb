"""``LLM``: a target, perhaps a proposer, and the engine between them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from foretoken import zoo
from foretoken.control.controls import GoodputConfig
from foretoken.control.tempo import Tempo
from foretoken.core.errors import InvalidRequest
from foretoken.core.files import atomic_directory
from foretoken.engine.loop import Engine, draining
from foretoken.engine.rehearsal import rehearse
from foretoken.engine.requests import Prompt, Request, RequestBuilder
from foretoken.models.base import Model
from foretoken.models.checkpoint import load_model, load_tokenizer, resolve
from foretoken.outputs import CompletionOutput, RequestOutput, StreamPiece
from foretoken.params import SamplingParams
from foretoken.propose.adaptive import AdaptConfig, Adaptive, adaptive
from foretoken.speculation import Builder, SpeculativeConfig, with_draft
from foretoken.verify import choose


class LLM:
    """A causal Hugging Face model with exact speculative decoding.

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
    ) -> None:
        config = SpeculativeConfig.of(speculative_config)
        if model is None:
            model = zoo.path("target")
            if draft_model is None and config.model is None and config.method in (None, "draft_model"):
                draft_model = zoo.path("draft")
        self.speculative_config = config = with_draft(config, draft_model)
        path = resolve(model)
        options = {"dtype": dtype, "device": device, "backend": backend}
        self.tokenizer = load_tokenizer(resolve(tokenizer) if tokenizer else path)
        self.target: Model = load_model(path, max_length=max_model_len, quantization=quantization, **options)
        self.model, self.draft_model = str(model), config.model
        builder = Builder(self.target, self.tokenizer, path, lambda other: load_model(resolve(other), **options))
        self._proposer = builder.build(config)
        tempo = Tempo()
        measured = not (self._proposer.costless or self._proposer.learns)
        if measured and isinstance(config.control_in_force, GoodputConfig):
            rehearse(self.target, self._proposer, tempo, config.most)
        if adapt is not False:
            self._proposer = adaptive(self._proposer, config.model, AdaptConfig.of(adapt))
        self.engine = Engine(
            self.target,
            self._proposer,
            config.controller(self.target.device, tempo),
            rule=partial(choose, rejection=config.rejection),
            max_sequences=max_num_seqs,
        )
        self._builder = RequestBuilder(self.tokenizer, self.target.vocab_size, eos_ids(path, self.tokenizer), seed)

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
        total = sum(request.params.n for request in requests)
        with progress(total, use_tqdm) as advance:
            for piece in self._run(requests):
                if piece.output is not None:
                    done[piece.request_id][piece.index] = piece.output
                    advance()
        return [request.output([done[request.id][i] for i in range(request.params.n)]) for request in requests]

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
        for identifier in [*self.engine.running, *(entry[0].id for entry in self.engine.waiting)]:
            self.engine.abort(identifier)

    def _add(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        """Check and queue everything, or nothing."""
        each = _as_list(prompts)
        settings = [params or SamplingParams()] * len(each) if not isinstance(params, Sequence) else list(params)
        if len(settings) != len(each):
            raise InvalidRequest(f"{len(settings)} sampling_params for {len(each)} prompts; give one, or one each")
        built = [self._builder.build(prompt, p) for prompt, p in zip(each, settings, strict=True)]
        for _, contexts in built:
            for context in contexts:
                self.engine.check(context)
        for request, contexts in built:
            for context, stopping in zip(contexts, request.stoppings, strict=True):
                self.engine.add(context, stopping, request.params.logprobs)
        return [request for request, _ in built]

    def _run(self, requests: Sequence[Request]) -> Iterator[StreamPiece]:
        owners = {member: (r, i) for r in requests for i, member in enumerate(r.members)}
        left = set(owners)
        with draining(self.engine, list(owners)):
            while left:
                for step in self.engine.step():
                    if step.sequence not in owners:
                        continue
                    request, index = owners[step.sequence]
                    output = None
                    if step.finish_reason is not None:
                        left.discard(step.sequence)
                        output = request.completion(index, self.engine.take(step.sequence), self.tokenizer)
                    text = request.stoppings[index].take()
                    yield StreamPiece(request.id, index, text, step.tokens, step, output)


def eos_ids(path: Path, tokenizer: Any) -> list[int]:
    """Every end-of-sequence id the checkpoint names."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        file = path / name
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        found += value if isinstance(value, list) else [] if value is None else [value]
    if tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return sorted(set(found))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items: list[Any] = list(prompts)
    if not items:
        raise InvalidRequest("no prompts were given; pass a string, token ids, or a list of them")
    return [items] if all(isinstance(item, int) for item in items) else items

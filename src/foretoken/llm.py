"""``LLM``: a target, perhaps a proposer, and the engine between them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken import zoo
from foretoken.control.base import Controller
from foretoken.control.fixed import Fixed
from foretoken.core.errors import InvalidRequest
from foretoken.engine.loop import Engine, draining
from foretoken.engine.requests import Prompt, Request, RequestBuilder
from foretoken.models.base import Model
from foretoken.models.checkpoint import load_model, load_tokenizer, resolve
from foretoken.outputs import CompletionOutput, RequestOutput, StreamPiece
from foretoken.params import SamplingParams, SpeculativeConfig
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.lookup import Lookup, LookupConfig


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
    ) -> None:
        config = SpeculativeConfig.of(speculative_config)
        if model is None:
            model = zoo.path("target")
            if draft_model is None and config.model is None and config.method in (None, "draft_model"):
                draft_model = zoo.path("draft")
        draft, method = _method(config, draft_model)
        path = resolve(model)
        options = {"dtype": dtype, "device": device, "backend": backend}
        self.tokenizer = load_tokenizer(resolve(tokenizer) if tokenizer else path)
        drafts_from = resolve(draft) if draft is not None else None
        if drafts_from is not None:
            check_vocabulary(self.tokenizer, path, drafts_from)
        self.target: Model = load_model(path, max_length=max_model_len, quantization=quantization, **options)
        self.model, self.draft_model = str(model), str(draft) if draft is not None else None
        self.speculative_config = config
        proposer: Proposer = Proposer()
        controller: Controller = Fixed(config.num_speculative_tokens)
        if drafts_from is not None:
            drafter = load_model(drafts_from, **options)
            proposer = DraftModel(drafter, DraftModelConfig(config.draft_temperature, self.target.vocab_size))
        elif method == "ngram":
            proposer = Lookup(LookupConfig(config.prompt_lookup_min, config.prompt_lookup_max))
        else:
            controller = Controller()
        self.engine = Engine(
            self.target, proposer, controller, rejection=config.rejection, max_sequences=max_num_seqs
        )  # fmt: skip
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


def check_vocabulary(tokenizer: Any, target: Path, draft: Path) -> None:
    """Refuse a draft whose token ids mean other strings than the target's."""
    if not any(draft.glob("tokenizer*")):
        return  # a bare draft is taken at its word; the row widths are reconciled by the proposer
    mine, theirs = tokenizer.get_vocab(), load_tokenizer(draft).get_vocab()
    different = [t for t in mine if t in theirs and mine[t] != theirs[t]]
    missing = len(mine.keys() ^ theirs.keys())
    if different or missing:
        raise InvalidRequest(
            f"vocabulary mismatch: {draft.name} ({len(theirs)} tokens) and {target.name} ({len(mine)} tokens) "
            f"disagree on {len(different) + missing}; a draft must share its target's tokenizer"
        )


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


def _method(config: SpeculativeConfig, draft_model: str | Path | None) -> tuple[str | Path | None, str]:
    """The draft to load, if any, and the method in force."""
    if config.model is not None and draft_model is not None and str(draft_model) != config.model:
        raise InvalidRequest(
            f"two drafts were given, draft_model={draft_model} and speculative_config's {config.model}"
        )
    draft = draft_model if draft_model is not None else config.model
    method = config.method or ("draft_model" if draft is not None else "none")
    if method == "draft_model" and draft is None:
        raise InvalidRequest("method 'draft_model' needs a draft: pass draft_model= or 'model' in speculative_config")
    if method != "draft_model" and draft is not None:
        raise InvalidRequest(f"method {method!r} takes no draft model, but {draft!s} was given")
    return draft, method


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items: list[Any] = list(prompts)
    if not items:
        raise InvalidRequest("no prompts were given; pass a string, token ids, or a list of them")
    return [items] if all(isinstance(item, int) for item in items) else items

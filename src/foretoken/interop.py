"""Foretoken behind transformers' own ``generate``, for those who already hold a model.

    model.generate(**inputs, custom_generate=foretoken.custom_generate, assistant_model=draft)

transformers prepares inputs, logits processors and stopping criteria as for its own methods; the loop is ours.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import History, Law
from foretoken.core.step import Step
from foretoken.core.streams import SeedDomain, Streams, derived_seed
from foretoken.engine.loop import Engine
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import METHOD, DraftModel
from foretoken.propose.lookup import Lookup, LookupConfig

if TYPE_CHECKING:
    from foretoken.models.base import Model

UNBOUNDED = 1 << 40
# Processors whose rows do not look at each other or at the row's number; others are given a whole batch.
# fmt: off
ROW_WISE = {
    "EpsilonLogitsWarper", "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper",
    "TopPLogitsWarper", "TypicalLogitsWarper",
}
# fmt: on
# These keep a state from call to call, which a rejected token could not take back.
STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    assistant_model: Any = None,
    streamer: Any = None,
    synced_gpus: bool = False,
    num_speculative_tokens: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """A decoding method for ``generate(custom_generate=...)``. -> what ``generate`` returns

    assistant_model: drafts; without one ``prompt_lookup_num_tokens`` drafts from the text itself; without
    either this is plain decoding. Drafted tokens a round: ``num_speculative_tokens``, else the call's or the
    assistant's ``num_assistant_tokens``. Logits processors judge every drafted token with its own history, so
    whatever they do, the output follows the law that ``generate`` alone would sample from, and greedy text is
    the same. Random numbers start from torch's generator: ``torch.manual_seed`` repeats a run. Only LongRoPE is chosen
    otherwise: by the call's maximum length, once, where ``generate`` changes factors within a text that grows over the
    original length.

    Raises InvalidRequest for what is not decoding of token ids: beams, ``inputs_embeds``, attention outputs.
    """
    call = _outer_call()
    assistant_model = assistant_model if assistant_model is not None else call.get("assistant_model")
    streamer = streamer if streamer is not None else call.get("streamer")
    _refuse(model, generation_config, logits_processor, model_kwargs, synced_gpus)
    prompts = _unpadded(input_ids, model_kwargs.get("attention_mask"))
    target = _wrap(model, stopping_criteria.max_length)
    depth = _depth(num_speculative_tokens, call, generation_config, assistant_model)
    proposer, depth = _proposer(target, assistant_model, generation_config, depth)
    record = bool(generation_config.return_dict_in_generate)
    record = record and bool(generation_config.output_scores or generation_config.output_logits)
    base = int(torch.randint(2**62, (1,)))
    engine = Engine(target, proposer, Fixed(depth), max_sequences=len(prompts))
    rows: list[Row] = []
    for number, prompt in enumerate(prompts):
        law = ProcessorLaw(
            processors=logits_processor,
            sample=bool(generation_config.do_sample),
            prompt=input_ids[number].tolist(),
            device=input_ids.device,
            row=number,
            batch=len(prompts),
            record=record,
        )
        row = Row(law, stopping_criteria, list(law.prompt))
        streams = Streams(derived_seed(SeedDomain.GENERATE, base, number))
        context = Context(number, prompt, len(prompt), law, streams)
        if row.room + len(prompt) > target.max_length:
            warnings.warn(
                f"generation stops at the model's {target.max_length} positions, before max_length", stacklevel=2
            )
        engine.add(context, row)
        rows.append(row)
    pad = _pad(generation_config)
    _drive(engine, rows, streamer, pad)
    return _result(rows, input_ids, pad, generation_config)


@dataclass(frozen=True)
class ProcessorLaw(Law):
    """transformers' logits processors as a law: each node is judged with its own full row of ids.

    prompt: the row as ``generate`` holds it, padding included, which processors see too.
    row, batch: the sequence's place, for processors that look at row numbers (``prefix_allowed_tokens_fn``).
    seen: with ``record``, raw and processed scores by generated tokens; the target's rows overwrite the draft's.
    """

    processors: Any
    sample: bool
    prompt: list[int]
    device: torch.device
    row: int = 0
    batch: int = 1
    record: bool = False
    temperature: float = 1.0
    seen: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        return not self.sample

    @property
    def needs_history(self) -> bool:
        return True

    def best(self, logits: Tensor, histories: Sequence[History]) -> list[int]:
        """See ``Law``."""
        probs = self.probs(logits, histories)
        best: list[int] = probs.argmax(-1).where(~probs[:, 0].isnan(), -1).tolist()
        return best

    def probs(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        logits = logits.to(self.device, torch.float32)
        scores = logits
        if self.processors:
            rows = [self._process(logits[i], history) for i, history in enumerate(histories)]
            scores = torch.stack(rows) if rows else logits
        if self.record:
            for i, history in enumerate(histories):
                key = (*history.tokens[history.prompt_length :], *history.path)
                self.seen[key] = (logits[i], scores[i])
        if self.greedy:  # as ``generate``: the argmax even where processors forbid every token
            one_hot = torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
            return one_hot.masked_fill_(scores.isnan().any(-1, keepdim=True), torch.nan)
        return (scores / self.temperature).softmax(-1)

    def with_temperature(self, temperature: float) -> ProcessorLaw:
        return replace(self, temperature=temperature, record=False)

    def _process(self, logits: Tensor, history: History) -> Tensor:
        """One node's scores [V] after all processors."""
        ids = [*self.prompt, *history.tokens[history.prompt_length :], *history.path]
        rows = 1 if all(type(p).__name__ in ROW_WISE for p in self.processors) else self.batch
        repeated = torch.tensor([ids], device=self.device).repeat(rows, 1)
        scores = self.processors(repeated, logits.repeat(rows, 1))
        processed: Tensor = scores[self.row if rows > 1 else 0]
        return processed


@dataclass(eq=False)
class Row:
    """One sequence's stopping criteria, its ids as ``generate`` counts them, and its recorded scores."""

    law: ProcessorLaw
    criteria: Any
    ids: list[int]
    logits: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    done: bool = False

    @property
    def generated(self) -> list[int]:
        return self.ids[len(self.law.prompt) :]

    @property
    def room(self) -> int:
        limit = self.criteria.max_length
        return UNBOUNDED if limit is None else limit - len(self.ids)

    def push(self, token: int) -> str | None:
        """Ask the criteria after every token, so that a block ends where one token at a time would have."""
        if self.law.record:
            raw, processed = self.law.seen[tuple(self.generated)]
            self.logits.append(raw)
            self.scores.append(processed)
        self.ids.append(token)
        scores = tuple(s.unsqueeze(0) for s in self.scores) if self.law.record else None
        if bool(self.criteria(torch.tensor([self.ids], device=self.law.device), scores).all()):
            return "length" if self.room <= 0 else "stop"
        return None


# the run


def _drive(engine: Engine, rows: Sequence[Row], streamer: Any, pad: int) -> None:
    """Run to the end; a streamer gets one token of every row at a time, as ``generate`` gives them."""
    streamed = 0
    while engine.busy:
        for step in engine.step_or_raise():
            _close(rows[step.sequence], step)
        if streamer is None:
            continue
        # A column is ready when every row that goes on has its token; the last ones when all rows ended.
        ready = min((len(r.generated) for r in rows if not r.done), default=max(len(r.generated) for r in rows))
        for at in range(streamed, ready):
            streamer.put(torch.tensor([r.generated[at] if at < len(r.generated) else pad for r in rows]))
        streamed = max(streamed, ready)
    if streamer is not None:
        streamer.end()


def _close(row: Row, step: Step) -> None:
    row.law.seen.clear()
    row.done = step.finish_reason is not None


def _result(rows: Sequence[Row], input_ids: Tensor, pad: int, config: Any) -> Any:
    """ids padded on the right, alone or in transformers' output object."""
    width = max(len(row.ids) for row in rows)
    sequences = torch.tensor([row.ids + [pad] * (width - len(row.ids)) for row in rows], device=input_ids.device)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    length = width - input_ids.shape[1]
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_columns([row.scores for row in rows], length) if config.output_scores else None,
        logits=_columns([row.logits for row in rows], length) if config.output_logits else None,
    )


def _columns(rows: Sequence[Sequence[Tensor]], length: int) -> tuple[Tensor, ...]:
    """Per position one [batch, V]; a row that had ended gives zeros."""
    zeros = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[i] if i < len(row) else zeros for row in rows]).clone() for i in range(length))


# what the call asked for


def _outer_call() -> dict[str, Any]:
    """The arguments of the ``generate`` call we are in that transformers does not pass on to a callable.

    For a callable ``custom_generate`` it keeps ``assistant_model`` and ``streamer`` to itself (transformers
    5.23, ``_extract_generation_mode_kwargs``), so they are read from its frame. Empty when called directly.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == "transformers.generation.utils":
            found = frame.f_locals
            given = dict(found.get("kwargs") or {})
            return {**given, "assistant_model": found.get("assistant_model"), "streamer": found.get("streamer")}
        frame = frame.f_back
    return {}


def _depth(asked: int | None, call: dict[str, Any], config: Any, assistant: Any) -> int:
    """Drafted tokens a round, by whoever asked first; transformers' own default of 20 is nobody's wish."""
    default = type(config)._get_default_generation_params().get("num_assistant_tokens")
    wishes = [asked, call.get("num_assistant_tokens")]
    for holder in (config, getattr(assistant, "generation_config", None)):
        value = getattr(holder, "num_assistant_tokens", None)
        wishes.append(None if value == default else value)
    return int(next((w for w in wishes if w is not None), METHOD.tokens))


def _proposer(target: Model, assistant: Any, config: Any, depth: int) -> tuple[Proposer, int]:
    """Who drafts, and how many tokens a round."""
    if assistant is not None:
        draft = _wrap(assistant, target.max_length)
        if abs(draft.vocab_size - target.vocab_size) > target.vocab_size // 50:
            raise InvalidRequest(
                f"the assistant has a vocabulary of {draft.vocab_size} and the model one of {target.vocab_size}; "
                "a draft must share its target's tokenizer"
            )
        return DraftModel(draft, vocab_size=target.vocab_size), depth
    if config.prompt_lookup_num_tokens is not None:
        lookup = Lookup(LookupConfig(1, config.max_matching_ngram_size or 2))
        return lookup, int(config.prompt_lookup_num_tokens)
    return Proposer(), 0


def _wrap(module: Any, max_length: int | None) -> Model:
    from foretoken.models.hf import HFModel

    return HFModel.from_module(module, max_length)


def _pad(config: Any) -> int:
    for name in ("_pad_token_tensor", "_eos_token_tensor"):
        value = getattr(config, name, None)
        if value is not None:
            return int(value.flatten()[0])
    return 0


def _unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Each row's real tokens; padding is on the left."""
    if attention_mask is None:
        return [list(row) for row in input_ids.tolist()]
    mask = attention_mask[:, -input_ids.shape[1] :].bool()
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise InvalidRequest("attention_mask has zeros after ones; pad prompts on the left (padding_side='left')")
    return [ids[keep].tolist() for ids, keep in zip(input_ids, mask.to(input_ids.device), strict=True)]


def _refuse(model: Any, config: Any, processors: Any, kwargs: dict[str, Any], synced_gpus: bool) -> None:
    """What this loop does not do, by name."""
    reasons = {
        "num_beams": (config.num_beams or 1) > 1,
        "inputs_embeds": kwargs.get("inputs_embeds") is not None,
        "output_attentions": bool(config.output_attentions),
        "output_hidden_states": bool(config.output_hidden_states),
        "synced_gpus": bool(synced_gpus),
        "guidance_scale or a SynthID watermark": any(type(p).__name__ in STATEFUL for p in processors),
        "an encoder-decoder model": bool(model.config.is_encoder_decoder),
    }
    if found := [name for name, present in reasons.items() if present]:
        raise InvalidRequest(
            f"custom_generate does not take {', '.join(found)}; leave that out, or generate without custom_generate"
        )

"""Foretoken as a decoding method of transformers' ``generate``.

    model.generate(**inputs, custom_generate=foretoken.custom_generate, assistant_model=draft)

transformers prepares inputs, logits processors and stopping criteria as for its own methods. Foretoken's engine runs
the decode steps.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.errors import InvalidRequest
from foretoken.core.step import StepOutput
from foretoken.core.streams import SeedDomain, Streams, derived_seed
from foretoken.engine.loop import Engine
from foretoken.engine.processors import STATEFUL, ProcessorLaw
from foretoken.engine.stopping import Stopping
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import METHOD, DraftModel
from foretoken.propose.suffix import Lookup, LookupConfig

if TYPE_CHECKING:
    from foretoken.models.base import Model

UNBOUNDED = 1 << 40


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
    """A decoding method for ``generate(custom_generate=...)``.

    Logits processors are applied to every draft token with its own history, so the output follows the distribution that
    ``generate`` alone samples from, and greedy text is the same. Random numbers start from torch's generator:
    ``torch.manual_seed`` repeats a run. LongRoPE factors differ: they are chosen once, by the call's maximum length,
    whereas ``generate`` changes them when a sequence exceeds the original length.

    Args:
        model: The target, a causal model of transformers.
        input_ids: [batch, length]. Prompts, padded on the left.
        logits_processor: From ``generate``.
        stopping_criteria: From ``generate``.
        generation_config: From ``generate``.
        assistant_model: Draft model. Without one, ``prompt_lookup_num_tokens`` drafts from the sequence itself. Without
            either this is plain decoding.
        streamer: Receives tokens as from ``generate``.
        synced_gpus: Must be false.
        num_speculative_tokens: Draft tokens per step. None takes ``num_assistant_tokens`` of the call or the assistant.
        model_kwargs: From ``generate``.

    Returns:
        The result of ``generate``.

    Raises:
        InvalidRequest: The call is not decoding of token ids: beams, ``inputs_embeds``, attention outputs.
    """
    call = _outer_call()
    assistant_model = assistant_model if assistant_model is not None else call.get("assistant_model")
    streamer = streamer if streamer is not None else call.get("streamer")
    _refuse(model, generation_config, logits_processor, model_kwargs, synced_gpus)
    prompts = _unpadded(input_ids, model_kwargs.get("attention_mask"))
    target = _wrap(model, stopping_criteria.max_length)
    depth = _depth(num_speculative_tokens, call, generation_config, assistant_model)
    proposer, depth = _proposer(target, assistant_model, generation_config, depth)
    engine = Engine(target, proposer, Fixed(depth), max_sequences=len(prompts))
    sequences = _sequences(prompts, input_ids, logits_processor, stopping_criteria, generation_config)
    rows, pad = [row for _, row in sequences], _pad(generation_config)
    if any(row.tokens_left + len(prompt) > target.max_length for row, prompt in zip(rows, prompts, strict=True)):
        warnings.warn(f"generation stops at the model's {target.max_length} positions, before max_length", stacklevel=2)
    _drive(engine.run(sequences), rows, streamer, pad)
    return _result(rows, input_ids, pad, generation_config)


@dataclass(eq=False)
class GenerationRow(Stopping):
    """One row of ``generate``: its stopping criteria, its ids with padding, and its recorded scores."""

    law: ProcessorLaw
    criteria: Any
    ids: list[int]
    logits: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    done: bool = False
    tokens_left: int = field(init=False)

    def __post_init__(self) -> None:
        limit = self.criteria.max_length
        self.tokens_left = UNBOUNDED if limit is None else limit - len(self.ids)

    @property
    def generated(self) -> list[int]:
        return self.ids[len(self.law.prompt) :]

    def push(self, token: int) -> str | None:
        """See ``Stopping``. The criteria are tested after every token, so a block ends where plain decoding would."""
        if self.law.record:
            raw, processed = self.law.seen[tuple(self.generated)]
            self.logits.append(raw)
            self.scores.append(processed)
        self.ids.append(token)
        self.tokens_left -= 1
        scores = tuple(s.unsqueeze(0) for s in self.scores) if self.law.record else None
        if bool(self.criteria(torch.tensor([self.ids], device=self.law.device), scores).all()):
            return "length" if self.tokens_left <= 0 else "stop"
        return None


# running


def _sequences(
    prompts: Sequence[list[int]], input_ids: Tensor, processors: Any, criteria: Any, config: Any
) -> list[tuple[Context, GenerationRow]]:
    """Returns the context and the row of each prompt. Random numbers start from torch's generator."""
    recorded = config.output_scores or config.output_logits
    base = int(torch.randint(2**62, (1,)))
    sequences = []
    for number, prompt in enumerate(prompts):
        law = ProcessorLaw(
            processors=processors,
            sample=bool(config.do_sample),
            prompt=input_ids[number].tolist(),
            device=input_ids.device,
            row=number,
            batch=len(prompts),
            record=bool(config.return_dict_in_generate and recorded),
        )
        streams = Streams(derived_seed(SeedDomain.GENERATE, base, number))
        context = Context(number, prompt, len(prompt), law, streams)
        sequences.append((context, GenerationRow(law, criteria, list(law.prompt))))
    return sequences


def _drive(steps: Iterable[StepOutput], rows: Sequence[GenerationRow], streamer: Any, pad: int) -> None:
    """Runs all steps. A streamer gets one token of every row at a time, as from ``generate``."""
    streamed = 0
    for step in steps:
        row = rows[step.sequence]
        row.law.seen.clear()
        row.done = step.finish_reason is not None
        if streamer is None:
            continue
        # A column is ready when every unfinished row has its token; the last ones when all rows have ended.
        ready = min((len(r.generated) for r in rows if not r.done), default=max(len(r.generated) for r in rows))
        for at in range(streamed, ready):
            streamer.put(torch.tensor([r.generated[at] if at < len(r.generated) else pad for r in rows]))
        streamed = max(streamed, ready)
    if streamer is not None:
        streamer.end()


def _result(rows: Sequence[GenerationRow], input_ids: Tensor, pad: int, config: Any) -> Any:
    """Returns ids padded on the right, alone or in transformers' output object."""
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
    """Returns [batch, V] for each position, with zeros for rows that have ended."""
    zeros = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[i] if i < len(row) else zeros for row in rows]).clone() for i in range(length))


# arguments of the call


def _outer_call() -> dict[str, Any]:
    """Returns the arguments of the enclosing ``generate`` call that transformers does not pass to a callable.

    transformers does not pass ``assistant_model`` and ``streamer`` to a callable ``custom_generate`` (5.23,
    ``_extract_generation_mode_kwargs``), so they are read from its frame. The result is empty without such a call.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == "transformers.generation.utils":
            call = frame.f_locals
            kwargs = dict(call.get("kwargs") or {})
            return {**kwargs, "assistant_model": call.get("assistant_model"), "streamer": call.get("streamer")}
        frame = frame.f_back
    return {}


def _depth(argument: int | None, call: dict[str, Any], config: Any, assistant: Any) -> int:
    """Returns the draft tokens per step: the first value that is set. transformers' default of 20 counts as unset."""
    default = type(config)._get_default_generation_params().get("num_assistant_tokens")
    values = [argument, call.get("num_assistant_tokens")]
    for holder in (config, getattr(assistant, "generation_config", None)):
        value = getattr(holder, "num_assistant_tokens", None)
        values.append(None if value == default else value)
    return int(next((value for value in values if value is not None), METHOD.tokens))


def _proposer(target: Model, assistant: Any, config: Any, depth: int) -> tuple[Proposer, int]:
    """Returns the proposer and its draft tokens per step."""
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
    from foretoken.models.hf.model import HFModel

    return HFModel.from_module(module, max_length)


def _pad(config: Any) -> int:
    for name in ("_pad_token_tensor", "_eos_token_tensor"):
        value = getattr(config, name, None)
        if value is not None:
            return int(value.flatten()[0])
    return 0


def _unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Returns each row's tokens without padding on the left."""
    if attention_mask is None:
        return [list(row) for row in input_ids.tolist()]
    mask = attention_mask[:, -input_ids.shape[1] :].bool()
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise InvalidRequest("attention_mask has zeros after ones; pad prompts on the left (padding_side='left')")
    return [ids[keep].tolist() for ids, keep in zip(input_ids, mask.to(input_ids.device), strict=True)]


def _refuse(model: Any, config: Any, processors: Any, kwargs: dict[str, Any], synced_gpus: bool) -> None:
    """Raises InvalidRequest for options that are not supported."""
    reasons = {
        "num_beams": (config.num_beams or 1) > 1,
        "inputs_embeds": kwargs.get("inputs_embeds") is not None,
        "output_attentions": bool(config.output_attentions),
        "output_hidden_states": bool(config.output_hidden_states),
        "synced_gpus": bool(synced_gpus),
        "guidance_scale or a SynthID watermark": any(type(p).__name__ in STATEFUL for p in processors),
        "an encoder-decoder model": bool(model.config.is_encoder_decoder),
    }
    if refused := [name for name, present in reasons.items() if present]:
        raise InvalidRequest(
            f"custom_generate does not take {', '.join(refused)}; omit that, or generate without custom_generate"
        )

"""Audits Foretoken itself: the engine of an ``LLM``, with its target's plain forward pass as the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.audit.controls import PLANTS
from foretoken.audit.subject import AuditedCompletion, AuditStep, CompletionSettings, Ids
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.law import PointMass
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.llm import LLM
from foretoken.models.formats.checkpoint import eos_ids, resolve
from foretoken.plan.texts import SampledText, text_logits
from foretoken.propose.base import Needs, Observation, Proposer, Wrapper
from foretoken.propose.draft_model import DraftModel
from foretoken.speculation import NONE

_IDENTIFIERS = count(1 << 40)  # above the ids of requests that the same proposer knows


class Foretoken:
    """An engine as configured. Nothing else may run on it during the audit. See ``Audited``.

    Args:
        depth: Configured number of draft tokens, for steps in which the engine's controller is bypassed.
        float32: Loads the same engine in float32, None if that is impossible.
        start: First decoder tokens of an encoder-decoder, whose encoder receives the prompts.
        method: Name of the proposer that drafts, where the engine has several.
    """

    batch = 16
    seeded = True
    open = True

    def __init__(
        self,
        engine: Engine,
        encode: Callable[[str], Sequence[int]],
        depth: int | None = None,
        ends: Sequence[int] = (),
        facts: Mapping[str, Any] | None = None,
        float32: Callable[[], Foretoken] | None = None,
        start: Sequence[int] = (),
        method: str | None = None,
    ) -> None:
        self.target, self.proposer, self.method = engine.target, engine.proposer, method
        self.controller, self.rule = engine.controller, engine.rule
        self.encode, self.depth, self.ends, self.facts = encode, depth, tuple(ends), facts or {}
        self.bit_equal = engine.target.batch_invariant
        self._float32, self._start = float32, tuple(start)

    @classmethod
    def of(cls, llm: LLM) -> Foretoken:
        """Wraps the engine of ``llm``. For float32 its pair is loaded once more, unquantized."""
        config, target = llm.speculative_config, llm.target

        def again() -> Foretoken:
            options: dict[str, Any] = {"device": target.device, "max_model_len": target.max_length}
            return cls.of(LLM(llm.model, speculative_config=config, dtype=torch.float32, **options))

        facts = {
            "engine": "foretoken",
            "model": llm.model,
            "draft_model": config.model,
            "method": config.method_in_force,
            "num_speculative_tokens": config.tokens,
            "control": type(config.control_in_force).__name__.removesuffix("Config").lower(),
            "rejection": config.rejection,
            "dtype": str(target.dtype).removeprefix("torch."),
        }
        ends = eos_ids(resolve(llm.model), llm.tokenizer, llm.target.vocab_size)
        other = None if target.dtype == torch.float32 else again
        depth = config.tokens if config.method_in_force != NONE else None
        encode, start = partial(_encoded, llm.tokenizer), llm.requests.start
        return cls(llm.engine, encode, depth, ends, facts, other, start, config.method_in_force)

    def law(self, temperature: float) -> SamplingLaw:
        return SamplingLaw(temperature=temperature)

    def generate(self, prompts: Sequence[Ids], settings: CompletionSettings) -> list[AuditedCompletion]:
        proposer = _Keeping(self.proposer) if settings.keep else self.proposer
        engine = Engine(self.target, proposer, self.controller, rule=self.rule, max_sequences=settings.batch)
        contexts = [
            Context(
                next(_IDENTIFIERS),
                list(tokens),
                len(tokens),
                settings.law,
                Streams(seed),
                settings.grade,
                settings.depth,
                method=self.method,
                source=tuple(source),
            )
            for (tokens, source), seed in zip(map(self._prompt_and_source, prompts), settings.seeds, strict=True)
        ]
        steps: dict[int, list[StepOutput]] = {context.id: [] for context in contexts}
        for step in engine.run((context, Length(settings.max_tokens, settings.ends)) for context in contexts):
            steps[step.sequence].append(step)
        kept = proposer.rows if isinstance(proposer, _Keeping) else {}
        return [self._text(context, steps[context.id], kept.get(context.id)) for context in contexts]

    def _prompt_and_source(self, prompt: Ids) -> tuple[Ids, Ids]:
        """Returns the decoder's prompt and the encoder's source."""
        return (self._start, prompt) if self._start else (prompt, ())

    def _text(self, context: Context, steps: Sequence[StepOutput], rows: list[Tensor] | None) -> AuditedCompletion:
        """Builds the completion. ``q`` is None if drafting and verification share random numbers."""
        known = context.exactness is Exactness.DISTRIBUTION
        audited = tuple(
            AuditStep(
                step.position, max(step.draft.depths), _whole(step), self._first_law(step.draft) if known else None
            )
            for step in steps
            if len(step.draft)
        )
        tokens = tuple(context.tokens[context.prompt_length :])
        return AuditedCompletion(tokens, audited, torch.cat(rows) if rows else None)

    def _first_law(self, draft: Draft) -> Tensor:
        """Returns the distribution of the root's children, [V]; uniform over fixed candidates."""
        if not isinstance(draft.law, PointMass):
            return draft.law.probs[0].clone()
        tokens = torch.tensor([draft.ids[child] for child in draft.children[0]])
        chosen = F.one_hot(tokens, self.target.vocab_size).amax(0).float()
        return chosen / chosen.sum()

    def logits(self, prompt: Ids, text: Ids) -> Tensor:
        start, source = map(tuple, self._prompt_and_source(prompt))
        return text_logits(self.target, SampledText(start, tuple(text), len(text), source))

    def reference(self, prompt: Ids, text: Ids, law: SamplingLaw) -> Tensor | None:
        return None

    def planted(self) -> Mapping[str, Foretoken]:
        return {name: self._with(rule=rule) for name, rule in PLANTS.items()}

    def self_drafting(self) -> Foretoken:
        return self._with(proposer=DraftModel(self.target), controller=Fixed(4), depth=None)

    def in_float32(self) -> Foretoken | None:
        return self._float32() if self._float32 is not None else None

    def _with(self, **parts: Any) -> Foretoken:
        other = copy(self)
        for name, part in parts.items():
            setattr(other, name, part)
        return other


class _Keeping(Wrapper):
    """Records the logits that each token was sampled from, by sequence."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.rows: dict[int, list[Tensor]] = {}

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for context, seen in zip(contexts, observations, strict=True):
            path = [0, *(node + 1 for node in seen.step.verdict.path)][: len(seen.step.tokens)]
            self.rows.setdefault(context.id, []).append(seen.scores.logits[path].float().clone())
        super().observe(contexts, observations)

    def needs_of(self, context: Context) -> Needs:
        return replace(self.inner.needs_of(context), logits=True)


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, verbose=False)["input_ids"])


def _whole(step: StepOutput) -> bool:
    """Whether a path of the draft's full depth was accepted, even if the text ended inside it."""
    return len(step.verdict.path) == max(step.draft.depths)

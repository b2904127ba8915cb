"""Foretoken audited by itself: the engine of an ``LLM``, and its target's plain rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.audit.controls import PLANTS
from foretoken.audit.subject import Ask, Ids, Round, Text
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.law import PointMass
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import Step
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine, draining
from foretoken.engine.stopping import Length
from foretoken.llm import LLM, eos_ids
from foretoken.models.checkpoint import resolve
from foretoken.propose.base import Observation, Proposer, Wrapper
from foretoken.propose.draft_model import DraftModel
from foretoken.speculation import NONE

_IDENTIFIERS = count(1 << 40)  # beyond those of requests that the same proposer knows


class Foretoken:
    """An engine as it is configured. While it is audited, nothing else may run on it.

    encode: text to token ids. depth: a configured number of drafted tokens, for rounds in which the engine's controller
    is not asked. start: how the decoder of an encoder-decoder begins, whose encoder reads the prompts.
    ends: end-of-sequence tokens. facts: what the report says of it.
    float32: loads the same in that precision; None where that cannot be had.
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
    ) -> None:
        self.target, self.proposer = engine.target, engine.proposer
        self.controller, self.rule = engine.controller, engine.rule
        self.encode, self.depth, self.ends, self.facts = encode, depth, tuple(ends), facts or {}
        self.bit_equal = engine.target.rows_independent
        self._float32, self._start = float32, tuple(start)

    @classmethod
    def of(cls, llm: LLM) -> Foretoken:
        """The engine of ``llm``. For float32 its pair is loaded once more, unquantised."""
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
        return cls(llm.engine, partial(_encoded, llm.tokenizer), depth, ends, facts, other, llm.requests.start)

    def law(self, temperature: float) -> SamplingLaw:
        return SamplingLaw(temperature=temperature)

    def generate(self, prompts: Sequence[Ids], ask: Ask) -> list[Text]:
        proposer = _Keeping(self.proposer) if ask.keep else self.proposer
        engine = Engine(self.target, proposer, self.controller, rule=self.rule, max_sequences=ask.batch)
        contexts = [
            Context(
                next(_IDENTIFIERS), list(tokens), len(tokens), ask.law, Streams(seed), ask.grade, ask.depth,
                source=tuple(source),
            )
            for (tokens, source), seed in zip(map(self._given, prompts), ask.seeds, strict=True)
        ]  # fmt: skip
        steps: dict[int, list[Step]] = {context.id: [] for context in contexts}
        with draining(engine, list(steps)):
            for context in contexts:
                engine.add(context, Length(ask.max_tokens, ask.ends))
            while engine.busy:
                for step in engine.step_or_raise():
                    steps[step.sequence].append(step)
        kept = proposer.rows if isinstance(proposer, _Keeping) else {}
        return [self._text(context, steps[context.id], kept.get(context.id)) for context in contexts]

    def _given(self, prompt: Ids) -> tuple[Ids, Ids]:
        """What the decoder goes on from, and what an encoder reads."""
        return (self._start, prompt) if self._start else (prompt, ())

    def _text(self, context: Context, steps: Sequence[Step], rows: list[Tensor] | None) -> Text:
        """q is left out where drafting shared the verdict's noise."""
        known = context.exactness is Exactness.DISTRIBUTION
        rounds = tuple(
            Round(step.position, max(step.draft.depths), _whole(step), self._first_law(step.draft) if known else None)
            for step in steps
            if len(step.draft)
        )
        tokens = tuple(context.tokens[context.prompt_length :])
        return Text(tokens, rounds, torch.cat(rows) if rows else None)

    def _first_law(self, draft: Draft) -> Tensor:
        """[V]: what the root's children were drawn from; of fixed candidates, all alike."""
        if not isinstance(draft.law, PointMass):
            return draft.law.probs[0].clone()
        tokens = torch.tensor([draft.ids[child] for child in draft.children[0]])
        chosen = F.one_hot(tokens, self.target.vocab_size).amax(0).float()
        return chosen / chosen.sum()

    @torch.inference_mode()
    def logits(self, prompt: Ids, text: Ids) -> Tensor:
        handle = self.target.open(*self._given(prompt))
        try:
            return self.target.score([handle], [Draft.chain(list(text[:-1]))])[0].logits
        finally:
            self.target.close(handle)

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
    """Another proposer, whose observations are kept: the rows that tokens came from, by sequence."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.rows: dict[int, list[Tensor]] = {}

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for context, seen in zip(contexts, observations, strict=True):
            path = [0, *(node + 1 for node in seen.step.verdict.path)][: len(seen.step.tokens)]
            self.rows.setdefault(context.id, []).append(seen.scores.logits[path].float().clone())
        super().observe(contexts, observations)


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, verbose=False)["input_ids"])


def _whole(step: Step) -> bool:
    """Accepted down to the draft's depth, whatever was cut off behind."""
    return len(step.verdict.path) == max(step.draft.depths)

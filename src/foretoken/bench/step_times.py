"""Breaks the time of a decode step into forward passes and overhead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

from foretoken.bench.clock import Stopwatch
from foretoken.llm import LLM
from foretoken.params import SamplingParams
from foretoken.propose.union import Union


@dataclass(frozen=True)
class StepTimes:
    """Seconds over all steps but each prompt's first, which includes prefill.

    Attributes:
        target: Forward passes of the target, inside ``Model.score``.
        draft: Forward passes of the draft model.
        propose: The proposer without its passes.
        verify: As in ``Timings``.
        commit: As in ``Timings``.
    """

    steps: int
    tokens: int
    total: float
    target: float
    draft: float
    propose: float
    verify: float
    commit: float

    @property
    def other(self) -> float:
        """Seconds of the engine, detokenization and the stream."""
        return self.total - self.target - self.draft - self.propose - self.verify - self.commit

    @property
    def outside(self) -> float:
        """The share of a step outside forward passes."""
        return 1 - (self.target + self.draft) / self.total if self.total else 0.0

    def per_step(self) -> dict[str, float]:
        """Returns the seconds of one step, by part."""
        parts = [f.name for f in fields(self) if f.name not in ("steps", "tokens")]
        return {name: getattr(self, name) / max(1, self.steps) for name in (*parts, "other")}


def step_times(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> StepTimes:
    """Times decode steps of one prompt after another through ``LLM.stream``."""
    drafter = _draft_model(llm)
    names = ("score", "chains") if drafter is not None else ()
    steps, tokens, seconds = 0, 0, dict.fromkeys((f.name for f in fields(StepTimes)[2:]), 0.0)
    with Stopwatch([(drafter, name) for name in names]) as watch:
        for prompt in prompts:
            pieces = iter(llm.stream(prompt, params))
            next(pieces, None)
            while True:
                before, started = watch.seconds, perf_counter()
                piece = next(pieces, None)
                wall = perf_counter() - started
                if piece is None:
                    break
                drafting, laps = watch.seconds - before, piece.step.timings
                parts = {"target": laps.score, "draft": drafting, "propose": laps.propose - drafting}
                parts |= {"verify": laps.verify, "commit": laps.commit, "total": wall}
                seconds = {name: seconds[name] + value for name, value in parts.items()}
                steps, tokens = steps + 1, tokens + len(piece.token_ids)
    return StepTimes(steps, tokens, **seconds)


def _draft_model(llm: LLM) -> Any:
    """Returns the draft model of the default method; None if it has none."""
    proposer: Any = llm.proposer_of(llm.methods[0])
    if isinstance(proposer, Union):
        proposer = proposer.model and proposer.model.proposer
    return getattr(proposer, "model", None)

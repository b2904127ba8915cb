"""Where a round's time goes: model passes, and all that is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

from foretoken.llm import LLM
from foretoken.params import SamplingParams


@dataclass(frozen=True)
class Rounds:
    """Seconds over all rounds but each prompt's first, whose pass holds the prompt.

    target, draft: inside ``Model.score``. propose: the proposer beside its passes. verify, commit: as in ``Timings``.
    rest: what the engine, the text and the stream add around them.
    """

    rounds: int
    tokens: int
    total: float
    target: float
    draft: float
    propose: float
    verify: float
    commit: float

    @property
    def rest(self) -> float:
        return self.total - self.target - self.draft - self.propose - self.verify - self.commit

    @property
    def outside(self) -> float:
        """The share of a round that is not model passes."""
        return 1 - (self.target + self.draft) / self.total if self.total else 0.0

    def per_round(self) -> dict[str, float]:
        """Seconds of one round, by part."""
        parts = [f.name for f in fields(self) if f.name not in ("rounds", "tokens")]
        return {name: getattr(self, name) / max(1, self.rounds) for name in (*parts, "rest")}


def rounds(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> Rounds:
    """One prompt after another through ``LLM.stream``."""
    drafter: Any = getattr(llm.engine.proposer, "model", None)
    passes = _Timed(drafter.score) if drafter is not None else None
    if passes is not None:
        drafter.score = passes
    sums = dict.fromkeys(("rounds", "tokens", "total", "target", "draft", "propose", "verify", "commit"), 0.0)
    try:
        for prompt in prompts:
            pieces = iter(llm.stream(prompt, params))
            next(pieces, None)
            while True:
                before, started = passes.seconds if passes else 0.0, perf_counter()
                piece = next(pieces, None)
                wall = perf_counter() - started
                if piece is None:
                    break
                drafting, laps = (passes.seconds if passes else 0.0) - before, piece.step.timings
                parts = {
                    "rounds": 1, "tokens": len(piece.token_ids), "total": wall, "target": laps.score, "draft": drafting,
                    "propose": laps.propose - drafting, "verify": laps.verify, "commit": laps.commit,
                }  # fmt: skip
                for name, value in parts.items():
                    sums[name] += value
    finally:
        if passes is not None:
            del drafter.score
    return Rounds(**sums | {"rounds": int(sums["rounds"]), "tokens": int(sums["tokens"])})  # type: ignore[arg-type]


class _Timed:
    """A function that adds up the seconds spent inside it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.seconds = call, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = perf_counter()
        try:
            return self.call(*args, **kwargs)
        finally:
            self.seconds += perf_counter() - started

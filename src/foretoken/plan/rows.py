"""One prediction of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foretoken.plan.candidates import Candidate
from foretoken.plan.exports import NAMES, export_config
from foretoken.plan.statistics import around


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One prediction.

    Intervals are for further runs over as many requests: 95 of 100 should lie inside. Times are of the whole batch.

    acceptance: by position. In a plan for this engine, the fraction of steps that accepted so deep. In a plan for vLLM,
    conditional on the positions before.
    """

    name: str  # of the candidate
    method: str
    config: Mapping[str, Any]  # the speculative_config to paste
    temperature: float
    batch: int  # sequences at once
    tokens_per_pass: float  # emitted tokens over target passes, without prefill
    tokens_per_pass_low: float  # ends of its interval
    tokens_per_pass_high: float
    speedup: float  # of decoding over plain decoding in the same batch
    low: float  # ends of its interval
    high: float
    end_to_end: float  # speedup with prefill included
    step_seconds: float
    draft_seconds: float  # seconds of drafting in a step
    plain_seconds: float  # seconds of a plain step
    acceptance: tuple[float, ...]
    estimator: str  # "distribution" (see ``chains``), "text" or "steps" (see ``replay``), "runs" (see ``vllm``)
    requests: int  # number of requests in the sample
    best: bool = False  # whether it is the fastest at its temperature and batch

    @classmethod
    def predicted(
        cls,
        candidate: Candidate,
        depth: int,
        *,
        tokens: float,
        tokens_width: float,
        seconds_width: float,
        first: tuple[float, float],
        decoded: float,
        plain_seconds: float,
        step_seconds: float,
        **facts: Any,
    ) -> PlanRow:
        """Returns the row of a candidate at one draft length.

        Args:
            candidate: The candidate.
            depth: Draft length.
            tokens: Tokens per pass.
            tokens_width: Half the width of the interval of their logarithm, for another sample.
            seconds_width: Likewise of step over plain step.
            first: Seconds until every prompt has its first token, in plain decoding and with the candidate.
            decoded: Tokens of a request after its first.
            plain_seconds: Seconds of a plain step.
            step_seconds: Seconds of a step.
            facts: The other fields.
        """
        speedup = tokens * plain_seconds / step_seconds
        fewest, most = around(tokens, tokens_width)
        low, high = around(speedup, math.hypot(tokens_width, seconds_width))
        return cls(
            name=candidate.name,
            method=candidate.method,
            config=candidate.at(depth),
            tokens_per_pass=tokens,
            tokens_per_pass_low=fewest,
            tokens_per_pass_high=most,
            speedup=speedup,
            low=low,
            high=high,
            end_to_end=(first[0] + decoded * plain_seconds) / (first[1] + decoded / tokens * step_seconds),
            plain_seconds=plain_seconds,
            step_seconds=step_seconds,
            **facts,
        )

    @property
    def num_speculative_tokens(self) -> int:
        """Draft length or tree size."""
        return int(self.config["num_speculative_tokens"])

    def to_dict(self) -> dict[str, Any]:
        """Returns the row for JSON. Infinite ends of intervals (one request) are None."""
        forms = export_config(self.config)
        facts = asdict(self) | {
            "num_speculative_tokens": self.num_speculative_tokens,
            "interval": [_finite(self.tokens_per_pass_low), _finite(self.tokens_per_pass_high)],
            "paste": {name: forms[engine] for engine, name in NAMES.items()} if self.best else None,
        }
        return {key: _finite(value) for key, value in facts.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

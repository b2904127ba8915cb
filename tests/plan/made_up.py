"""Rows of plans that no planner has made."""

from typing import Any

from foretoken.plan.candidates import PlanRow


def plan_row(method: str, depth: int, speedup: float, /, **facts: Any) -> PlanRow:
    """Returns a row whose estimates are all ``speedup``, but for ``facts``."""
    estimates = ("tokens_per_pass", "tokens_per_pass_low", "tokens_per_pass_high", "speedup", "low", "high")
    return PlanRow(
        **{
            "name": method,
            "method": method,
            "config": {"method": method, "num_speculative_tokens": depth},
            "temperature": 0.0,
            "batch": 1,
            **dict.fromkeys([*estimates, "end_to_end"], speedup),
            "step_seconds": 0.01,
            "draft_seconds": 0.001,
            "plain_seconds": 0.01,
            "acceptance": (0.5,),
            "estimator": "distribution",
            "requests": 4,
        }
        | facts
    )

"""Predicted speedups beside measured ones, with the errors of the predictions in figures and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from foretoken.plan.candidates import PlanRow
from foretoken.plan.endpoint.outcome import EndpointRow

WITHIN = 0.1


@dataclass(frozen=True)
class PredictedSpeed:
    """A speedup that was predicted, with its interval, and measured."""

    predicted: float
    low: float
    high: float
    measured: float

    @classmethod
    def of(cls, row: PlanRow | EndpointRow, measured: float) -> PredictedSpeed:
        return cls(row.speedup or 0.0, row.low or 0.0, row.high or 0.0, measured)

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "error": self.error, "covered": self.low <= self.measured <= self.high}


COLUMNS = {
    "predicted": "{predicted:.2f}x",
    "interval": "{low:.2f}-{high:.2f}",
    "measured": "{measured:.2f}x",
    "error": "{error:+.1%}",
    "covered": "{covered}",
}
"""Columns of a table of predictions; records are those of ``PredictedSpeed.to_dict``."""


def accuracy(speeds: Sequence[PredictedSpeed]) -> dict[str, float]:
    errors = [abs(speed.error) for speed in speeds]
    return {
        "median_error": median(errors),
        "within_10_percent": fmean(error <= WITHIN for error in errors),
        "coverage": fmean(speed.to_dict()["covered"] for speed in speeds),
    }


def accuracy_words(facts: dict[str, float]) -> str:
    """Returns a clause with these figures."""
    return (
        f"median error {facts['median_error']:.1%}, within 10 % {facts['within_10_percent']:.1%}, intervals cover "
        f"{facts['coverage']:.1%}"
    )

"""Predicted speedups beside measured ones, with the errors of the predictions in figures and in words."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from foretoken.plan.candidates import PlanRow
from foretoken.plan.endpoint.outcome import EndpointRow

WITHIN = 0.1
Prediction = Mapping[str, Any]  # a record of ``prediction``
COLUMNS = {
    "predicted": "{predicted:.2f}x",
    "interval": "{low:.2f}-{high:.2f}",
    "measured": "{measured:.2f}x",
    "error": "{error:+.1%}",
    "covered": "{covered}",
}
"""Columns of a table of predictions."""


def prediction(row: PlanRow | EndpointRow, measured: float) -> dict[str, Any]:
    """Returns the speedup that a plan predicts, with its interval, beside the measured one."""
    predicted, low, high = row.speedup or 0.0, row.low or 0.0, row.high or 0.0
    speeds = {"predicted": predicted, "low": low, "high": high, "measured": measured}
    return {**speeds, "error": predicted / measured - 1.0, "covered": low <= measured <= high}


def accuracy(predictions: Sequence[Prediction]) -> dict[str, float]:
    errors = [abs(each["error"]) for each in predictions]
    return {
        "median_error": median(errors),
        "within_10_percent": fmean(error <= WITHIN for error in errors),
        "coverage": fmean(each["covered"] for each in predictions),
    }


def accuracy_words(facts: Mapping[str, float]) -> str:
    """Returns a clause with these figures."""
    return (
        f"median error {facts['median_error']:.1%}, within 10 % {facts['within_10_percent']:.1%}, intervals cover "
        f"{facts['coverage']:.1%}"
    )

"""A plan as data: a row for every configuration, temperature and batch, and the choices that follow from the rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foretoken.plan.predictors import Predictor
from foretoken.plan.rows import PlanRow, export_config
from foretoken.plan.simulation.remote_drafting import RemoteDraftingEstimate


@dataclass(frozen=True)
class Choice:
    """The recommendation at one temperature and batch.

    Args:
        temperature: Sampling temperature.
        batch: Sequences at once.
        row: The fastest configuration, None for plain decoding.
        sure: Whether the interval of the speedup lies on one side of 1.
    """

    temperature: float
    batch: int
    row: PlanRow | None
    sure: bool

    def to_dict(self) -> dict[str, Any]:
        """Returns the choice for JSON."""
        return {
            "temperature": self.temperature,
            "batch": self.batch,
            "speculate": self.row is not None,
            "sure": self.sure,
            "row": self.row.to_dict() if self.row else None,
        }


@dataclass(frozen=True)
class Plan:
    """Result of the planner.

    Args:
        rows: One per candidate, draft length, temperature and batch.
        choices: One per temperature and batch.
        predictors: Predictors of a request's acceptance by draft and temperature, the best first.
        setting: Facts of machine and models.
        prompts: Description of the prompts.
        costs: Forward passes by rows, for each model.
        remote_drafting: Estimates of drafting on another machine, if requested.
    """

    rows: tuple[PlanRow, ...]
    choices: tuple[Choice, ...]
    predictors: Mapping[tuple[str, float], Sequence[Predictor]] = field(default_factory=dict)
    setting: Mapping[str, Any] = field(default_factory=dict)
    prompts: str = ""
    costs: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    remote_drafting: tuple[RemoteDraftingEstimate, ...] = ()

    @property
    def best(self) -> dict[str, Any] | None:
        """The configuration with the largest geometric mean of its speedups over all temperatures and batches.

        None means not to speculate.
        """
        groups: dict[tuple[str, int], list[PlanRow]] = {}
        for row in self.rows:
            groups.setdefault((row.name, row.num_speculative_tokens), []).append(row)
        if not groups:
            return None
        mean, best = max(
            ((math.prod(row.speedup for row in rows) ** (1 / len(rows)), rows[0]) for rows in groups.values()),
            key=lambda entry: entry[0],
        )
        return dict(best.config) if mean > 1.0 else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan for JSON and HTML pages."""
        best = self.best
        return {
            "setting": dict(self.setting),
            "prompts": self.prompts,
            "best": best,
            "exports": export_config(best) if best else None,
            "choices": [choice.to_dict() for choice in self.choices],
            "rows": [row.to_dict() for row in self.rows],
            "costs": {name: list(passes) for name, passes in self.costs.items()},
            "predictors": [
                asdict(each) | {"draft": draft, "temperature": temperature}
                for (draft, temperature), predictors in self.predictors.items()
                for each in predictors
            ],
            "remote_drafting": [each.to_dict() for each in self.remote_drafting],
        }


def mark_best(rows: Sequence[PlanRow]) -> Iterator[PlanRow]:
    """Yields the rows. The fastest at each temperature and batch is marked if its speedup exceeds 1."""
    fastest = {(row.temperature, row.batch): row for row in sorted(rows, key=lambda row: row.speedup)}
    for row in rows:
        yield replace(row, best=row is fastest[row.temperature, row.batch] and row.speedup > 1.0)


def choices(rows: Sequence[PlanRow]) -> Iterator[Choice]:
    """Yields a choice for each temperature and batch, in the order of the rows."""
    for temperature, batch in dict.fromkeys((row.temperature, row.batch) for row in rows):
        fastest = max(
            (row for row in rows if (row.temperature, row.batch) == (temperature, batch)), key=lambda row: row.speedup
        )
        gains = fastest.speedup > 1.0
        sure = fastest.low > 1.0 if gains else fastest.high < 1.0
        yield Choice(temperature, batch, replace(fastest, best=True) if gains else None, sure)

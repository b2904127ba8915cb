"""A plan as data: a row for every configuration, temperature and batch, and the choices that follow from the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foretoken.plan.exports import export_config
from foretoken.plan.predictors import Predictor
from foretoken.plan.rows import PlanRow
from foretoken.plan.simulation.remote_drafting import RemoteDraftingEstimate


@dataclass(frozen=True)
class Choice:
    """The recommendation at one temperature and batch."""

    temperature: float
    batch: int
    row: PlanRow | None  # the fastest configuration, None for plain decoding
    sure: bool  # whether the interval of the speedup lies on one side of 1

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
    """Result of the planner."""

    rows: tuple[PlanRow, ...]  # one per candidate, draft length, temperature and batch
    choices: tuple[Choice, ...]  # one per temperature and batch
    predictors: Mapping[tuple[str, float], Sequence[Predictor]] = field(default_factory=dict)  # see ``fitted``
    setting: Mapping[str, Any] = field(default_factory=dict)  # facts of machine and models
    prompts: str = ""  # their description
    costs: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)  # passes by rows, for each model
    remote_drafting: tuple[RemoteDraftingEstimate, ...] = ()  # drafting on another machine, if requested

    @classmethod
    def of(cls, rows: Sequence[PlanRow], **facts: Any) -> Plan:
        """Returns a plan with a choice for each temperature and batch, in the order of the rows. facts: other fields.

        The fastest row of each is marked as the best if its speedup exceeds 1.
        """
        fastest: dict[tuple[float, int], PlanRow] = {}
        for row in rows:
            place = row.temperature, row.batch
            if place not in fastest or row.speedup > fastest[place].speedup:
                fastest[place] = row
        marked = (replace(r, best=r.speedup > 1.0 and r is fastest[r.temperature, r.batch]) for r in rows)
        chosen = (
            Choice(*place, replace(top, best=True), top.low > 1.0)
            if top.speedup > 1.0
            else Choice(*place, None, top.high < 1.0)
            for place, top in fastest.items()
        )
        return cls(tuple(marked), tuple(chosen), **facts)

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

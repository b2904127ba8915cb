"""A plan as data: a row for every configuration, temperature and batch, and the choices that follow from the rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foretoken.plan.predictors import Predictor
from foretoken.plan.rows import PlanRow, exports
from foretoken.plan.simulation.remote_drafting import RemoteDraftingEstimate


@dataclass(frozen=True)
class Choice:
    """What to do at one temperature and batch. row: the fastest; None is plain decoding. sure: its interval says so."""

    temperature: float
    batch: int
    row: PlanRow | None
    sure: bool

    def to_dict(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature, "batch": self.batch, "speculate": self.row is not None, "sure": self.sure,
            "row": self.row.to_dict() if self.row else None,
        }  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What a planner found.

    predictors: by draft and temperature, which statistics foretell a request's acceptance, the best first.
    setting, prompts: facts of machine and models, and what text it was. costs: passes by rows, by model.
    elsewhere: what drafting on another machine would gain, where that was asked.
    """

    rows: tuple[PlanRow, ...]
    choices: tuple[Choice, ...]
    predictors: Mapping[tuple[str, float], Sequence[Predictor]] = field(default_factory=dict)
    setting: Mapping[str, Any] = field(default_factory=dict)
    prompts: str = ""
    costs: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    elsewhere: tuple[RemoteDraftingEstimate, ...] = ()

    @property
    def best(self) -> dict[str, Any] | None:
        """The configuration to use for everything that was asked about; None is not to speculate.

        The one with the largest geometric mean of its gains over temperatures and batches.
        """
        gains: dict[tuple[str, int], list[PlanRow]] = {}
        for row in self.rows:
            gains.setdefault((row.name, row.num_speculative_tokens), []).append(row)
        if not gains:
            return None
        mean, found = max(
            ((math.prod(row.speedup for row in rows) ** (1 / len(rows)), rows[0]) for rows in gains.values()),
            key=lambda entry: entry[0],
        )
        return dict(found.config) if mean > 1.0 else None

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON and for pages."""
        best = self.best
        return {
            "setting": dict(self.setting),
            "prompts": self.prompts,
            "best": best,
            "exports": exports(best) if best else None,
            "choices": [choice.to_dict() for choice in self.choices],
            "rows": [row.to_dict() for row in self.rows],
            "costs": {name: list(passes) for name, passes in self.costs.items()},
            "predictors": [
                asdict(each) | {"draft": draft, "temperature": temperature}
                for (draft, temperature), found in self.predictors.items()
                for each in found
            ],
            "elsewhere": [each.to_dict() for each in self.elsewhere],
        }


def mark(rows: Sequence[PlanRow]) -> Iterator[PlanRow]:
    """The rows, the fastest at every temperature and batch marked where it gains anything."""
    fastest = {(row.temperature, row.batch): row for row in sorted(rows, key=lambda row: row.speedup)}
    for row in rows:
        yield replace(row, best=row is fastest[row.temperature, row.batch] and row.speedup > 1.0)


def choices(rows: Sequence[PlanRow]) -> Iterator[Choice]:
    """One for each temperature and batch, in the order of the rows."""
    for temperature, batch in dict.fromkeys((row.temperature, row.batch) for row in rows):
        fastest = max(
            (row for row in rows if (row.temperature, row.batch) == (temperature, batch)), key=lambda row: row.speedup
        )
        gains = fastest.speedup > 1.0
        sure = fastest.low > 1.0 if gains else fastest.high < 1.0
        yield Choice(temperature, batch, replace(fastest, best=True) if gains else None, sure)

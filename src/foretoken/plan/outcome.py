"""A plan as data: a row for every configuration, temperature and batch, and what follows from the rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from foretoken.plan.exports import exports
from foretoken.plan.predictors import Predictor

if TYPE_CHECKING:
    from foretoken.plan.elsewhere import RemoteDraftingEstimate


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One prediction. config: what to paste.

    tokens_per_pass: prompts' passes left out. speedup: of decoding over plain decoding in the same batch, end_to_end
    with the prompts' passes; low and high: 95 of 100 further runs over as many requests should lie between them.
    round_seconds, draft_seconds, plain_seconds: a round, drafting in it, and a plain step, of the whole batch.
    acceptance: by position, rounds that accepted so deep over rounds that drafted so deep. estimator: "law", "text" or
    "rounds" (see ``chains`` and ``replay``). best: the fastest at its temperature and batch.
    """

    name: str
    method: str
    config: Mapping[str, Any]
    temperature: float
    batch: int
    tokens_per_pass: float
    tokens_per_pass_low: float
    tokens_per_pass_high: float
    speedup: float
    low: float
    high: float
    end_to_end: float
    round_seconds: float
    draft_seconds: float
    plain_seconds: float
    acceptance: tuple[float, ...]
    estimator: str
    requests: int
    best: bool = False

    @property
    def num_speculative_tokens(self) -> int:
        return int(self.config["num_speculative_tokens"])

    def to_dict(self) -> dict[str, Any]:
        """Endless intervals (one request) are None."""
        forms = exports(self.config)
        facts = asdict(self) | {
            "num_speculative_tokens": self.num_speculative_tokens,
            "interval": [_finite(self.tokens_per_pass_low), _finite(self.tokens_per_pass_high)],
            "paste": {"vLLM": forms["vllm"], "transformers": forms["transformers"]} if self.best else None,
        }
        return {key: _finite(value) for key, value in facts.items()}


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


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

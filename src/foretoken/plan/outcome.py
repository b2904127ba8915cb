"""A plan as data (a row for every configuration, temperature and batch, and the choices), and its terminal output."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from foretoken.costs.measured import PassCost
from foretoken.plan.candidates import PlanRow
from foretoken.plan.exports import export_config, export_lines
from foretoken.plan.predictors import CONSTANT, Predictor
from foretoken.plan.simulator import RemoteDraftingEstimate


@dataclass(frozen=True)
class Choice:
    """The recommendation at one temperature and batch."""

    temperature: float
    batch: int
    row: PlanRow | None  # the fastest configuration, None for plain decoding
    sure: bool  # whether the interval of the speedup lies on one side of 1

    def to_dict(self) -> dict[str, Any]:
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
    costs: Mapping[str, Sequence[PassCost]] = field(default_factory=dict)  # passes by rows, for each model
    remote_drafting: tuple[RemoteDraftingEstimate, ...] = ()  # drafting on another machine, if requested

    @classmethod
    def of(cls, rows: Sequence[PlanRow], **facts: Any) -> "Plan":
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
            "costs": {name: [asdict(cost) for cost in passes] for name, passes in self.costs.items()},
            "predictors": [
                asdict(each) | {"draft": draft, "temperature": temperature}
                for (draft, temperature), predictors in self.predictors.items()
                for each in predictors
            ],
            "remote_drafting": [each.to_dict() for each in self.remote_drafting],
        }


SHOWN = 3  # predictors per draft


def rendered(plan: Plan, pastes: Callable[[dict[str, Any]], Sequence[str]] | None = None) -> Iterator[Table | Text]:
    """Yields a table for every temperature and batch, the recommendations, and the configuration to paste.

    pastes: returns the lines to paste for the best configuration. None is those of every engine.
    """
    for choice in plan.choices:
        rows = [row for row in plan.rows if (row.temperature, row.batch) == (choice.temperature, choice.batch)]
        yield Text(f"\ntemperature {choice.temperature:g}, batch {choice.batch}", style="bold")
        yield _table(rows)
        yield _verdict(choice)
    yield from _predictors(plan)
    yield from _remote_drafting(plan)
    if plan.best is None:
        yield Text("\nover everything asked about: do not speculate", style="bold yellow")
        return
    yield Text("\nover everything asked about, paste", style="bold")
    yield from map(Text, (pastes or export_lines)(plan.best))


def comparison_table(first: str, last: str, rest: str) -> Table:
    """Returns an empty table of tokens per pass and speedups. first, last, rest: heads of the other columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for head in ("tokens", "tokens/pass", "interval", "speedup", "interval", last):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column(rest, style="dim", overflow="fold")
    return table


def _table(rows: Sequence[PlanRow]) -> Table:
    """Each proposer's best draft length in full, and the speedups of its other ones."""
    table = comparison_table("proposer", "step ms", "other depths")
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]
        top = max(own, key=lambda row: row.speedup)
        table.add_row(
            name,
            str(top.num_speculative_tokens),
            f"{top.tokens_per_pass:.2f}",
            _span(top.tokens_per_pass_low, top.tokens_per_pass_high),
            f"{top.speedup:.2f}x",
            _span(top.low, top.high),
            f"{top.step_seconds * 1e3:.2f}",
            "  ".join(f"{r.num_speculative_tokens}: {r.speedup:.2f}x" for r in own if r is not top),
            style="bold green" if top.best else "dim" if top.high < 1.0 else None,
        )
    if rows:
        table.add_row("plain", "", "1.00", "", "1.00x", "", f"{rows[0].plain_seconds * 1e3:.2f}", "")
    return table


def _span(low: float, high: float) -> str:
    return "one request" if not math.isfinite(high) else f"{low:.2f}-{high:.2f}"


def _verdict(choice: Choice) -> Text:
    row = choice.row
    if row is None:
        doubt = "" if choice.sure else " (not by much: the interval reaches above 1)"
        return Text(f"do not speculate: nothing is faster than plain decoding{doubt}", style="yellow")
    depth = row.num_speculative_tokens
    text = f"best: {row.name}, {depth} tokens, {row.speedup:.2f}x decoding, {row.end_to_end:.2f}x with the prompt"
    if choice.sure:
        return Text(text, style="green")
    return Text(f"{text}; may be unprofitable, the interval reaches below 1", style="yellow")


def _predictors(plan: Plan) -> Iterator[Text]:
    for (draft, temperature), predictors in plan.predictors.items():
        best = [each for each in predictors if each.name != CONSTANT][:SHOWN]
        constant = next(each.error for each in predictors if each.name == CONSTANT)
        named = ", ".join(f"{each.name} to {each.error:.3f}" for each in best)
        text = (
            f"\na request's acceptance by {draft} at temperature {temperature:g} is predicted within {constant:.3f} by "
            f"the mean; by {named}"
        )
        yield Text(text, style="dim")


def _remote_drafting(plan: Plan) -> Iterator[Table | Text]:
    """Speedups of drafting on another machine, beside drafting here."""
    estimates = plan.remote_drafting
    if not estimates:
        return
    yield Text(f"\ndrafting {1e3 * estimates[0].rtt:g} ms away, speedup over plain, simulated", style="bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("draft", overflow="fold")
    table.add_column("temperature", justify="right")
    for option in estimates[0].options:
        table.add_column("here" if option.strategy == "local" else option.strategy, justify="right", no_wrap=True)
    for each in estimates:
        cells = (f"{o.speedup:.2f}x" + ("" if o.depth is None else f" ({o.depth})") for o in each.options)
        table.add_row(each.name, f"{each.temperature:g}", *cells)
    yield table
    for each in estimates:
        yield Text(each.verdict, style="green")

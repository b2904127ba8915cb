"""Timeline chart: decode steps to scale, each divided into its parts, wrapped into lanes like lines of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.report.axes import WIDTH
from foretoken.report.charts import chart, missing
from foretoken.report.document import folded, table
from foretoken.report.markup import Html, element, figure

LANE, BAND = 42.0, 20.0  # height of a lane, and of the steps in it
STEPS_PER_LANE, LANES = 14, 24

STYLE = """
svg .part0 { fill: var(--c1); } svg .part1 { fill: var(--c0); } svg .part2 { fill: var(--c3); }
svg .part3 { fill: var(--c7); } svg .step:hover rect, svg .step.lit rect { filter: brightness(1.25); }
svg .step.lit .edge, svg .step:hover .edge { stroke: var(--ink); stroke-width: 2; }
svg .edge { fill: none; stroke: var(--paper); stroke-width: 1; }
.legend .part0 { fill: var(--c1); } .legend .part1 { fill: var(--c0); } .legend .part2 { fill: var(--c3); }
.legend .part3 { fill: var(--c7); }
"""


@dataclass(frozen=True, slots=True)
class StepLap:
    """One decode step.

    Args:
        number: Its number on the page.
        seconds: Seconds of its parts, in order.
        label: Text above it.
        note: Text shown when it is selected.
    """

    number: int
    seconds: tuple[float, ...]
    label: str
    note: str = ""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds)


@dataclass(frozen=True, slots=True)
class _Placed:
    lap: StepLap
    lane: int
    start: float  # seconds into the lane


def timeline(title: str, parts: Sequence[str], laps: Sequence[StepLap], *, note: str = "") -> Html:
    """Returns the chart of all steps to one scale.

    Args:
        title: Its title.
        parts: Names of the parts of a step.
        laps: The steps. Only the first ``STEPS_PER_LANE`` * ``LANES`` are drawn.
        note: Text below the title.
    """
    usable = [lap for lap in laps if math.isfinite(lap.total) and lap.total > 0]
    if not usable:
        return missing(title)
    drawn = usable[: STEPS_PER_LANE * LANES]
    mean = sum(lap.total for lap in drawn) / len(drawn)
    span = max(mean * min(len(drawn), STEPS_PER_LANE), *(lap.total for lap in drawn))
    placed = _wrap(drawn, span)
    per_second = WIDTH / span
    height = LANE * (placed[-1].lane + 1) + 4
    shapes = [_drawn(each, per_second, parts) for each in placed]
    description = (
        f"{len(drawn)} steps in {placed[-1].lane + 1} lanes of {figure(span * 1e3)} ms; parts: {', '.join(parts)}"
    )
    some = f"The first {len(drawn)} of {len(usable)} steps. " if len(drawn) < len(usable) else ""
    about = f"{some}{note} A whole line is {figure(span * 1e3)} ms.".strip()
    figures = folded("Figures", _figures(parts, usable))
    return chart(title, description, height, shapes, _legend(parts), figures, note=about)


def _wrap(laps: Sequence[StepLap], span: float) -> list[_Placed]:
    placed: list[_Placed] = []
    lane, at = 0, 0.0
    for lap in laps:
        if at + lap.total > span * (1 + 1e-9):
            lane, at = lane + 1, 0.0
        placed.append(_Placed(lap, lane, at))
        at += lap.total
    return placed


def _drawn(placed: _Placed, per_second: float, parts: Sequence[str]) -> Html:
    lap, x, y = placed.lap, placed.start * per_second, placed.lane * LANE + 16
    width = lap.total * per_second
    laps = ", ".join(f"{name} {figure(s * 1e3)} ms" for name, s in zip(parts, lap.seconds, strict=True))
    tip = f"step {lap.number}: {lap.note}; {laps}"
    shapes = [element("title", tip)]
    at = x
    for index, seconds in enumerate(lap.seconds):
        part = max(0.0, seconds) * per_second
        shapes.append(element("rect", x=at, y=y, width=part, height=BAND, class_=f"part{index % 4}"))
        at += part
    shapes.append(element("rect", x=x, y=y, width=width, height=BAND, rx=1.5, class_="edge"))
    if width >= 9 * len(lap.label):
        shapes.append(element("text", lap.label, x=x + width / 2, y=y - 4, text_anchor="middle"))
    return element("g", *shapes, class_="step", data_step=lap.number, data_tip=tip)


def _legend(parts: Sequence[str]) -> Html:
    items: list[Html] = []
    for index, name in enumerate(parts):
        key = element("rect", x=0, y=0, width=30, height=12, rx=2, class_=f"part{index % 4}")
        items.append(element("li", element("svg", key, viewbox="0 0 30 12", aria_hidden="true"), name))
    return element("ul", *items, class_="legend")


def _figures(parts: Sequence[str], laps: Sequence[StepLap]) -> Html:
    heads = ("step", "tokens", *(f"{name} ms" for name in parts), "total ms", "what happened")
    rows = [
        (lap.number, lap.label, *(figure(s * 1e3) for s in lap.seconds), figure(lap.total * 1e3), lap.note)
        for lap in laps
    ]
    return table(heads, rows)

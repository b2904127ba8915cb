"""Rounds one after another on a clock, each cut into its parts, wrapped into lanes as text is into lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.report.axes import WIDTH
from foretoken.report.charts import chart, missing
from foretoken.report.document import folded, table
from foretoken.report.markup import Html, element, figure

LANE, BAND = 42.0, 20.0  # a lane's height, and that of the rounds in it
ROUNDS_A_LANE, LANES = 14, 24

STYLE = """
svg .part0 { fill: var(--c1); } svg .part1 { fill: var(--c0); } svg .part2 { fill: var(--c3); }
svg .part3 { fill: var(--c7); } svg .round:hover rect, svg .round.lit rect { filter: brightness(1.25); }
svg .round.lit .edge, svg .round:hover .edge { stroke: var(--ink); stroke-width: 2; }
svg .edge { fill: none; stroke: var(--paper); stroke-width: 1; }
.legend .part0 { fill: var(--c1); } .legend .part1 { fill: var(--c0); } .legend .part2 { fill: var(--c3); }
.legend .part3 { fill: var(--c7); }
"""


@dataclass(frozen=True, slots=True)
class Lap:
    """One round: seconds of each part, in order, and what is written over it. number: as the page counts rounds."""

    number: int
    seconds: tuple[float, ...]
    label: str
    note: str = ""

    @property
    def total(self) -> float:
        return sum(self.seconds)


@dataclass(frozen=True, slots=True)
class _Placed:
    lap: Lap
    lane: int
    start: float  # seconds into the lane


def timeline(title: str, parts: Sequence[str], laps: Sequence[Lap], *, note: str = "") -> Html:
    """All rounds to one scale. parts: the names of the laps' seconds. Of very many, the first are drawn."""
    usable = [lap for lap in laps if math.isfinite(lap.total) and lap.total > 0]
    if not usable:
        return missing(title)
    drawn = usable[: ROUNDS_A_LANE * LANES]
    mean = sum(lap.total for lap in drawn) / len(drawn)
    span = max(mean * min(len(drawn), ROUNDS_A_LANE), *(lap.total for lap in drawn))
    placed = _wrap(drawn, span)
    per_second = WIDTH / span
    height = LANE * (placed[-1].lane + 1) + 4
    shapes = [_round(each, per_second, parts) for each in placed]
    said = f"{len(drawn)} rounds in {placed[-1].lane + 1} lanes of {figure(span * 1e3)} ms; parts: {', '.join(parts)}"
    some = f"The first {len(drawn)} of {len(usable)} rounds. " if len(drawn) < len(usable) else ""
    about = f"{some}{note} A whole line is {figure(span * 1e3)} ms.".strip()
    figures = folded("Figures", _figures(parts, usable))
    return chart(title, said, height, shapes, _legend(parts), figures, note=about)


def _wrap(laps: Sequence[Lap], span: float) -> list[_Placed]:
    placed: list[_Placed] = []
    lane, at = 0, 0.0
    for lap in laps:
        if at + lap.total > span * (1 + 1e-9):
            lane, at = lane + 1, 0.0
        placed.append(_Placed(lap, lane, at))
        at += lap.total
    return placed


def _round(placed: _Placed, per_second: float, parts: Sequence[str]) -> Html:
    lap, x, y = placed.lap, placed.start * per_second, placed.lane * LANE + 16
    width = lap.total * per_second
    laps = ", ".join(f"{name} {figure(s * 1e3)} ms" for name, s in zip(parts, lap.seconds, strict=True))
    said = f"round {lap.number}: {lap.note}; {laps}"
    shapes = [element("title", said)]
    at = x
    for index, seconds in enumerate(lap.seconds):
        part = max(0.0, seconds) * per_second
        shapes.append(element("rect", x=at, y=y, width=part, height=BAND, class_=f"part{index % 4}"))
        at += part
    shapes.append(element("rect", x=x, y=y, width=width, height=BAND, rx=1.5, class_="edge"))
    if width >= 9 * len(lap.label):
        shapes.append(element("text", lap.label, x=x + width / 2, y=y - 4, text_anchor="middle"))
    return element("g", *shapes, class_="round", data_round=lap.number, data_tip=said)


def _legend(parts: Sequence[str]) -> Html:
    items: list[Html] = []
    for index, name in enumerate(parts):
        key = element("rect", x=0, y=0, width=30, height=12, rx=2, class_=f"part{index % 4}")
        items.append(element("li", element("svg", key, viewbox="0 0 30 12", aria_hidden="true"), name))
    return element("ul", *items, class_="legend")


def _figures(parts: Sequence[str], laps: Sequence[Lap]) -> Html:
    heads = ("round", "tokens", *(f"{name} ms" for name in parts), "total ms", "what happened")
    rows = [
        (lap.number, lap.label, *(figure(s * 1e3) for s in lap.seconds), figure(lap.total * 1e3), lap.note)
        for lap in laps
    ]
    return table(heads, rows)

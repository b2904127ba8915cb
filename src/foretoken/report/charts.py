"""Charts as inline SVG, each with a title, a description and a table of its figures. Non-finite values are skipped.

Matplotlib renders them; colours are "C0" to "C7" for series, "k" for text and rules, and "0.5" for axes. In the page
they become variables of the style sheet, so that a drawing follows the light or dark theme.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from foretoken.core.errors import InvalidRequest
from foretoken.report.document import compact, figure, printable, text, ui

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH, HEIGHT = 480.0, 300.0  # small enough that text stays legible on a phone
LEGEND_LINE = 20.0  # height of an entry of the legend
MAX_POINTS = 400  # points of a series
BAR, LINE = 16.0, 46.0  # height of a bar, and of its row with the label
LANE, BAND = 42.0, 20.0  # height of a timeline's lane, and of the steps in it
STEPS_PER_LANE, LANES = 14, 24

_KINDS = {"ours": "C0", "theirs": "#8b98ab"}
_STEP_PARTS = ("C1", "C0", "C3", "C7")
_RULE: dict[str, Any] = {"color": "k", "linestyle": (0, (5, 4)), "linewidth": 1.3, "clip_on": False}


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis."""

    label: str  # quantity and unit
    zero: bool = False  # whether the axis includes 0
    log: bool = False  # logarithmic scale, for positive values
    at: tuple[float, ...] = ()  # positions of the ticks, empty for automatic ones
    high: float | None = None  # a value that is always shown

    def shows(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.log)


@dataclass(frozen=True, slots=True)
class Point:
    """One figure, with its interval if it has one. note: additional text."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one line. reference: a thin line without markers, for comparison."""

    name: str
    points: tuple[Point, ...]
    reference: bool = False

    @property
    def marked(self) -> bool:
        return not self.reference or len(self.points) == 1


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled figure. low, high: its whisker. kind: "ours" or "theirs", either with "plain"."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    kind: str = "ours"


@dataclass(frozen=True, slots=True)
class StepLap:
    """One decode step of a timeline."""

    number: int  # its number on the page
    seconds: tuple[float, ...]  # seconds of its parts, in order
    label: str  # text above it
    note: str = ""  # text shown when it is selected

    @property
    def total(self) -> float:
        return sum(self.seconds)


def lines(
    title: str, series: Sequence[Series], x: Axis, y: Axis, *, level: float | None = None, note: str = ""
) -> Markup:
    """Returns a line chart, intervals as bands. level: a value of ``y`` that is marked by a line."""
    drawn = _drawable(series, x, y)
    if not drawn:
        return missing(title)
    low, high = _range(drawn.values(), y, [] if level is None else [level])
    legend = len(drawn) > 1 or next(iter(drawn.values())).reference

    def paint(canvas: Figure) -> None:
        canvas.set_layout_engine("constrained")
        axes = canvas.subplots()
        for i, line in drawn.items():
            edges = _cut_intervals(line, low, high)
            if len(edges) > 1:
                xs, lower, upper = zip(*edges, strict=True)
                ys = (*lower, *reversed(upper))
                axes.fill((*xs, *reversed(xs)), ys, color=f"C{i % 8}", alpha=0.14, linewidth=0, clip_on=False)
            _plot(axes, i, line)
        if level is not None:
            axes.axhline(level, **_RULE)
        _set_up(axes, x, y)
        if legend:
            canvas.legend(loc="outside lower left")

    points = [(line, point) for line in drawn.values() for point in line.points]
    tips = [
        f"{line.name}: {y.label} {figure(p.y)}{f' ({_interval(p)})' if _interval(p) else ''}, {x.label} {p.x:.3g}"
        + (f", {p.note}" if p.note else "")
        for line, p in points
        if line.marked
    ]
    rows = [(line.name, f"{p.x:.3g}", figure(p.y), _interval(p), p.note) for line, p in points]
    columns = [0, 1, 2, *(i for i in (3, 4) if any(row[i] for row in rows))]
    heads = ("series", x.label, y.label, "interval", "note")
    description = f"{y.label} by {x.label}: {', '.join(line.name for line in drawn.values())}"
    figures, height = [[row[i] for i in columns] for row in rows], HEIGHT + LEGEND_LINE * len(drawn) * legend
    return _chart(title, description, height, paint, tips, [heads[i] for i in columns], figures, note)


def bars(title: str, items: Sequence[Bar], unit: str, *, level: float | None = None, note: str = "") -> Markup:
    """Returns a bar chart, one bar per line. level: a value that is marked across all bars."""
    shown = [bar for bar in items if math.isfinite(bar.value)]
    if not shown:
        return missing(title)
    edges = [[bar.value if v is None or not math.isfinite(v) else v for v in (bar.low, bar.high)] for bar in shown]
    end = max(*(high for _, high in edges), level or 0.0, 1e-12)

    def paint(canvas: Figure) -> None:
        axes = canvas.add_axes((0.0, 0.0, 0.87, 1.0))  # leaves space for the figure beside the longest bar
        axes.set(xlim=(0.0, end), ylim=(len(shown) - 1 + 16 / LINE, -30 / LINE))
        axes.set_axis_off()
        for row, (bar, (low, high)) in enumerate(zip(shown, edges, strict=True)):
            kind, _, plain = bar.kind.partition(" ")
            length, alpha = max(0.0, bar.value), 0.55 if plain else None
            axes.barh(row, length, height=BAR / LINE, color=_KINDS[kind], alpha=alpha, clip_on=False)
            if high > low:
                axes.plot([low, high], [row, row], color="k", linewidth=1.5, clip_on=False)
            axes.text(0.0, row - 15 / LINE, _words(bar.label))
            beside = max(length, high) + end / 50
            axes.text(beside, row, figure(bar.value), verticalalignment="center", fontweight="bold")
        if level is not None:
            axes.axvline(level, **_RULE)

    description = f"{unit}: " + "; ".join(f"{bar.label} {figure(bar.value)}" for bar in shown)
    rows = [(bar.label, figure(bar.value), _interval(bar)) for bar in shown]
    return _chart(title, description, LINE * len(shown), paint, (), (" ", unit, "interval"), rows, note)


def timeline(title: str, parts: Sequence[str], laps: Sequence[StepLap], *, note: str = "") -> Markup:
    """Returns all steps to one scale, each divided into its parts, wrapped into lanes like lines of text.

    Args:
        parts: Names of the parts of a step, at most four.
        laps: The steps. Only the first ``STEPS_PER_LANE`` * ``LANES`` are shown.
    """
    usable = [lap for lap in laps if math.isfinite(lap.total) and lap.total > 0]
    if not usable:
        return missing(title)
    drawn = usable[: STEPS_PER_LANE * LANES]
    totals = [lap.total for lap in drawn]
    span = max(sum(totals) / len(drawn) * min(len(drawn), STEPS_PER_LANE), *totals)
    lanes, starts = zip(*_wrapped(totals, span), strict=True)
    height = LANE * (lanes[-1] + 1)
    total_height = height + LEGEND_LINE

    def paint(canvas: Figure) -> None:
        axes = canvas.add_axes((0.0, LEGEND_LINE / total_height, 1.0, height / total_height))
        axes.set(xlim=(0.0, span), ylim=(lanes[-1] + 14 / LANE, -28 / LANE))
        axes.set_axis_off()
        shape: dict[str, Any] = {"height": BAND / LANE, "clip_on": False}
        lefts = list(starts)
        for index, name in enumerate(parts):
            widths = [max(0.0, lap.seconds[index]) for lap in drawn]
            axes.barh(lanes, widths, left=lefts, color=_STEP_PARTS[index], label=_words(name), **shape)
            lefts = [start + width for start, width in zip(lefts, widths, strict=True)]
        edges = axes.barh(lanes, totals, left=starts, fill=False, edgecolor="w", **shape)
        for lap, lane, start, edge in zip(drawn, lanes, starts, edges, strict=True):
            edge.set_gid(f"step-{lap.number}")
            if lap.total / span * WIDTH >= 9 * len(lap.label):
                axes.text(start + lap.total / 2, lane - 14 / LANE, _words(lap.label), horizontalalignment="center")
        canvas.legend(loc="lower left", ncols=len(parts), borderpad=0, borderaxespad=0)

    heads = ("step", "tokens", *(f"{name} ms" for name in parts), "total ms", "result")
    rows = [(lap.number, lap.label, *(figure(s * 1e3) for s in (*lap.seconds, lap.total)), lap.note) for lap in usable]
    times = [", ".join(f"{name} {ms} ms" for name, ms in zip(parts, row[2:], strict=False)) for row in rows]
    tips = [f"step {lap.number}: {lap.note}; {seconds}" for lap, seconds in zip(drawn, times, strict=False)]
    line = f"{figure(span * 1e3)} ms"
    description = f"{len(drawn)} steps in {lanes[-1] + 1} lanes of {line}; parts: {', '.join(parts)}"
    shown_part = f"The first {len(drawn)} of {len(usable)} steps. " if len(drawn) < len(usable) else ""
    about = f"{shown_part}{note} A whole line is {line}.".strip()
    return _chart(title, description, total_height, paint, tips, heads, rows, about)


def missing(title: str, why: str = "nothing was measured") -> Markup:
    """Returns a placeholder for a chart without data."""
    return Markup(ui().missing(title, why))


def _drawable(series: Sequence[Series], x: Axis, y: Axis) -> dict[int, Series]:
    """Returns plottable series by index: thinned to ``MAX_POINTS``, without intervals that have no end."""
    drawn = {}
    for i, line in enumerate(series):
        points = [point for point in line.points if x.shows(point.x) and y.shows(point.y)]
        if len(points) > MAX_POINTS:
            points = [points[k * (len(points) - 1) // (MAX_POINTS - 1)] for k in range(MAX_POINTS)]
        if points:
            bounded = (p if _bounded(p) else replace(p, low=None, high=None) for p in points)
            drawn[i] = replace(line, points=tuple(bounded))
    return drawn


def _bounded(point: Point) -> bool:
    return all(edge is not None and math.isfinite(edge) for edge in (point.low, point.high))


def _range(series: Iterable[Series], y: Axis, others: Sequence[float]) -> tuple[float, float]:
    """Returns the values that y must show: all figures, and intervals as far as they do not dwarf them."""
    points = [point for line in series for point in line.points]
    values = [*(point.y for point in points), *others]
    low, high = min(values), max(values)
    span = (high - low) or abs(high)
    edges = [min(max(v, low - span), high + span) for p in points for v in (p.low, p.high) if v is not None]
    shown = [value for value in (*values, *edges) if y.shows(value)]
    return min(shown), max(shown)


def _cut_intervals(series: Series, low: float, high: float) -> list[tuple[float, float, float]]:
    """Returns x, lower and upper end of the intervals, cut at ``low`` and ``high``."""
    return [
        (p.x, min(max(p.low, low), high), min(max(p.high, low), high))
        for p in series.points
        if p.low is not None and p.high is not None
    ]


def _plot(axes: Axes, number: int, series: Series) -> None:
    """Plots a series. Series differ by colour and by the shape of their markers."""
    axes.plot(
        [point.x for point in series.points],
        [point.y for point in series.points],
        color=f"C{number % 8}",
        linestyle=(0, (3, 4)) if series.reference else "-",
        linewidth=1.6 if series.reference else 2.0,
        marker="osD^"[(number + number // 8) % 4] if series.marked else None,
        markersize=8,
        markeredgecolor="w",
        label=_words(series.name, 50),
        clip_on=False,
    )


def _set_up(axes: Axes, x: Axis, y: Axis) -> None:
    """Sets labels, scales, limits and ticks, after the data was plotted."""
    axes.set_title(_words(y.label))
    axes.set_xlabel(_words(x.label))
    axes.grid(axis="y", clip_on=False)
    left, bottom = axes.dataLim.min
    axes.update_datalim([(0.0 if x.zero else left, 0.0 if y.zero else bottom)])
    if y.high is not None:
        axes.update_datalim([(left, y.high)])
    if x.log:
        axes.set_xscale("log", base=2)
    if y.log:
        axes.set_yscale("log", base=2)
    if x.at:
        axes.set_xticks(x.at)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.minorticks_off()
    axes.autoscale_view()


def _wrapped(totals: Sequence[float], span: float) -> list[tuple[int, float]]:
    """Returns the lane of each step, and its start in seconds into the lane."""
    positions: list[tuple[int, float]] = []
    lane, end = 0, 0.0
    for total in totals:
        if end + total > span * (1 + 1e-9):
            lane, end = lane + 1, 0.0
        positions.append((lane, end))
        end += total
    return positions


def _chart(
    title: str,
    description: str,
    height: float,
    paint: Callable[[Figure], None],
    tips: Iterable[str],
    heads: Sequence[str],
    rows: Sequence[Sequence[object]],
    note: str,
) -> Markup:
    """Returns a figure that ``paint`` renders. heads, rows: the table below it."""
    size = compact(WIDTH), compact(height)
    shapes, figures = render(WIDTH, height, paint, tips), ui().listing(heads, rows)
    return Markup(ui().chart(title, description, *size, shapes, figures, note))


def _interval(item: Point | Bar) -> str:
    """Returns an interval as text, empty if there is none."""
    return "" if item.low is None or item.high is None else f"{figure(item.low)}–{figure(item.high)}"


def _words(value: str, max_letters: int = 68) -> str:
    """Returns a text on one line, without characters that cannot be rendered."""
    line = " ".join(printable(value).split())
    return line if len(line) <= max_letters else line[: max_letters - 1] + "…"


_SERIES = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")  # "C0", "C1", ...
_VARIABLES = {"#000000": "ink", "#8b98ab": "theirs", "#808080": "dim", "#b0b0b0": "line", "#ffffff": "paper"} | {
    colour: f"c{i}" for i, colour in enumerate(_SERIES)
}
_STYLE: dict[Any, Any] = {
    "axes.prop_cycle": f"cycler('color', {list(_SERIES)})",
    "text.color": "k",
    "grid.color": "#b0b0b0",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    **dict.fromkeys(("font.size", "axes.titlesize", "legend.fontsize"), 13),
    "axes.titlelocation": "left",
    **dict.fromkeys(("axes.titlecolor", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "0.5"),
    **dict.fromkeys(("axes.spines.left", "axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.xmargin", "axes.ymargin", "xtick.major.size", "ytick.major.size"), 0),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    **dict.fromkeys(("xtick.major.pad", "ytick.major.pad"), 6),
    "axes.axisbelow": True,
    "axes.autolimit_mode": "round_numbers",
    "lines.solid_capstyle": "butt",
}


def render(width: float, height: float, paint: Callable[[Figure], None], tips: Iterable[str]) -> Markup:
    """Returns the shapes that ``paint`` renders, in the page's colours, without references, and with tooltips.

    Raises InvalidRequest if Matplotlib is not installed.

    tips: Tooltips of the markers, or of the shapes with ids "step-<number>", in drawing order.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequest("charts need matplotlib; pip install 'foretoken[report]'") from error
    buffer = StringIO()
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # matplotlib's font lacks a character; browsers have more fonts
        canvas = Figure(figsize=(width / 72, height / 72))
        paint(canvas)
        canvas.savefig(buffer, format="svg")
    return _inline(buffer.getvalue(), tips)


def _inline(svg: str, tips: Iterable[str]) -> Markup:
    pending = iter(tips)
    shapes = svg[svg.index('<g id="figure_1">') : svg.rindex("</svg>")]
    shapes = re.sub("<[^>]+>", lambda tag: _in_page_style(tag[0]), shapes)
    markers: Mapping[str, str] = dict(re.findall(r'<path id="(m\w+)" d="([^"]*)"', shapes))

    def marker(use: re.Match[str]) -> str:
        name, x, y, style = use.groups()
        shape = f'<path d="{markers[name]}" transform="translate({x} {y})" style="{style}"/>'
        tip = next(pending, None)
        return shape if tip is None else f'<g class="mark"><title>{text(tip)}</title>{shape}</g>'

    def step(group: re.Match[str]) -> str:
        tip = next(pending, "")
        return f'<g class="step" data-step="{group[1]}" data-tip="{text(tip)}"><title>{text(tip)}</title>'

    shapes = re.sub(r"<defs>.*?</defs>\s*", "", shapes, flags=re.DOTALL)
    shapes = re.sub(r'<use xlink:href="#(\w+)" x="([^"]*)" y="([^"]*)" style="([^"]*)"/>', marker, shapes)
    shapes = re.sub(r'<g id="step-(\d+)">', step, shapes)
    shapes = re.sub(r'<g id="[^"]*"/>', "", shapes)
    return Markup(re.sub(r'<g id="[^"]*">', "<g>", re.sub(r">\s+<", "><", shapes)))


def _in_page_style(tag: str) -> str:
    """Returns a tag with rounded coordinates, with variables for colours, and without a font family."""

    def rounded(attribute: re.Match[str]) -> str:
        value = " ".join(attribute[2].split())
        return attribute[1] + re.sub(r"-?\d+\.\d+", lambda number: compact(float(number[0])), value)

    tag = re.sub(r' transform="rotate\(-0 [^"]*"|font-family: [^;"]*;? ?', "", tag)
    tag = re.sub(r'( (?:d|x|y|transform)=")([^"]*)', rounded, tag)
    return re.sub("#[0-9a-f]{6}", lambda colour: f"var(--{_VARIABLES.get(colour[0], 'dim')})", tag)

"""Charts as inline SVG, each with a title, a description and a table of its figures. Non-finite values are skipped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foretoken.report.axes import HEIGHT, WIDTH, Axes, Axis, AxisScale, frame
from foretoken.report.document import folded, table
from foretoken.report.markup import Html, compact, element, figure, join
from foretoken.report.style import SERIES

MAX_POINTS = 400  # points of a series
BAR, LINE = 16.0, 46.0  # height of a bar, and of its row with the label
SQUARE = 496.0  # height at which both axes of a scatter plot are equally long
MAX_LETTERS = 68  # characters of a bar's label


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
    """Points of one line. reference: drawn thin, for comparison."""

    name: str
    points: tuple[Point, ...]
    reference: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled figure. low, high: its whisker. kind: CSS class: "ours" or "theirs", either with "plain"."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    kind: str = "ours"


def chart(title: str, description: str, height: float, shapes: Iterable[Html], *around: object, note: str = "") -> Html:
    """Returns a figure of ``shapes``, ``WIDTH`` wide. around: parts below it."""
    texts = element("title", title), element("desc", description)
    viewbox = f"0 0 {compact(WIDTH)} {compact(height)}"
    drawing = element("svg", *texts, *shapes, viewbox=viewbox, role="img")
    caption = element("figcaption", title, element("span", note, class_="note") if note else "")
    return element("figure", caption, drawing, *around)


def missing(title: str, why: str = "nothing was measured") -> Html:
    """Returns a placeholder for a chart without data."""
    return element("figure", element("figcaption", title), element("p", why, class_="note"))


def lines(
    title: str, series: Sequence[Series], x: Axis, y: Axis, *, level: float | None = None, note: str = ""
) -> Html:
    """Returns a line chart, intervals as bands. level: a value of ``y`` that is drawn across."""
    drawn = _drawn(series, x, y)
    if not drawn:
        return missing(title)
    every = [point for _, _, points in drawn for point in points]
    box = frame(x, y, [p.x for p in every], _heights(every, [] if level is None else [level]))
    shapes = [box.shapes, _level(box, level), *(_line(box, i, one, points, x, y) for i, one, points in drawn)]
    description = f"{y.label} by {x.label}: {', '.join(one.name for _, one, _ in drawn)}"
    legend = _legend([(i, one) for i, one, _ in drawn]) if len(drawn) > 1 or drawn[0][1].reference else Html()
    return chart(title, description, HEIGHT, shapes, legend, _figures(drawn, x.label, y.label), note=note)


def scatter(title: str, series: Sequence[Series], x: str, y: str, *, within: float = 0.0, note: str = "") -> Html:
    """Returns a scatter plot with the diagonal y = x, intervals of y as whiskers.

    Args:
        title: Its title.
        series: Its points.
        x: Label of the horizontal axis.
        y: Label of the vertical axis.
        within: Relative deviation from the diagonal that is shaded.
        note: Text below the title.
    """
    across, up = Axis(x, zero=True), Axis(y, zero=True)
    drawn = _drawn(series, across, up)
    if not drawn:
        return missing(title)
    points = [point for _, _, points in drawn for point in points]
    every = _heights(points, [point.x for point in points])
    box = frame(across, up, every, every, SQUARE)
    low, high = box.x.low, box.x.high
    more, less = 1 + within, 1 - within
    edges = [(low, low * more), (high / more, high), (high, high), (high, high * less), (low, low * less)]
    allowed = element("polygon", points=_path(box, edges), class_="allowed") if within else ""
    diagonal = element("line", x1=box.x(low), y1=box.y(low), x2=box.x(high), y2=box.y(high), class_="rule")
    marks = [_cloud(box, i, one, points, across, up) for i, one, points in drawn]
    description = f"{y} against {x}, {len(points)} points, with the diagonal"
    legend = _legend([(i, one) for i, one, _ in drawn]) if len(drawn) > 1 else Html()
    shapes = [box.shapes, join(allowed, diagonal), *marks]
    return chart(title, description, SQUARE, shapes, legend, _figures(drawn, x, y), note=note)


def bars(title: str, items: Sequence[Bar], unit: str, *, level: float | None = None, note: str = "") -> Html:
    """Returns a bar chart, one bar per line. level: a value that is drawn across all bars."""
    shown = [bar for bar in items if math.isfinite(bar.value)]
    if not shown:
        return missing(title)
    reach = [v for bar in shown for v in (bar.value, bar.high) if v is not None and math.isfinite(v)]
    across = AxisScale(0.0, max(*reach, level or 0.0, 1e-12), 0.0, WIDTH - 62)
    height = LINE * len(shown)
    shapes = [shape for at, bar in enumerate(shown) for shape in _bar(across, bar, at * LINE)]
    if level is not None:
        shapes.append(element("line", x1=across(level), y1=0, x2=across(level), y2=height, class_="rule"))
    description = f"{unit}: " + "; ".join(f"{bar.label} {figure(bar.value)}" for bar in shown)
    rows = [(bar.label, figure(bar.value), _interval(bar.low, bar.high)) for bar in shown]
    return chart(title, description, height, shapes, _folded(table((" ", unit, "interval"), rows)), note=note)


def _bar(across: AxisScale, bar: Bar, top: float) -> list[Html]:
    middle = top + 22 + BAR / 2
    low, high = (bar.value if v is None or not math.isfinite(v) else v for v in (bar.low, bar.high))
    shapes = [
        element("text", _short(bar.label), x=0, y=top + 15),
        element("rect", x=0, y=top + 22, width=max(0.0, across(bar.value)), height=BAR, rx=2, class_=bar.kind),
        element("text", figure(bar.value), x=across(max(bar.value, high)) + 8, y=middle + 4.5, font_weight=600),
    ]
    if high > low:
        whisker = element("line", x1=across(low), y1=middle, x2=across(high), y2=middle, class_="whisker")
        shapes.insert(2, whisker)
    return shapes


def _short(label: str) -> str:
    return label if len(label) <= MAX_LETTERS else label[: MAX_LETTERS - 1] + "…"


def _line(box: Axes, index: int, one: Series, points: Sequence[Point], x: Axis, y: Axis) -> Html:
    upper = [(p.x, p.high) for p in points if p.high is not None and p.low is not None]
    lower = [(p.x, p.low) for p in points if p.high is not None and p.low is not None]
    band = ""
    if len(upper) > 1:
        band = element("polygon", points=_path(box, [*upper, *reversed(lower)]), class_="band")
    curve = element("polyline", points=_path(box, [(p.x, p.y) for p in points]), class_="curve")
    marks = [] if one.reference and len(points) > 1 else [_mark(box, index, one.name, p, x, y) for p in points]
    return element("g", band, curve, *marks, class_=_class(index, one))


def _cloud(box: Axes, index: int, one: Series, points: Sequence[Point], x: Axis, y: Axis) -> Html:
    shapes: list[Html] = []
    for p in points:
        if p.low is not None and p.high is not None:
            at, low, high = box.x(p.x), box.y.clamped(p.low), box.y.clamped(p.high)
            shapes.append(element("line", x1=at, y1=low, x2=at, y2=high, class_="reach"))
        shapes.append(_mark(box, index, one.name, p, x, y))
    return element("g", *shapes, class_=_class(index, one))


def _mark(box: Axes, index: int, name: str, p: Point, x: Axis, y: Axis) -> Html:
    """Returns a point in the shape of its series, with a tooltip."""
    at, up = box.x(p.x), box.y(p.y)
    tip = f"{name}: {y.label} {figure(p.y)}"
    if p.low is not None and p.high is not None:
        tip += f" ({_interval(p.low, p.high)})"
    tip += f", {x.label} {p.x:.3g}" + (f", {p.note}" if p.note else "")
    hit = element("circle", cx=at, cy=up, r=10, class_="hit")
    return element("g", element("title", tip), shape(index, at, up), hit)


def shape(index: int, x: float, y: float, size: float = 4.5) -> Html:
    """Returns a circle, square, diamond or triangle, so that series differ by more than their colour."""
    kind = (index + index // SERIES) % 4
    if kind == 0:
        return element("circle", cx=x, cy=y, r=size, class_="mark")
    if kind == 1:
        return element(
            "rect", x=x - size + 0.5, y=y - size + 0.5, width=2 * size - 1, height=2 * size - 1, class_="mark"
        )
    corners = {
        2: [(x, y - size - 1), (x + size + 1, y), (x, y + size + 1), (x - size - 1, y)],
        3: [(x, y - size - 0.5), (x + size + 0.5, y + size), (x - size - 0.5, y + size)],
    }[kind]
    return element("polygon", points=" ".join(f"{compact(u)},{compact(v)}" for u, v in corners), class_="mark")


def _legend(series: Iterable[tuple[int, Series]]) -> Html:
    items: list[Html] = []
    for index, one in series:
        line = element("line", x1=0, y1=6, x2=30, y2=6, class_="curve")
        key = element(
            "svg", line, "" if one.reference else shape(index, 15, 6), viewbox="0 0 30 12", aria_hidden="true"
        )
        items.append(element("li", key, one.name, class_=_class(index, one)))
    return element("ul", *items, class_="legend")


def _class(index: int, one: Series) -> str:
    return f"s{index % SERIES}" + (" reference" if one.reference else "")


def _level(box: Axes, level: float | None) -> Html:
    if level is None:
        return Html()
    at = box.y(level)
    return element("line", x1=box.x.start, y1=at, x2=box.x.end, y2=at, class_="rule")


def _path(box: Axes, points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{compact(box.x(u))},{compact(box.y.clamped(v))}" for u, v in points)


def _heights(points: Sequence[Point], others: Sequence[float]) -> list[float]:
    """Returns values that the scale must show: all figures, and intervals as far as they do not dwarf them."""
    values = [*(point.y for point in points), *others]
    low, high = min(values), max(values)
    span = (high - low) or abs(high)
    edges = [v for point in points for v in (point.low, point.high) if v is not None]
    return [*values, *(min(max(v, low - span), high + span) for v in edges)]


def _drawn(series: Sequence[Series], x: Axis, y: Axis) -> list[tuple[int, Series, list[Point]]]:
    """Returns the series that have points to draw, each with its number."""
    usable = [(i, one, _finite(one.points, x, y)) for i, one in enumerate(series)]
    return [(i, one, points) for i, one, points in usable if points]


def _finite(points: Iterable[Point], x: Axis, y: Axis) -> list[Point]:
    """Returns the points that can be drawn, thinned to ``MAX_POINTS``, without intervals that are not finite."""
    good = [p for p in points if x.shows(p.x) and y.shows(p.y)]
    if len(good) > MAX_POINTS:
        good = [good[i * (len(good) - 1) // (MAX_POINTS - 1)] for i in range(MAX_POINTS)]
    return [p if _bounded(p) else Point(p.x, p.y, note=p.note) for p in good]


def _bounded(point: Point) -> bool:
    return all(v is not None and math.isfinite(v) for v in (point.low, point.high))


def _figures(drawn: Sequence[tuple[int, Series, Sequence[Point]]], x: str, y: str) -> Html:
    rows = [
        (one.name, f"{p.x:.3g}", figure(p.y), _interval(p.low, p.high), p.note)
        for _, one, points in drawn
        for p in points
    ]
    columns = [0, 1, 2, *(i for i in (3, 4) if any(row[i] for row in rows))]
    heads = ("series", x, y, "interval", "note")
    return _folded(table([heads[i] for i in columns], [[row[i] for i in columns] for row in rows]))


def _folded(figures: Html) -> Html:
    return folded("Figures", figures)


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{figure(low)}–{figure(high)}"

"""Charts: points are at their values, and no value breaks a chart."""

import math
import re
import sys
from xml.etree import ElementTree

import pytest
from matplotlib import rc_context

from foretoken.core.errors import InvalidRequest
from foretoken.report.charts import (
    LANES,
    MAX_POINTS,
    STEPS_PER_LANE,
    WIDTH,
    Axis,
    Bar,
    Point,
    Series,
    StepLap,
    bars,
    lines,
    timeline,
)
from foretoken.report.document import MAX_ROWS, ui
from foretoken.report.tokens import wilson

from .made_up import HOSTILE

X, Y = Axis("depth"), Axis("speed-up", zero=True)
NAN = math.nan


def drawn(markup: str) -> ElementTree.Element:
    root = ElementTree.fromstring(markup)
    for each in root.iter():
        for name, value in each.attrib.items():
            assert "nan" not in value and "inf" not in value.split(), (each.tag, name, value)
            assert "url(" not in value and "#" not in value and "font-family" not in value, (each.tag, name, value)
        if each.tag == "path" and not each.get("transform"):
            assert all(-1 <= x <= WIDTH + 1 for x, _ in corners(each)), each.get("d")
    return root


def corners(path: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path.get("d"))]


def paths(root: ElementTree.Element, *styles: str) -> list[list[tuple[float, float]]]:
    """The corners of the paths with these styles. The plot comes before the legend."""
    shapes = root.find("svg").iter("path")
    return [corners(path) for path in shapes if all(style in path.get("style", "") for style in styles)]


def marks(root: ElementTree.Element) -> list[tuple[float, float]]:
    shapes = [group.find("path") for group in root.iter("g") if group.get("class") == "mark"]
    return [tuple(map(float, re.findall(r"[\d.]+", shape.get("transform")))) for shape in shapes]


def labels(root: ElementTree.Element) -> list[str]:
    return [each.text for each in root.iter("text")]


def width(corners: list[tuple[float, float]]) -> float:
    return max(x for x, _ in corners) - min(x for x, _ in corners)


@pytest.mark.parametrize(
    "low, high, result",
    [
        (0, 1, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (0, 8, ["0", "2", "4", "6", "8"]),
        (0, 4096, ["0", "1,000", "2,000", "3,000", "4,000", "5,000"]),
    ],
)
def test_ticks_are_round_numbers_beyond_the_values(low, high, result):
    root = drawn(lines("t", [Series("a", (Point(101, low), Point(102, high)))], X, Axis("y")))
    assert [label for label in labels(root) if label in result] == result


def test_ticks_may_be_given():
    points = (Point(1, 0.5), Point(3, 0.5), Point(4096, 0.5))
    root = drawn(lines("t", [Series("a", points)], Axis("rows", log=True, at=(1, 3, 4096)), Y))
    assert [label for label in labels(root) if label in ("1", "3", "4,096")] == ["1", "3", "4,096"]


def test_a_logarithmic_axis_has_equal_steps_for_equal_ratios():
    (left, _), (middle, _), (right, _) = marks(
        drawn(lines("t", [Series("a", tuple(Point(x, 1) for x in (1, 8, 64)))], Axis("rows", log=True), Y))
    )
    assert middle - left == pytest.approx(right - middle, abs=0.2) and right > left + 300


def test_a_line_goes_through_its_points():
    points = (Point(1, 1.0, 0.9, 1.1), Point(2, 2.0, 1.8, 2.2), Point(4, 3.0, 2.5, 3.5))
    root = drawn(lines("Speed", [Series("a", points), Series("b", points, reference=True)], X, Y, level=1.0))
    curve, other = (paths(root, "fill: none", f"stroke: var(--c{i})")[0] for i in (0, 1))
    dashed = [path for path in root.iter("path") if "stroke-dasharray" in path.get("style", "")]
    assert [re.search(r"var\(--(\w+)", path.get("style"))[1] for path in dashed[:2]] == ["c1", "ink"]
    assert curve == other and len(curve) == 3 and marks(root) == curve
    xs, ys = zip(*curve, strict=True)
    assert xs[1] - xs[0] == pytest.approx((xs[2] - xs[1]) / 2, abs=0.2)
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2) and ys[0] > ys[1]
    assert len(paths(root, "opacity: 0.14")) == 2 and [label for label in labels(root) if label in "ab"] == ["a", "b"]
    assert len(root.findall(".//tbody/tr")) == 6
    assert "a: speed-up 2.00 (1.80–2.20), depth 2" in [each.text for each in root.iter("title")]


@pytest.mark.parametrize("points", [(), (Point(NAN, 1),), (Point(1, math.inf),), (Point(2, NAN), Point(NAN, NAN))])
def test_a_chart_without_points_says_so(points):
    chart = lines("t", [Series("a", points)], X, Y)
    assert drawn(chart).find("svg") is None and "nothing was measured" in chart
    assert "nothing was measured" in lines("t", [], X, Y)
    assert "nothing was measured" in bars("t", [Bar("a", NAN)], "u")
    assert "nothing was measured" in timeline("t", ["a"], [StepLap(1, (NAN,), "")])


@pytest.mark.parametrize("y", [0.0, 1.0, -3.0, 1e-9, 1e12])
def test_a_chart_of_one_point(y):
    for axis in (X, Axis("depth", log=True), Axis("depth", zero=True)):
        root = drawn(lines("t", [Series("a", (Point(1, y, NAN, 2),))], axis, Axis("y")))
        assert len(marks(root)) == 1


def test_an_interval_without_end_does_not_flatten_the_figures():
    points = (Point(1, 1.0, 0.0, 900.0), Point(2, 2.0, 1.9, 2.1))
    chart = lines("t", [Series("a", points)], X, Y)
    (_, first), (_, second) = marks(drawn(chart))
    assert first - second > 60
    assert "900" in chart  # in the table


def test_a_logarithmic_axis_skips_other_values():
    root = drawn(lines("t", [Series("a", (Point(0, 1), Point(-1, 1), Point(4, 1)))], Axis("x", log=True), Y))
    assert len(marks(root)) == 1


def test_bars_are_as_long_as_their_values():
    items = [Bar("<a>", 50.0, 45.0, 55.0), Bar("b", 25.0, NAN, None, kind="theirs"), Bar("none", NAN), Bar("zero", 0.0)]
    root = drawn(bars("Rates", items, "tokens/s", level=40))
    first, third = paths(root, "fill: var(--c0)")
    (second,) = paths(root, "fill: var(--theirs)")
    assert width(first) == pytest.approx(2 * width(second), abs=0.2) and width(third) == 0
    whisker, level = paths(root, "fill: none", "stroke: var(--ink)")
    assert width(whisker) == pytest.approx(width(first) / 5, abs=0.2)
    assert level[0][0] == pytest.approx(width(first) * 0.8, abs=0.2) and width(level) == 0
    assert labels(root) == ["<a>", "50.0", "b", "25.0", "zero", "0"]
    assert [row.findtext("td") for row in root.findall(".//tbody/tr")] == ["<a>", "b", "zero"]


def test_a_timeline_keeps_to_scale_and_wraps():
    laps = [StepLap(i, (0.001, 0.003, 0.0, 0.001), f"+{i % 3}", HOSTILE) for i in range(1, 41)]
    root = drawn(timeline("Rounds", ["propose", "score", "verify", "commit"], laps))
    steps = root.findall(".//g[@class='step']")
    assert len(steps) == 40 and {r.get("data-step") for r in steps} == {str(i) for i in range(1, 41)}
    assert all(HOSTILE[:8] in step.get("data-tip") and step.findtext("title") for step in steps)
    propose, score, whole = (
        width(paths(root, style)[0])
        for style in ("fill: var(--c1)", "fill: var(--c0)", "fill: none; stroke: var(--paper)")
    )
    assert score == pytest.approx(3 * propose, abs=0.3) and whole == pytest.approx(5 * propose, abs=0.5)
    assert len({corners(step.find("path"))[0][1] for step in steps}) == 3
    assert labels(root)[-4:] == ["propose", "score", "verify", "commit"]


def test_hostile_names_stay_text():
    points = (Point(1, 1.0, note=HOSTILE), Point(2, 2.0))
    series = [Series(HOSTILE, points), Series("$x_1$ \u6f22\u5b57", points)]
    for chart in (
        lines(HOSTILE, series, Axis(HOSTILE), Axis(HOSTILE), note=HOSTILE),
        bars(HOSTILE, [Bar(HOSTILE, 1.0)], HOSTILE),
        timeline(HOSTILE, [HOSTILE], [StepLap(1, (1.0,), HOSTILE, HOSTILE)]),
    ):
        root = ElementTree.fromstring(chart)
        assert root.findtext("svg/title").startswith("</style><script>") and not list(root.iter("script"))
    assert "$x_1$ \u6f22\u5b57" in labels(drawn(lines("t", series, X, Y)))


@pytest.mark.slow
def test_sizes_are_bounded():
    chart = lines("t", [Series("a", tuple(Point(i, i % 7, 0, i) for i in range(20_000)))], X, Y)
    assert len(chart) < 400_000
    assert len(marks(drawn(chart))) == MAX_POINTS
    laps = [StepLap(i, (0.001,), "+1") for i in range(5000)]
    chart = timeline("t", ["a"], laps)
    assert len(drawn(chart).findall(".//g[@class='step']")) == STEPS_PER_LANE * LANES
    assert "The first 336 of 5000 steps" in chart
    assert "and 4,000 more rows" in ui().listing(("a",), [(i,) for i in range(MAX_ROWS + 4000)])


def test_charts_do_not_depend_on_the_users_style():
    chart = lines("t", [Series("a", (Point(1, 1, 0.5, 2), Point(2, 2)))], X, Y, level=1)
    with rc_context({"axes.prop_cycle": "cycler('color', ['red'])", "text.color": "red", "grid.color": "red"}):
        assert lines("t", [Series("a", (Point(1, 1, 0.5, 2), Point(2, 2)))], X, Y, level=1) == chart


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'foretoken\[report\]'"):
        bars("t", [Bar("a", 1.0)], "u")


def test_wilson_intervals_are_the_known_ones():
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)

"""Charts: what they are given is where it should be, and nothing that they are given breaks them."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from foretoken.report.axes import WIDTH, Axis, AxisScale, frame, tick, ticks
from foretoken.report.charts import MAX_POINTS, Bar, Point, Series, bars, lines, scatter
from foretoken.report.document import MAX_ROWS, table
from foretoken.report.timeline import LANES, STEPS_PER_LANE, StepLap, timeline
from foretoken.report.trace import wilson

from .made_up import HOSTILE

X, Y = Axis("depth"), Axis("speed-up", zero=True)
NAN = math.nan


def drawn(markup: str) -> ElementTree.Element:
    root = ElementTree.fromstring(markup)
    for each in root.iter():
        for name, value in each.attrib.items():
            assert "nan" not in value and "inf" not in value.split(), (each.tag, name, value)
            if name in ("x", "x1", "x2", "cx"):
                assert -1 <= float(value) <= WIDTH + 1, (each.tag, name, value)
    return root


@pytest.mark.parametrize(
    "low, high, result",
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 3, [0, 0.5, 1, 1.5, 2, 2.5, 3]),
        (0, 8, [0, 2, 4, 6, 8]),
        (0.13, 0.17, [0.13, 0.14, 0.15, 0.16, 0.17]),
        (3, 3, [3]),
        (NAN, 1, []),
    ],
)
def test_ticks_are_round_numbers_within_the_range(low, high, result):
    assert ticks(low, high) == pytest.approx(result)


def test_tick_numbers():
    assert [tick(v, [0, 0.5, 1]) for v in (0, 0.5, 1)] == ["0.0", "0.5", "1.0"]
    assert tick(4096, [512, 4096]) == "4,096"


def test_scales_map_linearly_or_by_logarithm_and_clamp():
    assert AxisScale(0, 10, 0, 100)(2.5) == 25
    assert AxisScale(1, 100, 0, 100, log=True)(10) == pytest.approx(50)
    assert AxisScale(0, 10, 0, 100).clamped(99) == 100
    box = frame(Axis("rows", log=True), Y, [1, 2, 32], [0.2])
    assert (box.x.low, box.x.high, box.y.low) == (1, 32, 0)


def test_a_line_goes_through_its_points():
    points = (Point(1, 1.0, 0.9, 1.1), Point(2, 2.0, 1.8, 2.2), Point(4, 3.0, 2.5, 3.5))
    root = drawn(lines("Speed", [Series("a", points), Series("b", points, reference=True)], X, Y, level=1.0))
    curve, other = (each.get("points").split() for each in root.findall("svg/g/polyline"))
    assert curve == other and len(curve) == 3
    xs, ys = zip(*(map(float, pair.split(",")) for pair in curve), strict=True)
    assert xs[1] - xs[0] == pytest.approx((xs[2] - xs[1]) / 2, abs=0.2)
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2) and ys[0] > ys[1]
    assert len(root.findall("svg/g/polygon")) == 2 and len(root.findall(".//li")) == 2
    assert len(root.findall(".//tbody/tr")) == 6
    assert "a: speed-up 2.00 (1.80–2.20), depth 2" in [each.text for each in root.iter("title")]


@pytest.mark.parametrize("points", [(), (Point(NAN, 1),), (Point(1, math.inf),), (Point(2, NAN), Point(NAN, NAN))])
def test_nothing_to_draw_is_said(points):
    for chart in (lines("t", [Series("a", points)], X, Y), scatter("t", [Series("a", points)], "x", "y")):
        root = drawn(chart)
        assert root.find("svg") is None and "nothing was measured" in chart
    assert "nothing was measured" in lines("t", [], X, Y)
    assert "nothing was measured" in bars("t", [Bar("a", NAN)], "u")
    assert "nothing was measured" in timeline("t", ["a"], [StepLap(1, (NAN,), "")])


@pytest.mark.parametrize("y", [0.0, 1.0, -3.0, 1e-9, 1e12])
def test_one_point(y):
    for axis in (X, Axis("depth", log=True), Axis("depth", zero=True)):
        root = drawn(lines("t", [Series("a", (Point(1, y, NAN, 2),))], axis, Axis("y")))
        assert len(root.findall(".//circle[@class='mark']")) == 1
    drawn(scatter("t", [Series("a", (Point(1, y), Point(y, 1)))], "x", "y", within=0.1))


def test_an_interval_without_end_does_not_flatten_the_figures():
    points = (Point(1, 1.0, 0.0, 900.0), Point(2, 2.0, 1.9, 2.1))
    for chart in (lines("t", [Series("a", points)], X, Y), scatter("t", [Series("a", points)], "x", "y")):
        first, second = drawn(chart).findall(".//circle[@class='mark']")
        assert float(first.get("cy")) - float(second.get("cy")) > 60
        assert "900" in chart  # it is told all the same


def test_what_a_logarithm_cannot_show_is_left_out():
    root = drawn(lines("t", [Series("a", (Point(0, 1), Point(-1, 1), Point(4, 1)))], Axis("x", log=True), Y))
    assert len(root.findall(".//circle[@class='mark']")) == 1


def test_bars_are_as_long_as_their_numbers():
    items = [Bar("<a>", 50.0, 45.0, 55.0), Bar("b", 25.0, NAN, None, kind="theirs"), Bar("none", NAN), Bar("zero", 0.0)]
    root = drawn(bars("Rates", items, "tokens/s", level=40))
    first, second, third = root.findall("svg/rect")
    assert float(first.get("width")) == pytest.approx(2 * float(second.get("width")), abs=0.2)
    assert float(third.get("width")) == 0 and len(root.findall("svg/line[@class='whisker']")) == 1
    assert [row.findtext("td") for row in root.findall(".//tbody/tr")] == ["<a>", "b", "zero"]


def test_scatter_and_its_diagonal():
    root = drawn(scatter("t", [Series("a", (Point(1, 2, 1.5, 2.5), Point(3, 3)))], "x", "y", within=0.1))
    diagonal = root.find("svg/line[@class='rule']")
    at = root.findall(".//circle[@class='mark']")[1]
    across, up = (float(diagonal.get(k)) for k in ("x2", "y2"))
    assert float(at.get("cx")) <= across + 0.1 and float(at.get("cy")) >= up - 0.1
    assert len(root.findall(".//line[@class='reach']")) == 1
    box = [float(diagonal.get(k)) for k in ("x1", "x2", "y2", "y1")]
    assert box[1] - box[0] == pytest.approx(box[3] - box[2], rel=0.05)  # as wide as high


def test_a_timeline_keeps_to_scale_and_wraps():
    laps = [StepLap(i, (0.001, 0.003, 0.0, 0.001), f"+{i % 3}", HOSTILE) for i in range(1, 41)]
    root = drawn(timeline("Rounds", ["propose", "score", "verify", "commit"], laps))
    steps = root.findall("svg/g")
    assert len(steps) == 40 and {r.get("data-step") for r in steps} == {str(i) for i in range(1, 41)}
    widths = [float(rect.get("width")) for rect in steps[0].findall("rect")]
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.3) and widths[4] == pytest.approx(sum(widths[:4]), abs=0.3)
    assert len({r.find("rect").get("y") for r in steps}) == 3


def test_sizes_are_bounded():
    chart = lines("t", [Series("a", tuple(Point(i, i % 7, 0, i) for i in range(20_000)))], X, Y)
    assert len(chart) < 400_000
    assert len(drawn(chart).findall(".//circle[@class='mark']")) == MAX_POINTS
    laps = [StepLap(i, (0.001,), "+1") for i in range(5000)]
    chart = timeline("t", ["a"], laps)
    assert len(drawn(chart).findall("svg/g")) == STEPS_PER_LANE * LANES and "The first 336 of 5000 steps" in chart
    assert "and 4,000 more rows" in table(("a",), [(i,) for i in range(MAX_ROWS + 4000)])


def test_wilson_intervals_are_the_known_ones():
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)

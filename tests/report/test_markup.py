"""Markup: nothing gets in unescaped, and numbers read well."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from foretoken.report.markup import Html, compact, element, figure, join, number, percent, text, times

from .made_up import HOSTILE


def test_hostile_text_stays_text():
    made = element("p", HOSTILE, title=HOSTILE, class_="a", data_tip='"')
    root = ElementTree.fromstring(made)
    assert list(root) == [] and set(root.attrib) == {"title", "class", "data-tip"}
    assert "<script>" in root.text and "\x00" not in made and "\ud800" not in made
    made.encode("utf-8")


def test_markup_is_not_escaped_again():
    inner = element("b", "a < b")
    assert text(inner) is inner
    assert element("p", inner, " & ") == "<p><b>a &lt; b</b> &amp; </p>"
    assert join("<", inner) == "&lt;" + inner
    assert isinstance(join(), Html)
    assert element("p", title=Html("<b>")) == '<p title="&lt;b&gt;"></p>'


def test_attributes_are_written_as_html_has_them():
    assert element("meta", charset="utf-8") == '<meta charset="utf-8"/>'
    assert element("details", open_=True, hidden=False, id=None) == '<details open="open"></details>'
    assert element("line", x1=1.0, x2=2.345, viewbox="0 0 1 1") == '<line x1="1" x2="2.3" viewBox="0 0 1 1"></line>'


@pytest.mark.parametrize(
    "value, said",
    [
        (0.0, "0"),
        (1.234567, "1.23"),
        (12345.6, "12,346"),
        (0.001234, "0.00123"),
        (-2.5, "-2.50"),
        (1024, "1,024"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
        (99.96, "100.0"),
    ],
)
def test_figures_are_rounded_for_readers(value, said):
    assert figure(value) == said


def test_ratios_and_shares():
    assert (times(2.406), times(None), percent(0.5), percent(1e-5), percent(0.0), percent(math.nan)) == (
        "2.41x",
        "–",
        "50.0 %",
        "< 0.1 %",
        "0.0 %",
        "–",
    )
    assert compact(-0.04) in ("0", "-0")
    assert [number(v) for v in (1, 2.5, True, "3", math.nan, None)] == [1.0, 2.5, None, None, None, None]

"""Elements of pages: whole, offline and escaped."""

import math
from xml.etree import ElementTree

import pytest
from markupsafe import Markup

from foretoken.report.document import compact, figure, interval, percent, render, text, times, ui

from .made_up import HOSTILE
from .parsed import read, words


def test_hostile_titles_and_settings_are_escaped():
    setting = {HOSTILE: HOSTILE, "peers": {HOSTILE: 1}}
    root = read(render("page.jinja", setting, title=HOSTILE, lead=HOSTILE, footer=HOSTILE))
    assert words(root.find("body/h1")).startswith("</style><script>")
    assert root.findtext(".//dd").startswith("</style>")


def test_hostile_text_stays_text():
    made = ui().cells((HOSTILE,), 1)
    root = ElementTree.fromstring(made)
    assert list(root) == [] and set(root.attrib) == {"class"}
    assert "<script>" in root.text and "\x00" not in made and "\ud800" not in made
    made.encode("utf-8")
    badge = ElementTree.fromstring(ui().badge(f'"{HOSTILE}', "a"))
    assert badge.attrib.keys() == {"class"} and badge.get("class").startswith('badge "</style>')


def test_markup_is_not_escaped_again():
    inner = text("a < b")
    assert inner == "a &lt; b" and text(inner) is inner
    assert ui().note(inner + " & ") == '<p class="note">a &lt; b &amp; </p>'
    assert ui().note("<" + inner) == '<p class="note">&lt;a &lt; b</p>'
    assert isinstance(ui().note(""), Markup) and text(None) == "–"
    assert ui().badge("<b>", "") == '<span class="badge &lt;b&gt;"></span>'


def test_attributes_are_written_as_html_has_them():
    assert ui().folded("a", "b", open=True).strip() == '<details open="open"><summary>a</summary>b</details>'
    assert ui().folded("a", "b").strip() == "<details><summary>a</summary>b</details>"
    assert '<meta charset="utf-8"/>' in render("page.jinja", title="t")
    assert 'viewBox="0 0 1 2.3"' in ui().chart("t", "d", compact(1.0), compact(2.345), "", "", "")


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
    assert (interval(0.5, 2), interval(0.0, math.inf), interval(None, 1.0)) == ("0.50–2.00", "", "")

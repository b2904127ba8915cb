"""The pages of a plan, an audit and a benchmark: whole, offline, escaped, and saying what the records say."""

import math
from dataclasses import asdict
from xml.etree import ElementTree

import pytest
from markupsafe import Markup

from foretoken.costs.measured import PassCost, TimeSpread
from foretoken.plan.outcome import Plan
from foretoken.plan.predictors import Predictor
from foretoken.report import audit, plan
from foretoken.report.document import compact, figure, number, percent, render, text, times, ui

from . import made_up
from .made_up import HOSTILE
from .parsed import read, words


def test_hostile_titles_and_settings_are_escaped():
    setting = {HOSTILE: HOSTILE, "peers": {HOSTILE: 1}}
    root = read(render("page.jinja", setting, title=HOSTILE, lead=HOSTILE, footer=HOSTILE))
    assert words(root.find("body/h1")).startswith("</style><script>")
    assert root.findtext(".//dd").startswith("</style>")


@pytest.mark.slow
def test_the_page_of_a_plan():
    root = read(plan.page(made_up.plan()))
    text = words(root.find("body"))
    assert "Speculate with draft_model tiny-1m, 6 draft tokens per step" in text
    assert "Temperature 0, batch 1: 2.47x" in text and "All 24 rows" in text and "a <fast> one" in text
    titles = [each.text for each in root.iterfind(".//svg/title")]
    for title in (
        "Temperature 1, batch 4",
        "tiny-15m",
        "draft_model tiny-1m at temperature 1",
    ):
        assert title in titles
    pasted = [each.text for each in root.iterfind(".//pre/code")]
    assert pasted[0] == '{"method": "draft_model", "num_speculative_tokens": 6}' and pasted[2].endswith(
        "model.generate()"
    )
    bold = root.findall(".//tr[@class='best']")
    assert {words(row[0]) for row in bold} == {"draft_model tiny-1m"}


def test_a_plan_may_say_do_not_speculate():
    row = {"method": "ngram", "num_speculative_tokens": 4, "temperature": 1.0, "batch": 16, "speedup": 0.8, "low": None}
    choice = {"temperature": 1.0, "batch": 16, "speculate": False, "sure": True, "row": None}
    text = words(read(plan.page({"rows": [row], "choices": [choice], "best": None, "exports": None})))
    assert "Do not speculate" in text and "Temperature 1, batch 16: do not speculate" in text
    doubtful = row | {
        "speedup": 1.05,
        "low": 0.97,
        "high": 1.13,
        "config": {"method": "ngram", "num_speculative_tokens": 4},
    }
    choice = choice | {"speculate": True, "sure": False, "row": doubtful}
    text = words(read(plan.page({"rows": [doubtful], "choices": [choice], "best": doubtful["config"], "exports": {}})))
    assert "1.05x (0.97–1.13) with ngram, 4 draft tokens; its interval includes 1" in text


def test_the_page_of_an_audit():
    root = read(audit.page(made_up.audit()))
    text = words(root.find("body"))
    for said in (
        "Not exact",
        "greedy parity",
        "not a tie",
        "return y + 2",
        "1.0 %of probability moved",
        "z = +0.",
        "G = 21.3 on 19",
        "2 p/q",
        "120,000 tokens would show it",
        "it does not promise",
    ):
        assert said in text, said
    assert [mark.text for mark in root.iter("mark")] == ["x + 1\n", "y + 2\n"]
    assert "Exact, as far as it was tested" in words(read(audit.page(made_up.audit("passed"))))


def _spoilt(value, poison):
    """The record with every leaf replaced."""
    if isinstance(value, dict):
        return {key: _spoilt(item, poison) for key, item in value.items()}
    return [_spoilt(item, poison) for item in value] if isinstance(value, list) else poison


POISONS = {"hostile": HOSTILE, "null": None, "nan": math.nan, "inf": math.inf, "negative": -1, "zero": 0, "empty": ""}
POISONS |= {"list": [], "object": {}, "true": True, "huge": 10**400}


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_no_record_breaks_a_page(poison):
    for page, made in (
        (plan.page, made_up.plan()),
        (audit.page, made_up.audit()),
    ):
        read(page(_spoilt(made, poison)))
        read(page(dict.fromkeys(made, poison)))
        read(page({}))


@pytest.mark.slow
def test_sizes_are_bounded():
    rows = made_up.plan()["rows"] * 12
    assert len(plan.page(made_up.plan() | {"rows": rows})) < 3_000_000
    assert len(plan.page(made_up.plan())) < 400_000
    assert len(audit.page(made_up.audit())) < 100_000


@pytest.mark.slow
def test_acceptance_is_labelled_as_the_engine_measures_it():
    assert "share of steps accepted so deep" in plan.page(made_up.plan())
    assert "accepted, given those before" in plan.page(made_up.plan() | {"engine": "vllm"})


def test_the_page_of_a_plan_shows_its_costs_and_predictors():
    measured = TimeSpread(0.01, 0.009, 0.012, 5)
    result = Plan(
        rows=(),
        choices=(),
        predictors={("tiny-1m", 0.0): [Predictor("constant", 0.0, 0.05, 0.0, 0.6)]},
        costs={"tiny-15m": [asdict(PassCost(rows, 256, 1, measured, measured, 0, 0)) for rows in (1, 4)]},
    )
    titles = [each.text for each in read(plan.page(result.to_dict())).iterfind(".//svg/title")]
    assert titles == ["tiny-15m", "tiny-1m at temperature 0"]


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
    assert [number(v) for v in (1, 2.5, True, "3", math.nan, None)] == [1.0, 2.5, None, None, None, None]

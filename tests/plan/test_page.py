"""The page of a plan: whole, offline, escaped, and saying what the plan says."""

import json
import math
from dataclasses import replace

import pytest
from tests.report.made_up import HOSTILE, SETTING
from tests.report.parsed import read, words

from foretoken.costs.measured import PassCost, TimeSpread
from foretoken.plan.candidates import PlanRow
from foretoken.plan.endpoint.outcome import EndpointPlan, EndpointRow
from foretoken.plan.outcome import Plan
from foretoken.plan.page import endpoint_page, from_record, page
from foretoken.plan.predictors import Predictor
from foretoken.plan.simulator import DraftingOption, RemoteDraftingEstimate

from .made_up import plan_row


def row(method: str, depth: int, tokens: float, cost: float, rates: tuple[float, ...] = (), **facts) -> PlanRow:
    made = {
        "name": f"{method} tiny-1m",
        "tokens_per_pass": tokens,
        "tokens_per_pass_low": tokens * 0.95,
        "tokens_per_pass_high": tokens * 1.05,
        "low": tokens / cost * 0.92,
        "high": tokens / cost * 1.09,
        "end_to_end": tokens / cost * 0.9,
        "step_seconds": 0.02 * cost,
        "plain_seconds": 0.02,
        "acceptance": rates,
    }
    return plan_row(method, depth, tokens / cost, **made | facts)


def planned() -> Plan:
    rows = []
    for temperature in (0.0, 1.0):
        for batch in (1, 4):
            for name, rate in {"draft_model": 0.82, "eagle3": 0.74, "ngram": 0.35, "suffix": 0.42}.items():
                alpha = rate - 0.12 * temperature
                for depth in (1, 2, 3, 4, 6, 8):
                    tokens = (1 - alpha ** (depth + 1)) / (1 - alpha)
                    cost = 1 + 0.05 * depth * (1 + 0.5 * batch) + (0.04 * depth if "m" in name else 0.0)
                    rates = tuple(alpha**k for k in range(1, depth + 1))
                    rows.append(row(name, depth, tokens, cost, rates, temperature=temperature, batch=batch))
    floor = TimeSpread(0.018, 0.017, 0.03, 5)
    costs = [
        PassCost(m, context, 1, TimeSpread(seconds, seconds * 0.96, seconds * 1.1, 5), floor, 0, 0)
        for context in (512, 4096)
        for m in (1, 2, 3, 4, 5, 8, 12, 16)
        for seconds in [0.02 * (1 + m / 20 + 0.2 * (m > 4)) * (1 + context / 9000)]
    ]
    errors = {"total variation": (-0.97, 0.012), "draft entropy": (-0.4, 0.047), "constant": (0.0, 0.052)}
    predictors = [Predictor(name, r, error, 1.0, 0.0) for name, (r, error) in errors.items()]
    options = DraftingOption("local", 4, 1.5), DraftingOption("si", 6, 1.2), DraftingOption("dsd", None, 1.3)
    return Plan.of(
        rows,
        setting=SETTING,
        costs={"tiny-15m": costs},
        predictors={("draft_model tiny-1m", 1.0): predictors},
        remote_drafting=(RemoteDraftingEstimate("draft_model tiny-1m", 0.0, 0.02, options),),
    )


@pytest.mark.slow
def test_the_page_of_a_plan():
    plan = planned()
    transformers = "draft = AutoModelForCausalLM.from_pretrained('x')\nmodel.generate()"
    page_text = page(plan, {"foretoken": plan.best, "vllm": plan.best, "max": None, "transformers": transformers})
    assert len(page_text) < 400_000
    root = read(page_text)
    text = words(root.find("body"))
    assert "Speculate with draft_model tiny-1m, 4 draft tokens per step" in text
    assert "Temperature 0, batch 1: 2.47x" in text and "All 24 rows" in text and "a <fast> one" in text
    assert "share of steps accepted so deep" in text and "draft here: 1.50x plain, 1.30x at best there (dsd)" in text
    titles = [each.text for each in root.iterfind(".//svg/title")]
    for title in (
        "Temperature 1, batch 4",
        "tiny-15m",
        "draft_model tiny-1m at temperature 1",
    ):
        assert title in titles
    pasted = [each.text for each in root.iterfind(".//pre/code")]
    assert pasted[0] == '{"method": "draft_model", "num_speculative_tokens": 4}' and pasted[2].endswith(
        "model.generate()"
    )
    bold = root.findall(".//tr[@class='best']")
    assert {words(row[0]) for row in bold} == {"draft_model tiny-1m"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["foretoken", "vllm"])
def test_a_record_gives_the_same_page(engine):
    single = row("ngram", 4, 1.2, 1.0, tokens_per_pass_high=math.inf, high=math.inf)
    for plan in (planned(), Plan.of([single], setting=SETTING), Plan.of([replace(single, speedup=0.5)])):
        record = json.loads(json.dumps(plan.to_dict(), allow_nan=False)) | {"engine": engine}
        assert from_record(record) == page(plan, record["exports"] or {}, conditional=engine == "vllm")


def test_a_plan_may_say_do_not_speculate():
    slower = row("ngram", 4, 0.8, 1.0, temperature=1.0, batch=16)
    text = words(read(page(Plan.of([slower]), {})))
    assert "Do not speculate" in text and "Temperature 1, batch 16: do not speculate" in text
    doubtful = replace(slower, speedup=1.05, low=0.97, high=1.13)
    text = words(read(page(Plan.of([doubtful]), {})))
    assert "1.05x (0.97–1.13) with ngram tiny-1m, 4 draft tokens; its interval includes 1" in text


def test_acceptance_is_labelled_as_vllm_measures_it():
    assert "accepted, given those before" in page(Plan.of([row("ngram", 1, 1.5, 1.0, (0.5,))]), {}, conditional=True)


def test_the_page_of_a_plan_shows_its_costs_and_predictors():
    measured = TimeSpread(0.01, 0.009, 0.012, 5)
    plan = Plan(
        rows=(),
        choices=(),
        predictors={("tiny-1m", 0.0): [Predictor("constant", 0.0, 0.05, 0.0, 0.6)]},
        costs={
            "tiny-15m": [PassCost(rows, 256, 1, measured, floor, 0, 0) for rows, floor in ((1, None), (4, measured))]
        },
    )
    titles = [each.text for each in read(page(plan, {})).iterfind(".//svg/title")]
    assert titles == ["tiny-15m", "tiny-1m at temperature 0"]


FIGURES = {"nan": math.nan, "infinite": math.inf, "negative": -1.0, "zero": 0.0, "huge": 1e300}


@pytest.mark.parametrize("value", FIGURES.values(), ids=FIGURES)
def test_no_name_and_no_figure_breaks_a_page(value):
    spoilt = replace(row("ngram", 2, 1.5, 1.0, (value, 0.5)), name=HOSTILE, config={"num_speculative_tokens": 2})
    widths = dict.fromkeys(("tokens_per_pass", "tokens_per_pass_low", "tokens_per_pass_high", "low", "high"), value)
    spoilt = replace(spoilt, **widths, step_seconds=value, end_to_end=value, draft_seconds=value)
    predictors = {(HOSTILE, 1.0): [Predictor(HOSTILE, 0.0, value, value, value)]}
    plan = Plan.of([spoilt, replace(spoilt, speedup=abs(value))], predictors=predictors, setting={HOSTILE: HOSTILE})
    assert "<script>alert" in words(read(page(plan, {"vllm": {HOSTILE: value}, "max": HOSTILE})))
    served = EndpointRow(
        name=HOSTILE,
        method="",
        config=None,
        depth=2,
        concurrency=4,
        acceptance=(),
        plain_tokens_per_second=value,
        **widths,
    )
    rows = tuple(replace(served, speedup=speedup, measured=True) for speedup in (None, value, 1.5))
    text = words(read(endpoint_page(EndpointPlan({"model": HOSTILE}, HOSTILE, (HOSTILE,), rows, paste=(HOSTILE,)))))
    assert "Cannot tell, because" in text and "<script>alert" in text


@pytest.mark.slow
def test_sizes_are_bounded():
    assert len(page(replace(planned(), rows=planned().rows * 12), {})) < 3_000_000

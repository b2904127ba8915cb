"""The page of an audit: whole, offline, escaped, and saying what the checks say."""

import json
import math
from dataclasses import asdict

import pytest
from tests.report.made_up import HOSTILE
from tests.report.parsed import read, words

from foretoken.audit.endpoint.parameters import ParameterFinding, Treatment, findings_check
from foretoken.audit.endpoint.parity import TextDivergence
from foretoken.audit.equality import Divergence
from foretoken.audit.negative import Plant, control_check
from foretoken.audit.page import from_record, page
from foretoken.audit.subject import Audit, Check, CheckOutcome
from foretoken.audit.tally import Statistic

WHAT = {"ranks": "probability moved between ranks", "surprise": "nats a token"}


def statistics() -> list[dict[str, object]]:
    names = ("ranks", "surprise", "likeliest token", "unlikely tokens", "toward the draft")
    return [
        asdict(
            Statistic(
                f"{group}: {name}",
                21.3 if name == "ranks" else 0.7 * math.cos(i * 7 + len(group)),
                19 if name == "ranks" else 0,
                0.9 / (1 + 3 * i),
                0.01 * (i + 1),
                WHAT.get(name, "change of the rate"),
            )
        )
        for group in ("all tokens", "first", "second")
        for i, name in enumerate(names)
    ]


def audited(greedy: CheckOutcome = CheckOutcome.FAILED, word: str = "") -> Audit:
    plain, other = f"def f(x):\n    return x + 1\n{word}", f"def f(x):\n    return y + 2\n{word}"
    divergences = [
        asdict(TextDivergence(2, 17, f"alone{word}", 0.031, "bug", plain, other)) | {"tie": False},
        asdict(Divergence(5, 3)) | {"tie": False},
    ]
    fits = [
        {"g": 80.2, "dof": 77, "p_value": 0.38, "finds": 0.04},
        {"g": None, "dof": 0, "p_value": 0.0, "finds": 0.0},
    ]
    found = Statistic("first: toward the draft", 9.2, 0, 1e-9, 0.01, "of the draft's distribution")
    plants = [
        Plant(f"a rejected token is replaced by a draw from p{word}", 4096, (found,), 0, None),
        Plant("drafts are accepted with 2 p/q", 40960, (), 0, 120000),
    ]
    passed = CheckOutcome.PASSED
    law = {"tokens": 40960, "impossible": 0, "level": 2e-5, "statistics": statistics()}
    checks = (
        Check(
            "greedy parity",
            greedy,
            f"2 of 32 texts part{word}",
            {"texts": {"alone": 16}, "tokens": 1024, "divergences": divergences if greedy == "failed" else []},
            12.5,
        ),
        Check("self-draft control", passed, "accepted whole", {"accepted_whole": {"greedy": 1.0}, "required": 1.0}),
        Check("sampled distribution", passed, "40,960 tokens, 15 statistics", law),
        Check("prefix distribution", passed, "first 3 tokens of 8,192 texts", {"texts": 8192, "fits": fits}),
        control_check(plants),
        findings_check("other parameters", [ParameterFinding("stop", None, Treatment.HONOURED, f"seen{word}")]),
        Check("seeded distribution", CheckOutcome.SKIPPED, "it does not promise one text for one seed"),
    )
    subject = {"engine": "foretoken", "model": f"/a/target{word}", "draft_model": "/a/draft", "method": "draft_model"}
    return Audit(subject, checks, 118.2)


def test_the_page_of_an_audit():
    document = page(audited())
    assert len(document) < 100_000
    root = read(document)
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
        "honoured",
    ):
        assert said in text, said
    assert [mark.text for mark in root.iter("mark")] == ["x + 1\n", "y + 2\n"]


@pytest.mark.parametrize(
    "outcome, said", [("passed", "Exact, as far as it was tested"), ("inconclusive", "Inconclusive")]
)
def test_the_verdict_is_that_of_the_audit(outcome, said):
    checks = (Check("a", CheckOutcome(outcome), ""), Check("negative control", CheckOutcome.PASSED, ""))
    assert said in words(read(page(Audit({}, checks, 1.0))))


def test_a_record_gives_the_same_page():
    assert from_record(json.loads(json.dumps(audited().to_dict(), allow_nan=False))) == page(audited())


def test_hostile_texts_are_escaped():
    assert "<script>alert" in words(read(page(audited(word=HOSTILE))))

"""Plans of a server that streams: what fails, stalls or limits gives no plan but a reason, and a plan goes on later."""

import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.plan.endpoint import PlannedEndpoint, ServerPair, outcome, plan_endpoint
from foretoken.probe import workload as waves
from foretoken.probe.answers import ServerCounters
from foretoken.probe.client import Patience
from foretoken.probe.server import ServerKind

from .simulated import PROMPTS, StreamingBehaviour, streaming


@pytest.fixture(autouse=True)
def _any_interval(monkeypatch):
    """Other programs may disturb the passes of a few milliseconds, which makes intervals wide."""
    monkeypatch.setattr(outcome, "_WIDEST", 1e9)


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch):
    """A simulated server never spins."""
    monkeypatch.setattr(waves, "_REST", 0.0)


QUICK = Patience(timeout=60.0, retries=0, pause=0.01)
IMPATIENT = Patience(timeout=2.0, retries=0, pause=0.01)


@contextmanager
def pair(behaviour=None, **options):
    """A server with speculation and one without."""
    behaviour = behaviour or StreamingBehaviour()
    with streaming(behaviour) as url, streaming(StreamingBehaviour(), speculative=False) as plain:
        yield ServerPair(url, "sim", **{"baseline": plain, "patience": QUICK} | options)


def planned(own, **options):
    return plan_endpoint(PlannedEndpoint(own, **{"concurrency": (1, 2), "max_tokens": 24} | options), PROMPTS)


@pytest.mark.slow
def test_a_plan_of_a_server_that_streams():
    with pair() as own:
        plan = planned(own)
    engine = StreamingBehaviour().engine
    assert not plan.because, plan.because
    assert plan.facts["depth"] == 4 and plan.facts["engine"] == "vllm"
    assert plan.facts["tokens_per_pass_from"] == "its counts and the streams"
    row = next(row for row in plan.rows if row.measured and row.concurrency == 1)
    assert 0.3 < row.speedup / engine.speedup(4, 1) < 3.0
    assert {row.name for row in plan.rows} == {"the server's drafter", "ngram", "suffix"}
    suffix = max((row for row in plan.rows if row.name == "suffix"), key=lambda row: row.depth)
    assert suffix.tokens_per_pass > 1.5  # every text counts up


@pytest.mark.parametrize(
    "trouble, healthy, said",
    [
        ("fails", 0, "gave no text: 500: out of memory"),
        ("fails", 3, "out of memory"),
        ("limits", 3, "429: slow down"),
        ("stalls", 3, "no answer within 2 s"),
        ("closes", 3, "the stream was closed before its end"),
        ("no streams", 0, "does not stream a text: 400: stream is not supported; it must stream"),
    ],
)
def test_trouble_is_told_and_no_plan_is_made(trouble, healthy, said):
    patience = IMPATIENT if trouble == "stalls" else QUICK
    with pair(StreamingBehaviour(trouble=trouble, healthy=healthy), patience=patience) as own:
        plan = planned(own, concurrency=(1,))
    assert said in plan.because and not plan.rows and not plan.paste


def test_servers_on_one_host_rest_between_their_waves(monkeypatch):
    """A process that has just decoded may spin on the processors of the other for a second, as vLLM's does."""
    rests: list[float] = []
    monkeypatch.setattr(waves, "_REST", 1.1)
    monkeypatch.setattr(waves, "time", SimpleNamespace(sleep=rests.append))
    assert waves.rest_between("http://a:1", "http://b:1") == waves.rest_between("http://a:1", "http://a:1") == 0.0
    assert waves.rest_between("http://a:1", "http://a:2") == 1.1
    with pair() as own:
        plan = planned(own, concurrency=(1,))
    assert not plan.because and rests.count(1.1) >= 5  # a round begins with the side that the last one ended with
    assert plan.facts["costs"]["minutes"] >= 5 * 1.1 / 60 - 0.05


def test_without_a_plain_side_there_is_nothing_to_compare():
    with pair(baseline=None) as own:
        plan = planned(own)
    assert "no plain decoding to compare with" in plan.because and "--baseline" in plan.because


def test_a_key_or_a_model_that_is_refused_is_an_error():
    own = ServerPair("http://127.0.0.1:9", "sim", baseline="http://127.0.0.1:9", kind=ServerKind.VLLM, patience=QUICK)
    assert "gave no text" in planned(own).because
    with pytest.raises(InvalidRequest, match="max_tokens"):
        planned(own, max_tokens=4)
    with pytest.raises(ForetokenError, match="--concurrency"):
        planned(own, concurrency=(0,))


def test_a_plan_goes_on_where_it_stopped(tmp_path):
    journal = tmp_path / "plan.json.partial"
    behaviour = StreamingBehaviour(trouble="limits", healthy=8)
    with pair(behaviour) as own:
        first = planned(own, concurrency=(1,), journal=journal)
        assert "429" in first.because and journal.exists()
        behaviour.trouble, before = "", behaviour.seen
        second = planned(own, concurrency=(1,), journal=journal)
        assert not second.because, second.because
    whole = second.facts["costs"]["requests"] // 2
    assert behaviour.seen - before < whole
    assert not journal.exists()


def test_costs_are_told_before_and_a_small_budget_is_refused():
    behaviour, seen = StreamingBehaviour(), []
    with pair(behaviour) as own:
        plan = plan_endpoint(
            PlannedEndpoint(own, concurrency=(1, 2), max_tokens=24), PROMPTS, lambda costs: bool(seen.append(costs))
        )
        asked = behaviour.seen
        with pytest.raises(InvalidRequest, match="--budget is too small: a plan takes 576 tokens"):
            planned(own, budget=100)
    assert not plan.rows and not plan.because
    assert seen[0]["requests"] == 30 and seen[0]["tokens"] == 720 and asked < 10


@pytest.mark.slow
@pytest.mark.parametrize("lies, said", [(2.0, "impossible"), (0.3, "tokens per pass, but")])
def test_metrics_that_lie(lies, said):
    with pair(StreamingBehaviour(replace(StreamingBehaviour().engine, lies=lies))) as own:
        assert said in planned(own, concurrency=(2,), depth=4).because


def test_counters_of_every_engine():
    vllm = """vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 40.0
vllm:spec_decode_num_draft_tokens_created{engine="0"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 25.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 16.0
vllm:generation_tokens_total{engine="0"} 50.0
"""
    told = ServerCounters.of(vllm)
    assert told.speculation is not None and told.generated == 50.0
    assert (told.speculation.steps, told.speculation.drafted, told.speculation.accepted) == (10.0, 40.0, 25.0)
    assert told.speculation.by_position == (16.0, 9.0)
    llamacpp = "llamacpp:spec_decode_num_draft_tokens_total 4\nllamacpp:spec_decode_num_accepted_tokens_total 3\n"
    told = ServerCounters.of(llamacpp + "llamacpp:tokens_predicted_total 9\n")
    assert told.speculation is not None and told.speculation.steps is None and told.generated == 9.0
    sglang = ServerCounters.of('sglang:spec_accept_length{model_name="m"} 2.5\n')
    since = sglang.since(sglang, 100.0)
    assert since is not None and 100.0 / (100.0 - since.accepted) == pytest.approx(2.5)
    assert ServerCounters.of("") == ServerCounters()


def test_earlier_plans_must_be_plans():
    with pair() as own, pytest.raises(ForetokenError, match="--with needs records"):
        planned(own, concurrency=(1,), earlier=[json.loads("{}")])


def test_a_budget_that_is_too_small_is_refused_before_warm_up():
    behaviour = StreamingBehaviour()
    with pair(behaviour) as own, pytest.raises(InvalidRequest, match="--budget is too small"):
        planned(own, concurrency=(8,), budget=100)
    assert behaviour.seen == 3  # a first request and two probes


def test_counters_that_are_no_numbers_are_skipped():
    page = "vllm:generation_tokens_total 1-2\nvllm:spec_decode_num_draft_tokens_total 1e999\n"
    assert ServerCounters.of(page + "vllm:spec_decode_num_accepted_tokens_total 3\n") == ServerCounters()

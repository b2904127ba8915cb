"""The record that load generators read, and the page that Prometheus reads."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as strict_families
from prometheus_client.parser import text_string_to_metric_families
from tests.serve.conftest import Clock

from foretoken.core.draft import Draft
from foretoken.core.step import StepOutput, Timings
from foretoken.core.verdict import KINDS, Verdict
from foretoken.serve.metrics import Metrics, SpeculationRecord

DOCS = Path(__file__).parents[2] / "docs"
TIMINGS = Timings(0.5, 1.0, 0.25, 0.125, 1)
PLAIN = Draft.empty()


def step(
    draft: Draft, path: tuple[int, ...], cut: int | None = None, sequence: int = 0, end: str | None = None
) -> StepOutput:
    tokens = (*(draft.ids[node] for node in path), 99)[:cut]
    return StepOutput(sequence, 0, draft, Verdict(path, 99), tokens, TIMINGS, end)


def chain(drafted: int, accepted: int, **more: Any) -> StepOutput:
    return step(Draft.chain(range(drafted)) if drafted else PLAIN, tuple(range(accepted)), **more)


def record(*steps: StepOutput, configured: int = 0, detailed: bool = False) -> dict[str, Any]:
    kept = SpeculationRecord(configured)
    for each in steps:
        kept.add(each)
    return kept.to_dict(detailed)


def check_as_a_load_generator(payload: dict[str, Any]) -> None:
    """The checks of AIPerf's reader of vLLM responses: a payload that fails is dropped there in silence."""
    histogram = payload["acceptance_histogram"]
    assert isinstance(histogram, list) and all(type(count) is int and count >= 0 for count in histogram)
    assert len(histogram) == payload["num_spec_tokens"] + 1
    assert sum(histogram) == payload["num_spec_steps"]
    assert sum(j * count for j, count in enumerate(histogram)) == payload["num_accepted_draft_tokens"]
    assert 0 <= payload["num_accepted_draft_tokens"] <= payload["num_draft_tokens"]
    for name in ("mean_acceptance_length", "draft_acceptance_rate"):
        assert type(payload[name]) is float and math.isfinite(payload[name])
    if "per_step_accepted" in payload:
        pairs = list(zip(payload["per_step_accepted"], payload["per_step_drafted"], strict=True))
        assert len(pairs) == payload["num_spec_steps"] and all(0 <= j <= k for j, k in pairs)
        assert sum(k for _, k in pairs) == payload["num_draft_tokens"]


def test_record_counts_by_hand() -> None:
    payload = record(chain(3, 3), chain(3, 0), chain(2, 1), chain(0, 0), configured=4, detailed=True)
    check_as_a_load_generator(payload)
    assert payload == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 1, 0, 1, 0],
        "acceptance_histogram_by_draft_length": {"2": [0, 1, 0], "3": [1, 0, 0, 1]},
        "num_spec_steps": 3,
        "num_draft_tokens": 8,
        "num_accepted_draft_tokens": 4,
        "num_spec_tokens": 4,
        "per_step_accepted": [3, 0, 1],
        "per_step_drafted": [3, 3, 2],
    }


def test_record_without_speculation_is_still_readable() -> None:
    payload = record(chain(0, 0))
    check_as_a_load_generator(payload)
    assert payload["mean_acceptance_length"] == 1.0 and payload["acceptance_histogram"] == [0]
    assert "per_step_accepted" not in payload


def test_record_of_trees_cuts_and_long_drafts() -> None:
    tree = Draft.tree([1, 2, 3, 4, 5], (-1, -1, 0, 0, 3))
    payload = record(step(tree, (0, 3)), chain(4, 4, cut=2, end="stop"), configured=2, detailed=True)
    check_as_a_load_generator(payload)
    assert payload["per_step_accepted"] == [2, 2] and payload["per_step_drafted"] == [5, 4]
    assert payload["num_spec_tokens"] == 5
    assert json.loads(json.dumps(payload)) == payload


@dataclass(frozen=True)
class FakeUsage:
    running: int = 2
    waiting: int = 1
    kv_tokens: int = 300
    kv_capacity: int = 1200
    kv_bytes_per_token: int = 64
    prefix_hits: int = 40
    prefix_queries: int = 100
    preemptions: int = 3


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    return Metrics("m", FakeUsage, lambda step: "", clock)


def shown(metrics: Metrics) -> dict[str, float]:
    """Sample name with labels (but the model's) -> value."""
    page = metrics.render()
    assert page.headers["content-type"].startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(page.body.decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "m"
            inside = ",".join(f"{k}={v}" for k, v in sample.labels.items() if v)
            values[sample.name + (f"{{{inside}}}" if inside else "")] = sample.value
    return values


def test_speculation_counters(metrics: Metrics) -> None:
    metrics.on_steps([chain(3, 2, sequence=1), chain(3, 0, sequence=2), chain(0, 0, sequence=3)])
    metrics.on_steps([chain(1, 1, sequence=1)])
    values = shown(metrics)
    name = "foretoken:spec_decode_num_"
    assert values[name + "drafts_total"] == 3
    assert values[name + "draft_tokens_total"] == 7
    assert values[name + "accepted_tokens_total"] == 3
    assert [values[name + f"accepted_tokens_per_pos_total{{position={i}}}"] for i in range(2)] == [2, 1]
    assert [values[name + f"verified_tokens_per_pos_total{{position={i}}}"] for i in range(3)] == [3, 1, 1]
    assert values["foretoken:generation_tokens_total"] == 7
    assert values["foretoken:steps_total"] == 2
    assert values["foretoken:step_seconds_total{phase=score}"] == 2.0


def test_a_rejected_leaf_was_not_verified_further(metrics: Metrics) -> None:
    tree = Draft.tree([1, 2, 3], (-1, -1, 0))
    metrics.on_steps([step(tree, (1,))])  # node 1 has no child: nothing stood at position 1
    metrics.on_steps([chain(3, 3, cut=1)])  # cut after its first token: nothing is known of the second
    values = shown(metrics)
    assert values["foretoken:spec_decode_num_verified_tokens_per_pos_total{position=0}"] == 2
    assert "foretoken:spec_decode_num_verified_tokens_per_pos_total{position=1}" not in values


def test_alarms_are_counted_by_kind(metrics: Metrics) -> None:
    metrics.on_steps([replace(chain(4, 4), alarm="repetition"), chain(4, 4)])
    name = "foretoken:spec_decode_alarms_total{kind=%s}"
    assert [shown(metrics)[name % kind] for kind in KINDS] == [1, 0, 0]


def test_methods_are_told_apart() -> None:
    metrics = Metrics("m", FakeUsage, method_of=lambda each: "suffix" if each.sequence else "ngram")
    metrics.on_steps([chain(2, 1, sequence=0), chain(3, 1, sequence=1)])
    values = shown(metrics)
    assert values["foretoken:spec_decode_num_draft_tokens_total{method=ngram}"] == 2
    assert values["foretoken:spec_decode_num_draft_tokens_total{method=suffix}"] == 3


def test_inter_token_latency_is_a_tokens_own(metrics: Metrics, clock: Clock) -> None:
    metrics.on_steps([chain(2, 2, sequence=7)])
    clock.now = 0.3
    metrics.on_steps([chain(2, 2, sequence=7)])  # three tokens after 0.3 s
    clock.now = 9.0
    metrics.on_steps([chain(2, 2, sequence=7, end="stop")])
    clock.now = 20.0
    metrics.on_steps([chain(2, 2, sequence=7)])  # another sequence of the same number
    values = shown(metrics)
    name = "foretoken:inter_token_latency_seconds"
    assert values[name + "_count"] == 6 and values[name + "_sum"] == pytest.approx(9.0)
    assert values[name + "_bucket{le=0.1}"] == 3  # 0.3/3 lies on the bound, which belongs to it


def test_requests_and_usage(metrics: Metrics) -> None:
    metrics.on_first_token(0.2)
    whole: Any = SimpleNamespace(prompt_tokens=12, completion_tokens=30, seconds=3.0, queue_seconds=0.02)
    never_admitted: Any = SimpleNamespace(prompt_tokens=5, completion_tokens=0, seconds=1.0, queue_seconds=None)
    metrics.on_finished("length", whole)
    metrics.on_finished("abort", never_admitted)
    values = shown(metrics)
    assert values["foretoken:request_success_total{finished_reason=length}"] == 1
    assert values["foretoken:request_success_total{finished_reason=error}"] == 0
    assert values["foretoken:prompt_tokens_total"] == 17
    assert values["foretoken:time_to_first_token_seconds_sum"] == 0.2
    assert values["foretoken:request_queue_time_seconds_count"] == 1
    assert values["foretoken:request_generation_tokens_bucket{le=50.0}"] == 2
    assert values["foretoken:kv_cache_usage_perc"] == 0.25
    assert values["foretoken:num_requests_waiting"] == 1
    assert values["foretoken:prefix_cache_hits_total"] == 40


def test_unbounded_memory_has_no_share() -> None:
    assert shown(Metrics("m", lambda: FakeUsage(kv_capacity=0), lambda step: ""))["foretoken:kv_cache_usage_perc"] == 0


def test_dropped_requests_are_forgotten(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.serve.metrics._REMEMBERED", 4)
    for sequence in range(20):
        metrics.on_steps([chain(1, 1, sequence=sequence)])

    def gaps() -> float:
        return shown(metrics)["foretoken:inter_token_latency_seconds_count"]

    before = gaps()
    metrics.on_steps([chain(1, 1, sequence=16)])  # one of the latest four: the time since its last token counts
    known = gaps()
    assert known > before
    metrics.on_steps([chain(1, 1, sequence=3)])
    assert gaps() == known


def test_a_step_of_nobody_counts_nothing(metrics: Metrics) -> None:
    before = metrics.render().body
    metrics.on_steps([])
    assert metrics.render().body == before


def test_the_page_stands_a_strict_reader(metrics: Metrics) -> None:
    from prometheus_client.openmetrics.exposition import generate_latest

    metrics.on_steps([chain(3, 2)])
    metrics.on_first_token(0.2)
    assert len(list(strict_families(generate_latest(metrics).decode()))) > 15


def names(metrics: Metrics) -> set[str]:
    page = metrics.render().body.decode()
    return {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}


def expressions(node: Any) -> Iterator[str]:
    """Every PromQL expression and template query of a dashboard."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "query", "definition") and isinstance(value, str):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(node, list):
        for each in node:
            yield from expressions(each)


def named(text: str) -> set[str]:
    return set(re.findall(r"foretoken:[a-z0-9_]+", text))


def test_dashboard_names_what_there_is(metrics: Metrics) -> None:
    dashboard = json.loads((DOCS / "reference" / "grafana.json").read_text())
    metrics.on_steps([chain(2, 1)])
    used = set().union(*map(named, expressions(dashboard)))
    assert used <= names(metrics)
    assert "foretoken:spec_decode_num_accepted_tokens_per_pos_total" in used
    assert dashboard["schemaVersion"] >= 39
    assert any(each["type"] == "datasource" for each in dashboard["templating"]["list"])
    panels = [each for each in dashboard["panels"] if each["type"] != "row"]
    assert all(each["targets"] and each["datasource"]["uid"] == "${datasource}" for each in panels)
    assert len({each["id"] for each in dashboard["panels"]}) == len(dashboard["panels"])


def test_documentation_names_what_there_is_and_all_of_it(metrics: Metrics) -> None:
    text = (DOCS / "reference" / "metrics.md").read_text()
    there = names(metrics)
    written = named(text)
    page = metrics.render().body.decode()
    families = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    assert written <= there | families, "documented but absent"
    assert families <= written, "undocumented"

"""Plans for vLLM: what follows from runs, and the runs themselves with a stand-in for vLLM's process."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from foretoken.bench.peers.protocol import Answer, PeerRequest
from foretoken.bench.peers.vllm import Depths, timed
from foretoken.bench.peers.worker import PeerError
from foretoken.core.errors import InvalidRequest
from foretoken.plan.vllm import (
    CHAIN,
    COPIED,
    PLAIN,
    Answers,
    Bench,
    VllmCandidate,
    VllmRun,
    answers,
    grouped,
    predict,
    record,
    vllm_plan,
)

DRAFT = VllmCandidate.of({"method": "draft_model", "model": "some/draft"})
OURS = VllmCandidate.of({"method": "custom_class", "model": "a.B"}, "ours", {"foretoken": {"method": "suffix"}})


def run(lane: str, depth: int, seconds: float, emitted: tuple[int, ...], beside: str | None = None) -> VllmRun:
    """Two equal requests."""
    tokens, passes = sum(n * count for n, count in enumerate(emitted, 1)), sum(emitted)
    return VllmRun(
        lane=lane,
        depth=depth,
        beside=lane if beside is None else beside,
        temperature=0.0,
        batch=1,
        tokens=(tokens, tokens),
        passes=(passes, passes),
        steps=(passes, passes),
        seconds=(seconds, seconds),
        emitted=tuple(2 * count for count in emitted),
        first_seconds=(seconds, seconds),
    )


def runs(*arguments: object, **options: object) -> list[VllmRun]:
    return [each.run() for each in answers(*arguments, **options)]


def restored(record: dict[str, object]) -> VllmRun:
    return VllmRun(**{key: tuple(value) if isinstance(value, list) else value for key, value in record.items()})


def geometric(rate: float, depth: int, passes: int = 10**6) -> tuple[int, ...]:
    """Passes by tokens, each drafted token accepted with ``rate``."""
    survivors = [passes * rate**k for k in range(depth + 1)]
    return tuple(round(a - b) for a, b in zip(survivors, [*survivors[1:], 0.0], strict=True))


def test_lanes_from_vllms_own_words():
    assert (DRAFT.name, DRAFT.depths) == ("draft_model draft", CHAIN)
    assert VllmCandidate.of({"method": "ngram"}).depths == COPIED
    assert VllmCandidate.of({"method": "ngram", "num_speculative_tokens": 3}).depths == (3,)
    assert VllmCandidate.of({"method": "medusa"}, max_depth=3).depths == (1, 2, 3)
    assert OURS.at(4) == {"method": "custom_class", "model": "a.B", "num_speculative_tokens": 4}
    for wrong in ({}, {"method": 3}, {"method": "ngram", "num_speculative_tokens": 0}):
        with pytest.raises(InvalidRequest):
            VllmCandidate.of(wrong)


def test_depths_between_those_that_were_run():
    rate = 0.7
    low, high = (run("x", depth, 1.0 + 0.1 * depth, geometric(rate, depth)) for depth in (2, 8))
    for depth in (2, 3, 5, 8):
        result = predict([low, high], depth)
        assert result.tokens_per_pass == pytest.approx((1 - rate ** (depth + 1)) / (1 - rate), rel=1e-4)
        assert result.step_seconds == pytest.approx(1.0 + 0.1 * depth)
        assert result.acceptance == pytest.approx([rate] * depth, rel=1e-3)
    for outside in (1, 9):
        with pytest.raises(InvalidRequest, match="outside"):
            predict([low, high], outside)


def test_between_two_runs_the_estimate_agrees_with_both():
    low, high = run("x", 1, 1.0, (30, 70)), run("x", 5, 1.4, (40, 20, 10, 5, 5, 20))
    result = [predict([low, high], depth).tokens_per_pass for depth in (1, 2, 3, 4, 5)]
    assert result[0] == pytest.approx(1.7) and result[-1] == pytest.approx(high.tokens_per_pass)
    assert result == sorted(result)


def test_a_plan_weighs_tokens_against_time():
    plain = run(PLAIN, 0, 1.0, (64,), beside=DRAFT.name)
    rows = [run(DRAFT.name, d, 1.0 + 0.2 * d, geometric(0.8, d, 10**4)) for d in CHAIN]
    own = [run(OURS.name, d, 3.0, (50, 50)) for d in COPIED]
    plan = vllm_plan([DRAFT, OURS], [plain, *rows, replace(plain, beside=OURS.name), *own], prompts="2 of ours")
    assert len(plan.rows) == 8 + 7
    fifth = next(row for row in plan.rows if row.name == DRAFT.name and row.num_speculative_tokens == 5)
    assert fifth.speedup == pytest.approx((1 - 0.8**6) / 0.2 / 2.0, rel=1e-3)
    assert fifth.low == pytest.approx(fifth.speedup) == fifth.high, "two requests alike"
    assert all(row.speedup < 1 for row in plan.rows if row.name == OURS.name)
    best = max(range(1, 9), key=lambda d: (1 - 0.8 ** (d + 1)) / 0.2 / (1.0 + 0.2 * d))
    assert plan.best == DRAFT.at(best)
    assert plan.choices[0].sure
    result = record(plan, [DRAFT, OURS], [plain, *rows])
    assert result["exports"] == {"vllm": plan.best} and result["additional_config"] == {}
    read = [restored(each) for each in json.loads(json.dumps(result, allow_nan=False))["runs"]]
    assert read == [plain, *rows]


def test_plain_decoding_measured_alone_serves_all():
    plain = run(PLAIN, 0, 1.0, (64,), beside=PLAIN)
    plan = vllm_plan([OURS], [plain, *(run(OURS.name, d, 1.0, (0, 50)) for d in COPIED)])
    assert plan.rows[0].speedup == pytest.approx(2.0)
    assert record(plan, [OURS], [])["additional_config"] == {"foretoken": {"method": "suffix"}}


def test_one_request_leaves_the_interval_open_and_disturbed_steps_do_not_count():
    answer = Answer([[1] * 9], 5.6, 0.3, 1, 5, [4], [0.1, 0.1, 0.1, 5.0], [2, 2, 2, 2])
    result = Answers("x", 1, "x", 0.0, 1, (answer,)).run()
    assert result.steps == (3,) and result.step_seconds == pytest.approx(0.1)
    assert result.tokens_per_pass == 2.0 and result.emitted == (0, 4)
    assert math.isinf(result.tokens_width) and result.seconds_width == 0.0
    with pytest.raises(InvalidRequest, match="no step"):
        Answers("x", 1, "x", 0.0, 1, (Answer([[1]], 0.3, 0.3, 1, 1, [0]),)).run()


class Fake:
    """A process that keeps what it was asked."""

    def __init__(self, lane: VllmCandidate | None, log: list[str]) -> None:
        self.name, self.log = lane.name if lane else "plain", log
        self.asked: list[PeerRequest] = []
        log.append(f"start {self.name}")

    def answer(self, question: PeerRequest) -> Answer:
        self.asked.append(question)
        passes = (question.max_tokens - 1) // (1 + question.depth) or 1
        each = 0.1 * (1 + 0.1 * question.depth)
        tokens = [[0] * question.max_tokens for _ in question.prompts]
        brought = [1 + question.depth] * passes * len(question.prompts)
        return Answer(tokens, 1.0, 0.2, 1, 0, [passes] * len(question.prompts), [each] * passes, brought)

    def close(self) -> None:
        if f"close {self.name}" not in self.log:
            self.log.append(f"close {self.name}")


@pytest.mark.parametrize("alone", [False, True])
def test_every_lane_takes_turns_with_plain_decoding(alone):
    log: list[str] = []
    started: dict[str, Fake] = {}
    said: list[float] = []

    def start(lane: VllmCandidate | None) -> Fake:
        made = Fake(lane, log)
        started[made.name] = made
        return made

    bench = Bench(target="t", temperatures=(0.0, 1.0), batches=(1, 2), max_tokens=17, alone=alone)
    prompts = [[1], [2], [3]]
    result = runs(bench, [DRAFT, OURS], prompts, lambda what, share: said.append(share), start)
    ends = ["close plain", *log[-1:]] if alone else log[-1:]
    assert log[0] == "start plain" and log.count("close plain") == 1
    assert ends[-1] == ("close ours" if alone else "close plain")
    assert len(result) == 4 * (len(CHAIN) + len(COPIED) + (1 if alone else 2))
    assert said == sorted(said) and said[-1] <= 1.0
    deepest = next(r for r in result if (r.lane, r.depth, r.batch, r.temperature) == (DRAFT.name, 8, 2, 1.0))
    assert len(deepest.passes) == 4, "the last group is filled up"
    assert started["plain"].asked[0].max_tokens == 8, "to warm up"
    assert vllm_plan([DRAFT, OURS], result).best == DRAFT.at(8)


def test_candidates_that_vllm_cannot_run_are_skipped_or_an_error():
    def start(lane: VllmCandidate | None) -> Fake:
        if lane is OURS:
            raise PeerError("no")
        return Fake(lane, [])

    bench, told = Bench(target="t", max_tokens=17), []
    result = runs(bench, [OURS, DRAFT], [[1]], start=start, refused=lambda lane, error: told.append(lane))
    assert told == [OURS] and {row.name for row in vllm_plan([OURS, DRAFT], result).rows} == {DRAFT.name}
    with pytest.raises(InvalidRequest, match="none of the ways"):
        vllm_plan([OURS], result)
    with pytest.raises(PeerError):
        runs(bench, [OURS, DRAFT], [[1]], start=start)


def test_a_plan_may_rest_on_some_of_what_was_answered():
    bench, prompts = Bench(target="t", batches=(2,), max_tokens=17), [[1], [2], [3], [4]]
    messages = answers(bench, [DRAFT], prompts, start=lambda lane: Fake(lane, []))
    assert [each.run() for each in messages] == runs(bench, [DRAFT], prompts, start=lambda lane: Fake(lane, []))
    half = [each.run([1]) for each in messages]
    assert {len(run.tokens) for run in half} == {2} and {len(run.steps) for run in half} == {1}
    assert vllm_plan([DRAFT], half).best == vllm_plan([DRAFT], [each.run() for each in messages]).best


def test_groups_are_full():
    assert grouped([[1], [2], [3]], 2) == [[[1], [2]], [[3], [1]]]
    assert grouped([[1]], 3) == [[[1], [1], [1]]]


def test_without_vllm_it_says_how_to_get_it(tmp_path):
    with pytest.raises(InvalidRequest, match="--engine-python"):
        Bench(target="t", python=tmp_path / "python").command()


class Steps:
    """vLLM's engine: two requests, the second one's prompt takes a step more."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.script = [{0: 1}, {0: 3, 1: 1}, {0: 4, 1: 4}, {1: 5}]

    def add_request(self, name: str, prompt: object, params: object) -> None:
        self.names.append(name)

    def has_unfinished_requests(self) -> bool:
        return bool(self.script)

    def step(self) -> list[object]:
        class Output:
            def __init__(self, name: str, count: int) -> None:
                self.request_id = name
                self.outputs = [type("Text", (), {"token_ids": list(range(count))})]

        return [Output(self.names[i], count) for i, count in self.script.pop(0).items()]


@pytest.mark.parametrize("method", ["custom_class", "suffix", "ngram"])
def test_drafters_learn_for_each_depth_apart_and_reset(method):
    class Drafter:
        def __init__(self, config: object) -> None:
            self.num_speculative_tokens = 8

        def load_model(self, model: SimpleNamespace) -> None:
            model.compute_logits = self

    runner = SimpleNamespace(drafter=Drafter(None), model=SimpleNamespace())
    scheduler = SimpleNamespace(dynamic_sd_lookup=None)
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    core = SimpleNamespace(scheduler=scheduler, model_executor=SimpleNamespace(driver_worker=worker))
    engine = SimpleNamespace(vllm_config=None, engine_core=SimpleNamespace(engine_core=core))
    first = runner.drafter
    depths = Depths(SimpleNamespace(llm_engine=engine), {"method": method, "num_speculative_tokens": 8}, 2)
    seen = []
    for depth, fresh in ((2, False), (8, False), (2, False), (2, True), (2, False)):
        depths.choose(depth, fresh)
        seen.append(runner.drafter)
        wanted = None if depth == 8 or method == "custom_class" else [depth] * 3
        assert scheduler.dynamic_sd_lookup == wanted
    if method == "ngram":
        assert seen == [first] * 5
        return
    assert seen[0] is seen[2] and seen[3] is seen[4] and len(set(map(id, seen))) == 3
    assert all(drafter.num_speculative_tokens == depth for drafter, depth in zip(seen, (2, 8, 2, 2, 2), strict=True))


def test_steps_are_those_in_which_all_take_part():
    result = timed(Steps(), PeerRequest([[1], [2]], 5), None)
    assert result.tokens == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert result.passes_each == [2, 2] and result.emitted == [2, 1, 3, 1]
    assert len(result.step_seconds) == 1 and result.first_seconds > 0

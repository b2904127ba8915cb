"""The planner as a whole on the tiny pair and on toys, and the parts of it that are arithmetic."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from foretoken import zoo
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import load_model
from foretoken.models.toy import ToyModel
from foretoken.plan.candidates import CHAIN, COPIED, TREE, Candidate, candidates, head_method
from foretoken.plan.outcome import Plan
from foretoken.plan.planner import Planner, PlanSettings, timed_depths
from foretoken.plan.replay import step_estimate, write
from foretoken.plan.rows import PlanRow, export_config
from foretoken.plan.sample import Proposers, Sample
from foretoken.plan.step_times import MeasuredStepTimes, PassTimes, SpeedSample, at_speed
from foretoken.plan.step_timing import (
    PLAIN,
    LaneTimes,
    TimedBatch,
    TimedStep,
    alternate,
    time_lanes,
    time_plain_pass,
    time_prefill,
)
from foretoken.plan.tally import AcceptanceEstimate, StepTally
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.lookup import Lookup
from foretoken.speculation import Builder

TARGET = ToyModel(vocab_size=6, order=2, seed=3, sharpness=1.5)
WARM = SamplingLaw()


def row(name: str, depth: int, speedup: float, temperature: float = 0.0, batch: int = 1, off: float = 0.1) -> PlanRow:
    return PlanRow(
        name=name,
        method="ngram",
        config={"method": "ngram", "num_speculative_tokens": depth},
        temperature=temperature,
        batch=batch,
        tokens_per_pass=speedup,
        tokens_per_pass_low=speedup - off,
        tokens_per_pass_high=math.inf,
        speedup=speedup,
        low=speedup - off,
        high=speedup + off,
        end_to_end=speedup,
        step_seconds=0.01,
        draft_seconds=0.0,
        plain_seconds=0.01,
        acceptance=(0.5,),
        estimator="text",
        requests=1,
    )


def test_the_best_is_chosen_and_plain_decoding_where_nothing_gains():
    rows = [
        row("a", 2, 1.3),
        row("a", 4, 1.5),
        row("b", 2, 1.05),
        row("a", 2, 0.9, 1.0),
        row("a", 4, 0.7, 1.0),
        row("b", 2, 0.95, 1.0),
    ]
    result = Plan.of(rows)
    assert [r.best for r in result.rows] == [False, True, False, False, False, False]
    first, second = result.choices
    assert first.row.num_speculative_tokens == 4 and first.sure
    assert second.row is None and not second.sure, "0.95 with an interval up to 1.05"
    assert result.best == {"method": "ngram", "num_speculative_tokens": 2}, (
        "the mean over what was asked, not one place"
    )
    record = result.to_dict()
    assert record["rows"][0]["tokens_per_pass_high"] is None
    assert record["rows"][1]["paste"]["vLLM"]["method"] == "ngram"
    json.dumps(record, allow_nan=False)
    assert Plan.of([row("a", 2, 0.9)]).best is None


def test_depths_that_are_timed_hold_both_ends():
    assert timed_depths(CHAIN) == [1, 2, 4, 6, 8]
    assert timed_depths((3, 9)) == [3, 9]
    assert timed_depths(range(1, 13)) == [1, 2, 4, 6, 8, 12]


def test_candidates_are_what_was_given_and_what_is_free(tiny_pair):
    result = candidates([tiny_pair.draft], [], [{"method": "ngram", "num_speculative_tokens": 3}])
    methods = [(c.method, c.depths) for c in result]
    assert methods == [
        ("draft_model", CHAIN),
        ("draft_model", TREE),
        ("ngram", COPIED),
        ("suffix", COPIED),
        ("recycling", TREE),
        ("ngram", (3,)),
    ]
    assert len({c.name for c in result[:5]}) == 5
    assert result[0].at(5) == {"method": "draft_model", "model": str(tiny_pair.draft), "num_speculative_tokens": 5}
    (*_, unnamed) = candidates([], [], [{"model": "draft"}])
    assert (unnamed.method, unnamed.depths) == ("draft_model", CHAIN)
    for wrong in ({"method": "none"}, {"method": "ngram", "num_speculative_tokens": 0}, {"method": "what"}):
        with pytest.raises(InvalidRequest):
            candidates([], [], [wrong])


@pytest.mark.parametrize("role", ["eagle3", "medusa", "blockwise"])
def test_heads_are_known_by_their_configuration(role, tiny_pair):
    assert head_method(zoo.path(role)) == role
    with pytest.raises(InvalidRequest, match="no heads that are known"):
        head_method(tiny_pair.draft)


def test_other_engines_words_for_it():
    chain = {"method": "draft_model", "model": "D", "num_speculative_tokens": 5}
    forms = export_config(chain)
    assert forms["foretoken"] == chain == forms["vllm"]
    assert "assistant_model=draft" in forms["transformers"] and "num_assistant_tokens = 5" in forms["transformers"]
    compile(forms["transformers"], "call", "exec")
    lookup = export_config({"method": "ngram", "num_speculative_tokens": 8})
    assert lookup["vllm"] == {
        "method": "ngram",
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
        "num_speculative_tokens": 8,
    }
    assert "prompt_lookup_num_tokens=8" in lookup["transformers"]
    assert (
        export_config(chain | {"tree": "sampled", "num_speculative_tokens": 14})["vllm"]["num_speculative_tokens"] == 4
    )
    assert export_config({"method": "recycling", "num_speculative_tokens": 8})["vllm"] is None


def turns(*seconds: float, rows: tuple[int, ...] = (1,), score: float = 0.8) -> tuple[TimedStep, ...]:
    return tuple(TimedStep(s, 0.1 * s, score * s, rows[i % len(rows)]) for i, s in enumerate(seconds))


def test_step_times_of_one_size_are_medians_in_plain_steps():
    plain = turns(1.0, 1.0, 1.1, 0.9)
    times = MeasuredStepTimes([{"a": LaneTimes(turns(2.0, 2.0, 2.2, 9.0, rows=(5,)), plain)}], batch=1)
    result = times.of("a", {4: 1.0})
    assert result.over_plain == pytest.approx(2.1) and result.seconds == pytest.approx(2.1)
    assert 0.01 <= result.error < 0.2


def test_reading_prompts_is_timed_beside_plain_reading(monkeypatch):
    """The first, which finds weights that no process has read, does not count."""
    seconds, order = iter([9.0, 2.0, 3.0, 3.0, 2.0, 2.0, 4.0]), []

    class Read:
        def __init__(self, target, proposer, depth, prompts, law):
            order.append(type(proposer))
            self.prefill = next(seconds)

        def close(self):
            pass

    monkeypatch.setattr("foretoken.plan.step_timing.TimedBatch", Read)
    result = time_prefill(TARGET, {"a": Lookup()}, [(1, 2, 3)], WARM)
    assert result.over_plain == {"a": 1.5} and result.seconds == 2.0
    assert order == [Proposer] + [Proposer, Lookup] * 3


def test_drafting_never_takes_more_than_its_step():
    """Steps of this temperature were timed while the machine was slow; passes are also known from a faster moment."""
    plain = tuple(TimedStep(s, 0.0, 0.9 * s, 1) for s in (1.0, 1.0, 9.0))
    held_up = tuple(TimedStep(s, 0.9 * s, 0.1 * s, 5) for s in (1.0, 30.0, 30.0))
    quick = tuple(TimedStep(1.1, 0.9, 0.1, rows) for rows in (5, 3, 2))
    for lanes in ([held_up], [held_up, quick], [quick, quick, held_up]):
        visits = [{"a": LaneTimes(lane, plain)} for lane in lanes]
        result = MeasuredStepTimes(visits, 1).of("a", {4: 0.5, 2: 0.5})
        assert 0.0 < result.propose < result.seconds
        assert result.propose == pytest.approx(0.9 * result.seconds, rel=0.15)


def test_seconds_at_another_speed_are_on_the_line_through_what_was_seen():
    """Plain passes at half and at full speed; what is arithmetic does not notice, what waits for memory does."""
    arithmetic = [SpeedSample(4, 3.0, 1.0), SpeedSample(4, 3.0, 2.0)]
    assert at_speed(arithmetic, 1.5) == pytest.approx(3.0)
    assert at_speed(arithmetic, 2.0) == pytest.approx(3.0, rel=0.02)
    waiting = [SpeedSample(4, 1.2, 1.0), SpeedSample(4, 2.4, 2.0)]
    assert at_speed(waiting, 3.0) == pytest.approx(3.6)
    both = [SpeedSample(4, 2.5, 1.0), SpeedSample(4, 3.0, 2.0), SpeedSample(4, 2.75, 1.5)]
    assert at_speed(both, 2.0) == pytest.approx(3.0, rel=0.02)
    faster = [SpeedSample(4, 2.0, 1.0), SpeedSample(4, 1.0, 2.0)]
    assert at_speed(faster, 3.0) == pytest.approx(1.5), "nothing is quicker for waiting longer"
    steeper = [SpeedSample(4, 1.0, 1.0), SpeedSample(4, 9.0, 2.0)]
    assert at_speed(steeper, 3.0) == pytest.approx(10.0), "nothing waits longer than it waits in all"


def test_one_moment_tells_a_ratio():
    assert at_speed([SpeedSample(4, 3.0, 1.0)], 1.5) == pytest.approx(4.5)
    alike = [SpeedSample(4, 3.0, 1.0), SpeedSample(4, 3.02, 0.99)]
    assert at_speed(alike, 1.1) == pytest.approx(3.01 * 1.1 / 0.995, rel=0.01)


def test_plain_passes_between_visits_tell_how_fast_the_machine_is():
    """Visits happened to meet a fast machine: two rows take what arithmetic takes, one row what memory takes."""
    visits = [{"a": LaneTimes(turns(4.0, 4.0, rows=(5,)), turns(base, base))} for base in (1.0, 1.2, 0.8)]
    assert PassTimes(visits).plain == pytest.approx(0.8)
    result = PassTimes(visits, [1.6] * 3)
    assert result.plain == pytest.approx(1.2)
    assert result.of("a", 5) == pytest.approx(3.2, rel=0.06)
    assert result.over(2)[1] == pytest.approx(1.2)
    times = MeasuredStepTimes(visits, 1, result)
    assert times.plain == pytest.approx(1.5) and times.of("a", {4: 1.0}).over_plain == pytest.approx(4 / 1.5, rel=0.06)


def test_a_plan_listens_to_the_machine_between_all_its_steps(tiny_pair, tokenizer, monkeypatch):
    messages: list[int] = []

    def plain_pass(target, prompts, law):
        messages.append(len(prompts))
        return 0.001

    monkeypatch.setattr("foretoken.plan.planner.time_plain_pass", plain_pass)
    target = load_model(tiny_pair.target)
    builder = Builder(target, load_tokenizer(tiny_pair.target), tiny_pair.target, load_model)
    settings = PlanSettings(temperatures=(0.0, 1.0), batches=(1, 3), max_tokens=12, turns=3)
    chosen = [Candidate("ngram", {"method": "ngram"}, (2, 4)), Candidate("suffix", {"method": "suffix"}, (3,))]
    Planner(target, builder.build, settings).plan([tokenizer.encode("def greet(")], chosen)
    assert messages == [1, 3] * 3 * 2


def test_a_plain_pass_leaves_nothing_open():
    model = ToyModel(vocab_size=6, order=2, seed=3, sharpness=1.5)
    assert time_plain_pass(model, [(1, 2, 3)] * 5, WARM) > 0
    assert model.num_open == 0


def test_a_step_at_the_end_of_a_text_has_fewer_rows():
    """Five rows take 2, two rows 1.25; every fourth step has room for one node only."""
    plain = tuple(TimedStep(1.0, 0.0, 1.0, 1) for _ in range(4))
    full = tuple(TimedStep(2.1, 0.1, 2.0, 5) for _ in range(4))
    times = MeasuredStepTimes([{"a": LaneTimes(full, plain)}], batch=1)
    assert times.of("a", {4: 1.0}).over_plain == pytest.approx(2.1)
    assert times.of("a", {4: 0.75, 1: 0.25}).over_plain == pytest.approx(0.1 + 0.75 * 2.0 + 0.25 * 1.25)


def test_passes_are_known_from_every_temperature_and_moment():
    """A machine half as fast at the second moment, where passes over five rows cost less beside plain ones."""
    fast = {"a": LaneTimes(turns(2.0, 2.0, 7.0, rows=(5,)), turns(1.0, 1.0, 1.0))}
    slow = {"a": LaneTimes(turns(3.0, 3.0, 3.0, rows=(5,)), turns(2.0, 2.0, 2.0))}
    assert MeasuredStepTimes([fast], 1).of("a", {4: 1.0}).over_plain == pytest.approx(2.0)
    both = MeasuredStepTimes([fast, slow], 1).of("a", {4: 1.0})
    assert both.over_plain == pytest.approx(5 / 3)  # seconds for seconds: the same steps, once at either moment
    assert both.error > 0.1  # the moments differ, and so may the next
    elsewhere = MeasuredStepTimes([fast], 1, PassTimes([fast, slow])).of("a", {4: 1.0})
    assert elsewhere.over_plain == pytest.approx(0.2 * 2.0 + 0.8 * 5 / 3)  # the rest is of this temperature


def test_step_times_of_varying_sizes_follow_their_law():
    """Passes over 1 and 5 rows take 1 and 2. A draft in a quarter of the steps makes them 1.25; drafting takes 0.1."""
    plain = tuple(TimedStep(1.0, 0.0, 1.0, 1) for _ in range(4))
    full = tuple(TimedStep(2.1, 0.1, 2.0, 5) for _ in range(4))
    mixed = (*full[:3], TimedStep(1.1, 0.1, 1.0, 1))
    times = MeasuredStepTimes([{"a": LaneTimes(mixed, plain)}], batch=1)
    assert times.of("a", {0: 0.75, 4: 0.25}).over_plain == pytest.approx(1.35)
    pairs = tuple(TimedStep(1.0, 0.0, 1.0, 2) for _ in range(4))
    both = (
        TimedStep(1.6, 0.1, 1.5, 6),
        TimedStep(2.1, 0.1, 2.0, 10),
        TimedStep(1.6, 0.1, 1.5, 6),
        TimedStep(1.1, 0.1, 1.0, 2),
    )
    times = MeasuredStepTimes([{"a": LaneTimes(both, pairs)}], batch=2)
    by_hand = 0.1 + 0.75**2 * 1.0 + 2 * 0.75 * 0.25 * 1.5 + 0.25**2 * 2.0
    assert times.of("a", {0: 0.75, 4: 0.25}).over_plain == pytest.approx(by_hand)


def test_lanes_go_on_where_a_sequence_ends():
    short = ToyModel(vocab_size=6, order=2, seed=3, sharpness=1.5, max_length=24)
    result = time_lanes(
        short, {"a": (Lookup(), 4), "b": (DraftModel(short.perturbed(0.3)), 3)}, [(1, 2, 3)] * 2, WARM, 30
    )
    assert all(len(each.steps) == len(each.plain) == 30 for each in result.values())
    assert {turn.rows for turn in result["b"].plain} == {2}
    assert short.num_open == 0
    lane = TimedBatch(short, Proposer(), 0, [(1, 2, 3)] * 20, WARM)
    assert lane.step().rows == 20 and lane.prefill > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_estimators_follow_what_a_proposer_draws(temperature):
    """Chains by the law of steps, fixed candidates over the record, what draws trees by running."""
    law = SamplingLaw(temperature=temperature)
    made = {
        "chain": DraftModel(TARGET.perturbed(0.4)),
        "argmax": DraftModel(TARGET.perturbed(0.4), DraftModelConfig(draft_temperature=0.0)),
        "likely": DraftModel(TARGET.perturbed(0.4), DraftModelConfig(tree="top_k")),
        "drawn": DraftModel(TARGET.perturbed(0.4), DraftModelConfig(tree="sampled")),
        "copied": Lookup(),
    }
    wanted = {name: Candidate(name, {"method": "ngram"}, (3,)) for name in made}
    proposers = Proposers(lambda config: pytest.fail("all are there"), dict(made))
    texts = write(TARGET, [[i % 6, 1, 2] for i in range(6)], law, 16)
    sample = Sample(TARGET, law, texts, (), proposers)
    result = {name: sample.estimate(candidate, 3) for name, candidate in wanted.items()}
    drawn = "steps" if temperature else "text"
    assert {name: e.estimator for name, e in result.items()} == {
        "chain": "distribution",
        "argmax": "distribution",
        "likely": "text",
        "drawn": drawn,
        "copied": "text",
    }
    assert all(1.0 <= e.tokens_per_pass <= 4.0 for e in result.values())
    if not temperature:
        assert result["chain"].tokens_per_pass == pytest.approx(result["argmax"].tokens_per_pass)


def drawn_tree_and_chain(texts, depth: int = 4):
    config = DraftModelConfig(tree="sampled", num_steps=depth)
    made = {"tree": DraftModel(TARGET.perturbed(0.4), config), "chain": DraftModel(TARGET.perturbed(0.4))}
    sample = Sample(TARGET, WARM, texts, (), Proposers(lambda config: pytest.fail("all are there"), dict(made)))
    return [sample.estimate(Candidate(name, {"method": "draft_model"}, (depth,)), depth) for name in made]


def test_a_drawn_tree_is_compared_with_a_chain_on_the_same_texts():
    """Its sample was as easy as it was; beside the chain it is as good on any sample."""
    prompts = [[i % 6, 1, 2] for i in range(6)]
    samples = [drawn_tree_and_chain(write(TARGET, prompts, WARM, 16, seed=seed)) for seed in range(4)]
    chains = [chain.tokens_per_pass for _, chain in samples]
    assert max(chains) > 1.02 * min(chains), "samples differ"
    beside = [tree.tokens_per_pass / chain.tokens_per_pass for tree, chain in samples]
    assert beside == pytest.approx([beside[0]] * 4)
    tree, chain = samples[0]
    assert (len(tree.tallies), tree.requests, tree.draws) == (18, 6, 3) and chain.requests == 6
    assert tree.spread == pytest.approx(math.sqrt(2) * replace(tree, draws=1).spread)


@pytest.mark.slow
def test_a_drawn_tree_gets_what_it_has_in_the_long_run(monkeypatch):
    """Over many seeds, both of the texts and of the runs on them."""
    prompts = [[i % 6, (5 * i) % 6, 1] for i in range(12)]
    config = DraftModelConfig(tree="sampled", num_steps=4)
    long = [
        step_estimate(TARGET, prompts, DraftModel(TARGET.perturbed(0.4), config), WARM, 4, 24, seed=s)
        for s in range(9, 29)
    ]
    truth = np.mean([each.tokens_per_pass for each in long])
    result = []
    for seed in range(12):
        monkeypatch.setattr("foretoken.plan.sample.step_estimate", partial(step_estimate, seed=seed))
        result.append(drawn_tree_and_chain(write(TARGET, prompts, WARM, 24, seed=seed))[0])
    assert np.mean([each.tokens_per_pass for each in result]) == pytest.approx(truth, rel=0.03)


def test_one_request_tells_nothing_of_others_however_often_it_is_drawn():
    tree, _ = drawn_tree_and_chain(write(TARGET, [[1, 2, 3]], WARM, 16))
    assert tree.requests == 1 and tree.spread == math.inf


def test_fewer_steps_for_more_tokens_a_pass():
    (tree, _) = drawn_tree_and_chain(write(TARGET, [[1, 2, 3], [2, 2, 2]], WARM, 16))
    assert tree.times(1.2).tokens_per_pass == pytest.approx(1.2 * tree.tokens_per_pass)
    assert tree.times(0.01).tokens_per_pass == pytest.approx(1.0)
    assert tree.times(1.2).acceptance == tree.acceptance and tree.times(1.2).sizes == tree.sizes


@pytest.mark.slow
def test_a_plan_of_the_tiny_pair(tiny_pair, tokenizer):
    target = load_model(tiny_pair.target)
    builder = Builder(target, load_tokenizer(tiny_pair.target), tiny_pair.target, load_model)
    shares: list[float] = []
    settings = PlanSettings(temperatures=(0.0, 1.0), batches=(1, 3), max_tokens=12, turns=3)
    planner = Planner(target, builder.build, settings, (), lambda what, share: shares.append(share))
    chosen = [
        Candidate("draft", {"method": "draft_model", "model": str(tiny_pair.draft)}, tuple(range(1, 8))),
        Candidate("tree", {"method": "draft_model", "model": str(tiny_pair.draft), "tree": "sampled"}, (6,)),
        Candidate("ngram", {"method": "ngram"}, (4,)),
        Candidate("recycling", {"method": "recycling"}, (4,)),
    ]
    prompts = [tokenizer.encode(text) for text in ("def greet(", "class Ün", "for i in range(10):\n", "    return")]
    result = planner.plan(prompts, chosen)
    assert len(result.rows) == 10 * 4 and len(result.choices) == 4
    assert shares == sorted(shares) and shares[0] == 0.0 and shares[-1] < 1.0
    for each in result.rows:
        assert 1.0 <= each.tokens_per_pass <= each.num_speculative_tokens + 1
        assert each.low < each.speedup < each.high and each.step_seconds > 0 and each.end_to_end > 0
    depths = [each.tokens_per_pass for each in result.rows if each.name == "draft"][:7]
    assert depths == sorted(depths)
    assert {key[1] for key in result.predictors} == {0.0, 1.0}
    json.dumps(result.to_dict(), allow_nan=False)
    with pytest.raises(InvalidRequest, match="prompt"):
        planner.plan([], chosen)


@pytest.mark.slow
def test_intervals_cover_another_sample():
    """Tokens per pass of a second, independent sample lie in the first one's interval about as often as promised."""
    prompts = [[i % 6, (5 * i) % 6, 1] for i in range(12)]
    result = [
        step_estimate(TARGET, prompts, DraftModel(TARGET.perturbed(0.4)), WARM, 4, 24, seed=seed) for seed in range(24)
    ]
    covered = [
        abs(math.log(other.tokens_per_pass / one.tokens_per_pass)) <= one.spread
        for one, other in zip(result[::2], result[1::2], strict=True)
    ]
    assert np.mean(covered) >= 0.75


def test_plain_steps_are_timed_in_the_midst_of_every_few_lanes() -> None:
    log: list[str] = []

    class Logged:
        def __init__(self, name: str) -> None:
            self.name = name

        def step(self) -> TimedStep:
            log.append(self.name)
            return TimedStep(len(log), 0.0, 0.0, 1)

    ticks: list[int] = []
    lanes = {name: Logged(name) for name in (PLAIN, *"abcdefghi")}
    seen = alternate(lanes, 6, ticks.append)  # type: ignore[arg-type]
    assert list(seen) == list("abcdefghi") and sum(ticks) == 6 * 9
    for own, plain in seen.values():
        assert len(own) == len(plain) == 6
        assert max(abs(one.seconds - other.seconds) for one, other in zip(own, plain, strict=True)) <= 2 * 6
    assert log.count(PLAIN) == 3 * (6 + 4)  # thrice in each of two turns, whose first two steps are not counted


def test_a_sample_without_steps_drafts_nothing():
    """All of its tokens came with the prompt."""
    assert AcceptanceEstimate((StepTally(),), "text").sizes == {0: 1.0}

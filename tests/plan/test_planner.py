"""The planner as a whole on the tiny pair and on toys, and the parts of it that are arithmetic."""

import json
import math
import shlex
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
from foretoken.plan.candidates import CHAIN, COPIED, TREE, Candidate, PlanRow, candidates, head_method
from foretoken.plan.exports import ENGINES, export_config, export_lines
from foretoken.plan.outcome import Plan
from foretoken.plan.planner import Planner, PlanSettings, timed_depths
from foretoken.plan.replay import Proposers, Sample, step_estimate, write
from foretoken.plan.texts import AcceptanceEstimate, StepTally
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.methods import METHODS
from foretoken.propose.suffix import Lookup
from foretoken.speculation import Builder

from .made_up import plan_row

TARGET = ToyModel(vocab_size=6, order=2, seed=3, sharpness=1.5)
WARM = SamplingLaw()


def row(name: str, depth: int, speedup: float, temperature: float = 0.0) -> PlanRow:
    bounds = {"tokens_per_pass_high": math.inf, "low": speedup - 0.1, "high": speedup + 0.1}
    return plan_row("ngram", depth, speedup, name=name, temperature=temperature, **bounds)


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
    chain = {"method": "draft_model", "model": "my D", "num_speculative_tokens": 5}
    forms = export_config(chain)
    assert forms["foretoken"] == chain == forms["vllm"]
    assert "assistant_model=draft" in forms["transformers"] and "num_assistant_tokens = 5" in forms["transformers"]
    compile(forms["transformers"], "call", "exec")
    assert forms["tensorrt_llm"] == (
        "speculative_config=DraftTargetDecodingConfig(max_draft_len=5, speculative_model='my D'), "
        "disable_overlap_scheduler=True"
    )
    assert shlex.split(forms["sglang"])[1::2] == ["STANDALONE", "my D", "5", "1", "6"]
    assert shlex.split(forms["llamacpp"])[1::2] == ["draft-simple", "my D.gguf", "5", "0"]
    assert forms["max"] is None
    lookup = export_config({"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 3})
    assert lookup["vllm"] == {
        "method": "ngram",
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
        "num_speculative_tokens": 8,
    }
    assert "prompt_lookup_num_tokens=8" in lookup["transformers"]
    assert "max_matching_ngram_size=3" in lookup["tensorrt_llm"] and "-size-n 3 " in lookup["llamacpp"]
    assert lookup["sglang"].endswith(" 9  # without prompt_lookup_max")


def test_trees_become_chains_in_other_engines():
    tree = {"method": "draft_model", "model": "D", "tree": "sampled", "num_speculative_tokens": 14}
    for config in (tree, {"method": "eagle3", "model": "D", "num_speculative_tokens": 8}):
        forms = export_config(config)
        assert forms["vllm"]["num_speculative_tokens"] == 4 and "max_draft_len=4" in forms["tensorrt_llm"]
        assert forms["sglang"].endswith(" 5  # without trees")
        assert export_lines(config)[1].endswith("# without trees")


def test_methods_that_an_engine_lacks_are_named():
    recycling = {"method": "recycling", "num_speculative_tokens": 8}
    assert [form for form in export_config(recycling).values() if form] == [recycling]
    assert all(line.endswith("has no such method") for line in export_lines(recycling)[1:])
    parallel = {"method": "eagle3", "model": "D", "parallel_drafting": True, "num_speculative_tokens": 4}
    assert [engine for engine, form in export_config(parallel).items() if form] == ["foretoken", "vllm"]
    for known in ENGINES.values():
        assert set(known.methods) <= set(METHODS)


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
        monkeypatch.setattr("foretoken.plan.replay.step_estimate", partial(step_estimate, seed=seed))
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


def test_a_sample_without_steps_drafts_nothing():
    """All of its tokens came with the prompt."""
    assert AcceptanceEstimate((StepTally(),), "text").sizes == {0: 1.0}

"""Rules that end a draft: how they are named, what each makes of a row, what the margin's learns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.propose.stopping.heads import random_head

from foretoken import LLM, SamplingParams
from foretoken.bench.workloads import FUNCTIONS
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.models.toy import ToyModel
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.stopping.base import Stop, check, make
from foretoken.propose.stopping.entropy import EntropyConfig, EntropyStop
from foretoken.propose.stopping.learned import AcceptanceHead, LearnedStop, features
from foretoken.propose.stopping.margin import MarginConfig, MarginEstimate, MarginStop, logistic, margin
from foretoken.train.acceptance_head import auc

TOY = ToyModel(8)
UNIFORM = torch.full((8,), 0.125)
CERTAIN = torch.eye(8)[3]


def context(identifier: int = 0, grade: Exactness = Exactness.DISTRIBUTION, temperature: float = 1.0) -> Context:
    return Context(identifier, [1, 2], 2, SamplingLaw(temperature=temperature), Streams(0), grade)


def step(drafted: int, accepted: int) -> StepOutput:
    verdict = Verdict(tuple(range(accepted)), 0)
    return StepOutput(0, 0, Draft.chain([1] * drafted), verdict, (1,) * accepted + (0,), Timings(0, 0, 0, 0, 1))


# names and keys


def test_rules_are_made_by_name(tmp_path: Path) -> None:
    assert make(None, TOY) is None
    assert isinstance(make("entropy", TOY), EntropyStop)
    assert isinstance(make("margin", TOY), MarginStop)
    tuned = make({"rule": "entropy", "threshold": 0.6}, TOY)
    assert isinstance(tuned, EntropyStop) and tuned.config == EntropyConfig(threshold=0.6)
    assert isinstance(make({"rule": "learned", "model": random_head(tmp_path / "head", 8)}, TOY), LearnedStop)
    assert not Stop().begin(context()).stops(UNIFORM, None)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("entropie", "entropy, margin, learned"),
        ({"threshold": 0.3}, "entropy, margin, learned"),
        (3, "draft_stop must be None"),
        ({"rule": ["entropy"]}, "entropy, margin, learned"),
        ({"rule": "entropy", "lambda": 0.3}, "unknown key.*lambda; known: threshold, coefficient"),
        ({"rule": "entropy", "threshold": 2}, "threshold of the entropy stop must be a number from 0 to 1"),
        ({"rule": "entropy", "coefficient": -1}, "coefficient of the entropy stop"),
        ({"rule": "margin", "warmup": -1}, "warmup of the margin stop"),
        ({"rule": "margin", "probe": 1}, "probe of the margin stop must be an integer of at least 2"),
        ("learned", "foretoken train acceptance"),
        ({"rule": "learned", "model": "m", "threshold": "high"}, "threshold of the learned stop"),
    ],
)
def test_what_cannot_be_honoured_is_refused(value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        check(value)


# entropy


def test_the_entropy_stop_is_the_papers_bound() -> None:
    bound = 1 - math.sqrt(0.2 * math.log(8))
    for threshold, stops in ((bound - 1e-6, False), (bound + 1e-6, True)):
        assert EntropyStop(EntropyConfig(threshold)).stops(UNIFORM, None) is stops
    assert not EntropyStop(EntropyConfig(1.0)).stops(CERTAIN, None)
    assert EntropyStop(EntropyConfig(1.0)).stops(UNIFORM, None)
    assert not EntropyStop(EntropyConfig(0.9, coefficient=0.0)).stops(UNIFORM, None)


# margin


def test_margins_are_logarithms_of_odds_and_bounded() -> None:
    assert margin(torch.tensor([0.1, 0.6, 0.3])) == pytest.approx(math.log(2))
    assert margin(UNIFORM) == 0
    assert margin(CERTAIN) == margin(torch.tensor([1.0])) == margin(torch.tensor([1.0, 1e-30])) == 16


def test_newton_finds_what_made_the_data() -> None:
    rng = np.random.default_rng(0)
    x = rng.exponential(3.0, 20_000)
    y = (rng.random(20_000) < 1 / (1 + np.exp(1.0 - 0.8 * x))).astype(float)
    for start in ((0.5, 0.0), (-40.0, 300.0)):
        w, b = logistic(x, y, np.array(start), np.zeros(2), np.full(2, 1e-6))
        assert (w, b) == pytest.approx((0.8, -1.0), abs=0.05)


def test_data_that_a_line_separates_and_no_data_give_finite_fits() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])
    fit = logistic(x, (x > 2).astype(float), np.zeros(2), np.zeros(2), np.ones(2))
    assert np.isfinite(fit).all() and fit[0] > 0
    nothing = np.empty(0)
    assert logistic(nothing, nothing, np.ones(2), np.zeros(2), np.ones(2)) == pytest.approx([0, 0])


def test_what_lies_below_a_rejection_is_unknown() -> None:
    estimate = MarginEstimate()
    estimate.learn([1.0, 2.0, 3.0, 4.0], accepted=1)
    estimate.learn([5.0, 6.0], accepted=2)
    assert list(estimate.outcomes) == [(0, 1.0, True), (1, 2.0, False), (0, 5.0, True), (1, 6.0, True)]


def test_every_depth_has_its_own_fit_around_the_common_one() -> None:
    estimate, rng = MarginEstimate(), np.random.default_rng(0)
    for _ in range(400):
        accepted = 0 if rng.random() < 0.1 else 1 if rng.random() < 0.7 else 2
        estimate.learn([1.0, 1.0], accepted)
    assert estimate.chance(0, 1.0) == pytest.approx(0.9, abs=0.05)
    assert estimate.chance(1, 1.0) == pytest.approx(0.3, abs=0.07)
    assert 0.3 < estimate.chance(7, 1.0) < 0.9
    assert len(estimate.fits) == 2
    deep = MarginEstimate()
    for _ in range(16):
        deep.learn([1.0] * 40, 40)
    assert deep.chance(40, 1.0) == deep.chance(15, 1.0)


def run(stop: MarginStop, rows: list[torch.Tensor], c: Context, accepted: int) -> int:
    """One draft along ``rows`` and its outcome. -> its length"""
    gate = stop.begin(c)
    drafted = next((i for i, row in enumerate(rows) if gate.stops(row, None)), len(rows))
    stop.observe(c, step(drafted, min(accepted, drafted)))
    return drafted


def test_the_margin_stop_warms_up_then_cuts_then_probes() -> None:
    stop = MarginStop(MarginConfig(threshold=0.3, warmup=32, probe=8))
    rows = [torch.tensor([0.98, 0.02]), UNIFORM, UNIFORM]
    lengths = [run(stop, rows, context(), 1) for _ in range(32)]
    assert lengths == [3] * 32
    lengths = [run(stop, rows, context(), 1) for _ in range(16)]
    assert lengths.count(1) == 14
    assert lengths.count(3) == 2
    assert run(stop, rows, context(temperature=0.0), 1) == run(stop, rows, context(grade=Exactness.TRAJECTORY), 1) == 3


def test_a_draft_without_an_outcome_teaches_nothing() -> None:
    stop = MarginStop(MarginConfig())
    stop.begin(context()).stops(UNIFORM, None)
    stop.forget(context())
    stop.forget(context(7))
    stop.observe(context(), step(1, 1))
    assert not stop.estimates["distribution"].outcomes


@pytest.mark.slow
def test_the_margin_tells_what_the_bundled_target_will_accept() -> None:
    """Fitted on the first functions, judged on the others: the area under the curve."""
    config = {"draft_stop": {"rule": "margin", "warmup": 10_000}, "num_speculative_tokens": 6}
    llm = LLM(speculative_config=config)
    proposer = llm.engine.proposer
    assert isinstance(proposer, DraftModel) and isinstance(proposer.stop, MarginStop)
    result = {}
    for kind, settings in (("greedy", {"temperature": 0.0}), ("distribution", {"temperature": 1.0})):
        params = SamplingParams(max_tokens=48, ignore_eos=True, **settings)  # type: ignore[arg-type]
        llm.generate(FUNCTIONS[:3], params)
        estimate = proposer.stop.estimates[kind]
        estimate.refit()
        known, estimate.fitted = len(estimate.outcomes), 10_000  # no more fits
        llm.generate(FUNCTIONS[3:], params)
        fresh = list(estimate.outcomes)[known:]
        chances = torch.tensor([estimate.chance(depth, value) for depth, value, _ in fresh])
        result[kind] = auc(chances, torch.tensor([float(accepted) for *_, accepted in fresh]))
    # At temperature 1 the draws themselves cannot be foreseen.
    assert result["greedy"] > 0.75, result
    assert result["distribution"] > 0.55, result


# the trained head


def test_a_head_reads_states_and_distributions(tmp_path: Path) -> None:
    head = AcceptanceHead.load(random_head(tmp_path / "head", 8), torch.device("cpu"))
    hidden = torch.randn(2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = features(hidden, torch.stack([UNIFORM, CERTAIN]), greedy=True)
    assert x.dtype == torch.float32
    assert x[:, 8:].tolist() == [[pytest.approx(math.sqrt(math.log(8))), 0.125, 1.0], [0.0, 1.0, 1.0]]
    z = torch.nn.functional.silu(x @ head.up.T + head.bias) @ head.down[0] + head.offset
    assert torch.allclose(head.chances(x), z.sigmoid())


def test_the_learned_stop_multiplies_chances(tmp_path: Path) -> None:
    folder = random_head(tmp_path / "head", 8)
    hidden = torch.ones(8)
    chance = float(
        AcceptanceHead.load(folder, torch.device("cpu")).chances(features(hidden[None], UNIFORM[None], False))
    )
    assert 0.05 < chance < 0.95
    for threshold, length in ((1 - chance + 1e-4, 1), (1 - chance**2 + 1e-4, 2), (1.0, 20), (0.0, 0)):
        stop = make({"rule": "learned", "model": folder, "threshold": threshold}, TOY)
        assert stop is not None
        gate = stop.begin(context())
        assert next((i for i in range(20) if gate.stops(UNIFORM, hidden)), 20) == length


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"model_type": "llama"}, "no acceptance head.*train acceptance"),
        ({"intermediate_size": 5}, "lacks a tensor 'up"),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, facts: dict[str, Any], says: str) -> None:
    folder = random_head(tmp_path / "head", 8, **facts)
    with pytest.raises(ModelLoadError, match=says):
        make({"rule": "learned", "model": folder}, TOY)


def test_a_head_for_another_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="reads hidden states of 9 and this draft's have 8"):
        make({"rule": "learned", "model": random_head(tmp_path / "head", 9)}, TOY)
    with pytest.raises(ModelLoadError, match="no folder"):
        make({"rule": "learned", "model": "./nowhere"}, TOY)

"""Scores of draft tokens: their names, their values, and the chains that they end."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.propose.heads import random_head

from foretoken import LLM, SamplingParams
from foretoken.core.context import ChainEnd, Context, Exactness
from foretoken.core.draft import PointMass, Sampled
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.models.chains import DraftStop, ScoredRows
from foretoken.models.toy import ToyModel
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.early_exit import EarlyExitConfig
from foretoken.propose.scores import AcceptanceHead, check_stop, entropy_bound, features, make_stop, margin
from foretoken.propose.vocabulary import VocabularyConfig

TOY = ToyModel(8)
UNIFORM = torch.full((8,), 0.125)
CERTAIN = torch.eye(8)[3]


# names and keys


def test_stops_are_made_by_name(tmp_path: Path) -> None:
    assert make_stop(None, TOY) is None
    for value, threshold in (("entropy", 0.1), ("margin", 0.1), ({"rule": "entropy", "threshold": 0.6}, 0.6)):
        stop = make_stop(value, TOY)
        assert stop is not None and stop.threshold == threshold and not stop.hidden
    stop = make_stop({"rule": "learned", "model": random_head(tmp_path / "head", 8), "threshold": 0.7}, TOY)
    assert stop is not None and stop.hidden and stop.threshold == pytest.approx(0.3)


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
        ({"rule": "margin", "warmup": 3}, "unknown key.*warmup"),
        ("learned", "foretoken train acceptance"),
        ({"rule": "learned", "model": "m", "threshold": "high"}, "threshold of the learned stop"),
    ],
)
def test_invalid_stopping_rules_are_refused(value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        check_stop(value)


# scores


def test_the_entropy_score_is_the_papers_bound() -> None:
    assert entropy_bound(UNIFORM, 0.2) == pytest.approx(1 - math.sqrt(0.2 * math.log(8)))
    assert entropy_bound(CERTAIN, 0.2) == 1.0 == entropy_bound(UNIFORM, 0.0)
    assert entropy_bound(UNIFORM, 9.0) == 0.0


def test_the_margin_score_is_one_less_the_ratio_of_the_largest() -> None:
    assert margin(torch.tensor([0.1, 0.6, 0.3])) == pytest.approx(0.5)
    assert margin(UNIFORM) == 0.0
    assert margin(CERTAIN) == margin(torch.tensor([1.0])) == 1.0


# the trained head


def test_a_head_reads_states_and_distributions(tmp_path: Path) -> None:
    head = AcceptanceHead.load(random_head(tmp_path / "head", 8), torch.device("cpu"))
    hidden = torch.randn(2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = features(hidden, torch.stack([UNIFORM, CERTAIN]), greedy=True)
    assert x.dtype == torch.float32
    assert x[:, 8:].tolist() == [[pytest.approx(math.sqrt(math.log(8))), 0.125, 1.0], [0.0, 1.0, 1.0]]
    z = torch.nn.functional.silu(x @ head.up.T + head.bias) @ head.down[0] + head.offset
    assert torch.allclose(head.chances(x), z.sigmoid())


def test_a_head_scores_one_position(tmp_path: Path) -> None:
    folder, hidden = random_head(tmp_path / "head", 8), torch.ones(8)
    head = AcceptanceHead.load(folder, torch.device("cpu"))
    stop, greedy = make_stop({"rule": "learned", "model": folder}, TOY), torch.tensor([False])
    assert stop is not None
    wanted = float(head.chances(features(hidden[None], UNIFORM[None], False)))
    rows = ScoredRows(UNIFORM[None], hidden[None], torch.tensor([3]), greedy)
    assert float(stop.score(rows)) == pytest.approx(wanted) and 0.05 < wanted < 0.95
    with pytest.raises(TypeError, match="hidden states"):
        stop.score(rows._replace(hidden=None))


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
        make_stop({"rule": "learned", "model": folder}, TOY)


def test_a_head_for_another_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="reads hidden states of 9 and this draft's have 8"):
        make_stop({"rule": "learned", "model": random_head(tmp_path / "head", 9)}, TOY)
    with pytest.raises(ModelLoadError, match="no folder"):
        make_stop({"rule": "learned", "model": "./nowhere"}, TOY)


# chains

DRAFT = ToyModel(vocab_size=7, order=2, seed=1, sharpness=2.0)
DEPTH = 8
PROMPTS = [[1, 2, 3, i] for i in range(6)]


def context(i: int = 0, grade: Exactness = Exactness.DISTRIBUTION, **law: float) -> Context:
    return Context(i, list(PROMPTS[i]), 4, SamplingLaw(**law), Streams(i), grade)  # type: ignore[arg-type]


def drafter(stop: Any, **keys: Any) -> DraftModel:
    return DraftModel(DRAFT, DraftModelConfig(draft_stop=stop, **keys))


@pytest.fixture
def rules(tmp_path: Path) -> dict[str, Callable[[], DraftModel]]:
    """Proposers whose drafts end sometimes at once, sometimes never."""

    head = random_head(tmp_path / "head", DRAFT.hidden_size, scale=1.0)
    return {
        "entropy": lambda: drafter({"rule": "entropy", "threshold": 0.5}),
        "margin": lambda: drafter({"rule": "margin", "threshold": 0.3}),
        "learned": lambda: drafter({"rule": "learned", "model": head, "threshold": 0.6}),
    }


RULES = ["entropy", "margin", "learned"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.0}, {"grade": Exactness.TRAJECTORY}, {"temperature": 0.7, "presence_penalty": 0.5}],
    ids=["drawn", "greedy", "trajectory", "penalized"],
)
def test_a_stopped_chain_is_a_prefix_of_the_whole_one(rule: str, settings: dict[str, Any], rules: Any) -> None:
    lengths = set()
    for i in range(len(PROMPTS)):
        whole = DraftModel(DRAFT).propose([context(i, **settings)], [DEPTH])[0]
        draft = rules[rule]().propose([context(i, **settings)], [DEPTH])[0]
        assert draft.ids == whole.ids[: len(draft)]
        assert isinstance(draft.law, type(whole.law) if len(draft) else PointMass)
        if isinstance(draft.law, Sampled) and isinstance(whole.law, Sampled):
            assert torch.equal(draft.law.probs, whole.law.probs[: len(draft)])
        lengths.add(len(draft))
    assert min(lengths) < DEPTH, lengths
    assert max(lengths) > 0, lengths


@pytest.mark.parametrize("rule", RULES)
def test_drafts_of_a_batch_are_those_of_each_alone(rule: str, rules: Any) -> None:
    contexts = [context(i) for i in range(len(PROMPTS))]
    budgets = [8, 0, 3, 8, 1, 8]
    together = rules[rule]().propose(contexts, budgets)
    for c, budget, draft in zip(contexts, budgets, together, strict=True):
        alone = rules[rule]().propose([c], [budget])[0]
        assert draft.ids == alone.ids
        assert len(draft) <= budget


def test_the_entropy_of_the_row_decides_where() -> None:
    """The rule, computed by hand from the draft's own law."""
    for i in range(len(PROMPTS)):
        c = context(i, top_p=0.9)
        draft = drafter({"rule": "entropy", "threshold": 0.5}).propose([c], [DEPTH])[0]
        for depth in range(len(draft) + (len(draft) < DEPTH)):
            path = draft.ids[:depth]
            q = c.law.probs(DRAFT.logits([*PROMPTS[i], *path])[None], [c.history(path)])[0]
            bound = 1 - (0.2 * float(torch.special.entr(q).sum())) ** 0.5
            assert (bound < 0.5) == (depth == len(draft))


def test_a_draft_may_end_before_it_begins() -> None:
    draft = drafter({"rule": "entropy", "threshold": 1.0}).propose([context()], [DEPTH])[0]
    assert len(draft) == 0
    assert isinstance(draft.law, PointMass)


def test_a_score_sees_the_sampled_distribution_and_of_greedy_requests_temperature_one() -> None:
    seen: list[torch.Tensor] = []
    proposer = DraftModel(DRAFT)
    proposer.stop = DraftStop(lambda rows: seen.append(rows.probs[0]) or torch.ones(1), 0.0)
    draft = proposer.propose([context(top_k=3)], [4])[0]
    assert isinstance(draft.law, Sampled)
    assert torch.equal(torch.stack(seen), draft.law.probs)
    seen.clear()
    draft = proposer.propose([context(1, temperature=0.0)], [2])[0]
    assert torch.equal(seen[1], DRAFT.probs([*PROMPTS[1], *draft.ids[:1]]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_policys_minimum_takes_the_place_of_the_threshold(temperature: float) -> None:
    """The calibrated score counts; a greedy chain keeps the token that is below the minimum."""
    c = context(temperature=temperature)
    c.end = ChainEnd(
        (0.5,), (0.0, 0.5), (0.0, 0.0), (0.1,)
    )  # at a score of 0.9 a token is accepted in half of all cases
    proposer = DraftModel(DRAFT)
    proposer.stop = DraftStop(lambda rows: torch.tensor([0.9]), 1.0)
    draft = proposer.propose([c], [DEPTH])[0]
    assert len(draft) == (4 if temperature == 0.0 else 3)  # 0.5 ** 4 is below 0.1
    assert draft.scores is not None and math.exp(draft.scores[0]) == pytest.approx(0.9)


def test_trees_take_no_stopping_rule() -> None:
    with pytest.raises(InvalidRequest, match="draft_stop ends chains, and tree is 'top_k'"):
        DraftModelConfig(tree="top_k", draft_stop="entropy")
    for config in (EarlyExitConfig, VocabularyConfig):
        with pytest.raises(InvalidRequest, match="draft_stop must be"):
            config(draft_stop="soon")


@pytest.mark.slow
def test_every_draft_with_hidden_states_takes_every_rule(tiny_pair: Any, tmp_path: Path) -> None:
    """A model, the target's own first layers, and a draft of another vocabulary; the text is the target's."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    plain = LLM(tiny_pair.target, dtype="float32").generate("def greet", params)[0].outputs[0].token_ids
    methods = (("draft_model", 32), ("early_exit", 64), ("vocabulary", 32))
    for method, hidden in methods:
        config = {"method": method, "num_speculative_tokens": 6}
        if method != "early_exit":
            config["model"] = str(tiny_pair.draft)
        if method == "vocabulary":
            config["algorithm"] = "tli"
        head = str(random_head(tmp_path / method, hidden))
        for stop in ("entropy", "margin", {"rule": "learned", "model": head, "threshold": 0.8}):
            llm = LLM(tiny_pair.target, speculative_config=config | {"draft_stop": stop}, dtype="float32")
            output = llm.generate("def greet", params)[0]
            assert output.outputs[0].token_ids == plain
            seeded = SamplingParams(max_tokens=12, ignore_eos=True)
            llm.generate(["def greet", "for i"], seeded)

"""The acceptance head: what it is taught, trained and stored at a tiny size, in the form that the stop loads."""

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from foretoken import LLM, SamplingParams
from foretoken.core.errors import InvalidRequest
from foretoken.propose.scores import AcceptanceHead
from foretoken.train.acceptance_head import Classifier, auc, replay, train_acceptance
from foretoken.train.config import ACCEPTANCE_CONFIG, AcceptanceConfig, RunOptions
from foretoken.train.data import Corpus
from foretoken.train.frozen_target import FrozenTarget

from .test_cli import invoke

CONFIG = replace(ACCEPTANCE_CONFIG, steps=40, batch=32, window=24)
SETTINGS = AcceptanceConfig(intermediate=8, windows=8, held_out=1)


@pytest.fixture
def models(tiny_pair: Any) -> tuple[FrozenTarget, FrozenTarget]:
    return FrozenTarget(tiny_pair.target, torch.device("cpu")), FrozenTarget(tiny_pair.draft, torch.device("cpu"))


def test_labels_are_probabilities_of_acceptance(models: tuple[FrozenTarget, FrozenTarget]) -> None:
    target, draft = models
    windows = torch.arange(40).view(2, 20)
    places = replay(target, draft, windows, [0.0, 0.7], skip=4)
    assert places.chance.shape == (32,)
    assert places.x.shape == (32, draft.hidden + 3)
    with torch.no_grad():
        p, q = (model.logits(windows)[:, 4:].float() for model in models)
    greedy = (p[0].argmax(-1) == q[0].argmax(-1)).float()
    assert torch.equal(places.chance[:16], greedy)
    drawn = torch.minimum((p[1] / 0.7).softmax(-1), (q[1] / 0.7).softmax(-1)).sum(-1)
    assert torch.allclose(places.chance[16:], drawn, atol=0.02)
    assert places.x[:, -1].tolist() == [1.0] * 16 + [0.0] * 16
    assert torch.allclose(places.x[:16, -2], q[0].softmax(-1).amax(-1), atol=0.02)


def test_area_under_the_curve() -> None:
    assert auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0])) == 0.75
    assert auc(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0])) == 0.5
    assert auc(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])) == 0.5
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (60,), generator=generator).float()
    chance = torch.rand(60, generator=generator)
    pairs = (scores[:, None] > scores).float() + 0.5 * (scores[:, None] == scores).float()
    weights = chance[:, None] * (1 - chance)
    assert auc(scores, chance) == pytest.approx(float((pairs * weights).sum() / weights.sum()), abs=1e-5)


def test_a_stored_head_computes_the_trained_probabilities() -> None:
    torch.manual_seed(0)
    head, x = Classifier(7, 5), 3 + 10 * torch.rand(20, 7)
    head.standardise(x)
    stored = AcceptanceHead(*head.tensors().values())
    assert stored.hidden_size == 4
    assert torch.allclose(stored.chances(x), head(x).sigmoid(), atol=1e-6)


def test_trained_stored_and_used(tiny_pair: Any, corpus: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "head"
    figures = train_acceptance(RunOptions(out, "cpu"), tiny_pair.target, tiny_pair.draft, corpus, CONFIG, SETTINGS)
    assert [f.name for f in tmp_path.iterdir()] == ["head"]
    assert 0 <= figures["auc_drawn"] <= 1
    assert figures["loss_drawn"] < 2 * figures["loss_drawn_constant"]
    card = json.loads((out / "provenance.json").read_text())
    assert card["command"].startswith("foretoken train acceptance head --model target --draft-model draft --windows 8")
    assert card["loss_drawn"] == figures["loss_drawn"]
    assert card["parameters"] == 8 * 35 + 8 + 8 + 1
    stop = {"rule": "learned", "model": str(out), "threshold": 0.7}
    config = {"draft_stop": stop, "num_speculative_tokens": 6}
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    output = LLM(tiny_pair.target, tiny_pair.draft, speculative_config=config, dtype="float32").generate("def", params)[
        0
    ]
    plain = LLM(tiny_pair.target, speculative_config={"method": "none"}, dtype="float32").generate("def", params)[0]
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.stats.drafted < 6 * output.stats.steps


@pytest.mark.slow
def test_a_resumed_run_ends_the_same(tiny_pair, corpus, tmp_path, monkeypatch):
    train_acceptance(RunOptions(tmp_path / "a", "cpu"), tiny_pair.target, tiny_pair.draft, corpus, CONFIG, SETTINGS)
    loss, losses = F.binary_cross_entropy_with_logits, count()

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(losses) == 20:
            raise KeyboardInterrupt
        return loss(*args, **options)

    monkeypatch.setattr(F, "binary_cross_entropy_with_logits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_acceptance(RunOptions(tmp_path / "b", "cpu"), tiny_pair.target, tiny_pair.draft, corpus, CONFIG, SETTINGS)
    assert (tmp_path / "b.checkpoint").exists()
    assert (tmp_path / "b.lessons").exists()
    monkeypatch.undo()
    resumed = RunOptions(tmp_path / "b", "cpu", resume=True)
    train_acceptance(resumed, tiny_pair.target, tiny_pair.draft, corpus, CONFIG, SETTINGS)
    a, b = (AcceptanceHead.load(tmp_path / name, torch.device("cpu")) for name in "ab")
    assert torch.equal(a.up, b.up)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a", "b"]


def test_the_command_trains_and_saves_a_head(tiny_pair: Any, texts: Path, tmp_path: Path) -> None:
    options = ["--model", tiny_pair.target, "--data", texts, "--steps", 5, "--batch", 16, "--window", 24, "--json"]
    options += ["--windows", 4, "--held-out", 1, "--intermediate", 4, "--device", "cpu"]
    done = invoke("train", "acceptance", tmp_path / "head", *options, "--draft-model", tiny_pair.draft)
    assert "auc_greedy" in json.loads(done.stdout)
    with pytest.raises(InvalidRequest, match="without --draft-model"):
        invoke("train", "acceptance", tmp_path / "other", *options)

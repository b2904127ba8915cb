"""The encoder-decoder pair, end to end at a tiny size, and its bug-fixing corpus."""

import ast
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from foretoken.bench.workloads import REPAIRS
from foretoken.core.errors import InvalidRequest, ModelLoadError, WriteError
from foretoken.train.config import RunOptions, TrainConfig
from foretoken.train.data import Corpus
from foretoken.train.losses import distillation_loss
from foretoken.train.shapes import T5Shape

from .repair_script import repair
from .repair_script import tasks as repair_tasks
from .test_cli import invoke

IGNORED = repair.IGNORED

TINY = T5Shape(32, 48, 2, 1, 2, 16)
STEPS = TrainConfig(steps=4, batch=2, window=64, learning_rate=1e-2, compile=False)


@pytest.fixture(scope="module")
def target(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("zoo") / "tiny-repair"
    repair.train_seq2seq(RunOptions(out), corpus, TINY, STEPS)
    return out


def test_a_target_loads_as_an_ordinary_checkpoint(target: Path, corpus: Corpus) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForSeq2SeqLM.from_pretrained(target)
    assert model.dtype == torch.bfloat16
    assert not model.config.scale_decoder_outputs
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] is False
    assert not torch.equal(model.lm_head.weight, model.shared.weight)
    end = tokenizer.eos_token_id
    assert tokenizer("x = 1")["input_ids"][-1] == end == model.config.decoder_start_token_id
    assert tokenizer.decode(tokenizer("x = 1")["input_ids"], skip_special_tokens=True) == "x = 1"
    facts = json.loads((target / "provenance.json").read_text())
    assert facts["command"].startswith("foretoken train seq2seq tiny-repair --hidden 32")
    assert 0 <= facts["token_accuracy"] <= 1
    assert facts["parameters"] == model.num_parameters()


@pytest.mark.slow
def test_loaded_models_compute_the_trained_logits(corpus: Corpus, tmp_path: Path, monkeypatch: Any) -> None:
    made: list[Any] = []
    new_model = repair.new_model

    def kept(*args: Any, **kwargs: Any) -> Any:
        made.append(new_model(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(repair, "new_model", kept)
    repair.train_seq2seq(RunOptions(tmp_path / "t"), corpus, TINY, STEPS)
    repair.train_seq2seq_draft(RunOptions(tmp_path / "d"), tmp_path / "t", corpus, TINY, STEPS)
    tokenizer = repair.bundled_tokenizer()
    tasks = repair.held_out(4, 0, corpus, tokenizer, 64)
    batch = repair.held_out_batches(tokenizer, tasks, 64, 256)[0]
    for model, name in zip(made, "td", strict=True):
        again = repair.load_seq2seq(tmp_path / name).float()
        with torch.no_grad():
            assert (repair.logits_of(model.float().eval(), batch) - repair.logits_of(again, batch)).abs().max() < 1e-4


@pytest.mark.slow
def test_a_draft_is_distilled_and_both_are_described(target: Path, corpus: Corpus) -> None:
    out = target.with_name("tiny-repair-draft")
    figures = repair.train_seq2seq_draft(RunOptions(out), target, corpus, replace(TINY, d_model=16), STEPS)
    assert 0 < figures["overlap"] <= 1
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert (out / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    cards = [card.read_text() for card in repair.write_seq2seq_cards(target, out, corpus)]
    assert "repaired exactly" in cards[0]
    assert "temperature 0" in cards[1]
    assert "foretoken train seq2seq-draft tiny-repair-draft --target tiny-repair --acceptance-share 0.3" in cards[1]
    roles = [json.loads((folder / "zoo.json").read_text())["role"] for folder in (target, out)]
    assert roles == ["seq2seq-target", "seq2seq-draft"]
    assert not list(target.parent.glob("*checkpoint*"))


@pytest.mark.slow
def test_training_resumes(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(repair, "save", full)
        with pytest.raises(WriteError, match="No space left"):
            repair.train_seq2seq(RunOptions(tmp_path / "out"), corpus, TINY, STEPS)
    assert repair.train_seq2seq(RunOptions(tmp_path / "out", resume=True), corpus, TINY, STEPS)["step"] == 4


def test_the_losses_count_the_answers_tokens_alone() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(2, 3, 11), torch.randn(2, 3, 11)
    counted = torch.tensor([[True, True, False], [True, False, False]])
    p_law, q_law = (x.log_softmax(-1)[counted] for x in (p, q))
    kl = (p_law.exp() * (p_law - q_law)).sum(-1).mean()
    assert distillation_loss(q, p, torch.tensor(0.0), counted) == pytest.approx(kl.item(), abs=1e-5)
    overlap = torch.minimum(p_law.exp(), q_law.exp()).sum(-1).log().mean()
    assert distillation_loss(q, p, torch.tensor(1.0), counted) == pytest.approx(-overlap.item(), abs=1e-5)
    assert distillation_loss(p, p, torch.tensor(0.5), counted).abs() < 1e-5
    labels = torch.tensor([[1, 2, IGNORED], [3, IGNORED, IGNORED]])
    expected = -torch.stack([q_law[0, 1], q_law[1, 2], q_law[2, 3]]).mean()
    assert repair.label_loss(q, labels) == pytest.approx(expected.item(), abs=1e-5)


def test_exactness_counts_whole_answers(target: Path, corpus: Corpus) -> None:
    class Copier(torch.nn.Module):
        def generate(self, source: torch.Tensor, **_: Any) -> torch.Tensor:
            return torch.cat([torch.zeros_like(source[:, :1]), source], dim=1)

    tasks = repair.held_out(6, 0, corpus, window=64)
    copied = [repair.RepairTask(task.right, task.right) for task in tasks[:3]] + tasks[3:]
    model: Any = Copier()
    assert repair.exactness(model, copied, 64) == {"exact_repairs": 0.5, "tasks_written": 6.0}


def test_unusable_targets_and_sizes_raise(tmp_path: Path, corpus: Corpus) -> None:
    with pytest.raises(ModelLoadError, match="cannot load the target"):
        repair.train_seq2seq_draft(RunOptions(tmp_path / "out"), tmp_path / "nothing", corpus, TINY, STEPS)
    with pytest.raises(InvalidRequest, match="d_ff must be an integer of at least 1, got 0"):
        T5Shape(d_ff=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_commands_train_widen_and_describe_a_pair(texts: Path, tmp_path: Path) -> None:
    sizes = ["--hidden", 32, "--intermediate", 48, "--layers", 1, "--decoder-layers", 1, "--heads", 2, "--head-dim", 16]
    run = [*sizes, "--no-compile", "--steps", 2, "--batch", 2, "--window", 64, "--corpus", texts]
    target, draft, wide = tmp_path / "t", tmp_path / "d", tmp_path / "w"
    assert json.loads(invoke("train", "seq2seq", target, *run, "--json").stdout)["held_out_loss"] > 0
    assert "overlap" in invoke("train", "seq2seq-draft", draft, "--target", target, *run).stdout
    done = invoke("train", "seq2seq-card", target, "--draft", draft, "--corpus", texts).stdout
    assert str(draft / "README.md") in done
    larger = ["--hidden", 64, "--intermediate", 96, "--layers", 2, "--heads", 4]
    assert json.loads(invoke("widen", target, wide, *larger, "--json").stdout)["parameters"] > 20_000
    with pytest.raises(InvalidRequest, match="no size that --kv-heads sets"):
        invoke("widen", target, tmp_path / "x", "--kv-heads", 2)
    with pytest.raises(InvalidRequest, match="t5-large"):
        invoke("widen", target, tmp_path / "x", "--size", "0.7b")


TEXT = """class Clock:
    def tick(self, number):
        if number == self.number and "late":
            return [self.number, number]
        import time
        return time.time()
"""


def test_each_bug_changes_one_position_or_nothing() -> None:
    rng = np.random.default_rng(0)
    for bug in repair_tasks.BUGS:
        spoilt = {bug(TEXT, rng) for _ in range(40)}
        assert len(spoilt - {TEXT}) > (0 if bug.__name__ == "_assign" else 1), bug.__name__
        assert all(abs(len(text) - len(TEXT)) <= 8 for text in spoilt)
        assert bug("", rng) == ""
    assert repair_tasks.BUGS[5]("if a == b:\n    pass", rng) == "if a = b:\n    pass"


def test_planting_depends_on_the_numbers_alone() -> None:
    texts = [repair_tasks.plant(TEXT, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert TEXT not in texts
    assert repair_tasks.plant("", np.random.default_rng(0)) == ""


def test_snippets_are_whole_statements(corpus: Corpus, tokenizer: Any) -> None:
    data = repair_tasks.snippets(corpus.train, tokenizer, 64, seed=0)
    assert set(data.by_length) <= set(repair_tasks.lengths(64))
    listed = [text for texts in data.by_length.values() for text in texts]
    assert len(listed) == len(set(listed)) > 5
    for text in listed:
        ast.parse(text)
        assert len(tokenizer(text)["input_ids"]) <= 64 - 12
    assert data.tokens >= 64
    assert repair_tasks.snippets(corpus.train, tokenizer, 64, seed=0) == data
    with pytest.raises(InvalidRequest, match="no Python"):
        repair_tasks.snippets(("1 +", "prose, not code"), tokenizer, 64, seed=0)


def test_batches_resume_and_end_with_the_end_token(corpus: Corpus, tokenizer: Any) -> None:
    data = repair_tasks.snippets(corpus.train, tokenizer, 64, seed=0)
    first = list(islice(repair_tasks.batches(data, 256, seed=1), 5))
    again = next(repair_tasks.batches(data, 256, seed=1, start=4))
    assert all(torch.equal(a, b) for a, b in zip(first[4], again, strict=True))
    end = tokenizer.eos_token_id
    for labels, source, mask in first:
        assert labels.shape == source.shape == mask.shape
        for label, ids, counted in zip(labels, source, mask, strict=True):
            right, question = label[label != IGNORED], ids[counted]
            assert right[-1] == question[-1] == end
            assert (right == end).sum() == (question == end).sum() == 1
            ast.parse(tokenizer.decode(right[:-1]))


def test_an_input_that_exceeds_its_row_keeps_the_original(tokenizer: Any) -> None:
    labels, source, mask = repair_tasks.task_batch(tokenizer, [repair_tasks.RepairTask("x = 1\n" * 20, "x = 1")], 16)
    assert torch.equal(source[mask], labels[labels != IGNORED])


def test_held_out_tasks_come_from_held_out_files(corpus: Corpus, tokenizer: Any) -> None:
    tasks = repair_tasks.held_out(8, 3, corpus, tokenizer, window=64)
    assert (
        tasks
        == repair_tasks.held_out(8, 3, corpus, tokenizer, window=64)
        != repair_tasks.held_out(8, 4, corpus, tokenizer, 64)
    )
    for broken, right in tasks:
        assert broken != right
        assert right in corpus.held_out[0]
        assert all(right not in text for text in corpus.train)
    batches = repair_tasks.held_out_batches(tokenizer, tasks, 64, 128)
    assert sum(len(labels) for labels, _, _ in batches) == len(tasks)


def test_the_packaged_tasks_are_of_that_kind(tokenizer: Any) -> None:
    tasks = [json.loads(line) for line in REPAIRS.read_text(encoding="utf-8").splitlines()]
    assert len(tasks) == 32
    for task in tasks:
        assert task["prompt"] != task["completion"]
        assert len(task["prompt"]) > 50

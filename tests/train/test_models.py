"""Target, draft and cards, end to end at a tiny size, and two processes that train together, over gloo."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretoken.core.errors import InvalidRequest, ModelLoadError, WriteError
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.train import draft as drafting
from foretoken.train import processes, sampling
from foretoken.train import target as targets
from foretoken.train.cards import write_cards
from foretoken.train.config import DistillConfig, RunOptions, TrainConfig
from foretoken.train.data import Corpus, encode
from foretoken.train.draft import train_draft
from foretoken.train.frozen_target import FrozenTarget, TopTokens, fixed_windows, shuffled
from foretoken.train.losses import agreement, distillation_loss
from foretoken.train.target import train_target
from foretoken.train.trainer import Trainer

from .tiny import STEPS, TINY


@pytest.fixture(scope="module")
def target(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("zoo") / "tiny-target"
    train_target(RunOptions(out), corpus, TINY, STEPS)
    return out


def test_a_target_loads_as_an_ordinary_checkpoint(target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tensors = safetensors.torch.load_file(target / "model.safetensors")
    assert {model.dtype, *(t.dtype for t in tensors.values())} == {torch.bfloat16}
    assert model.config.tie_word_embeddings
    assert tokenizer.decode(tokenizer("x = 1\n")["input_ids"]) == "x = 1\n"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    facts = json.loads((target / "provenance.json").read_text())
    assert facts["command"].startswith("foretoken train target tiny-target --hidden 32")
    assert facts["steps"] == 6
    assert facts["held_out_loss"] > 0
    assert not list(target.parent.glob("*checkpoint*"))


def test_a_full_disk_at_the_end_keeps_the_checkpoint(corpus, tmp_path, monkeypatch):
    def full(model: Any, tokenizer: Any, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    whole_save = targets.save
    monkeypatch.setattr(targets, "save", full)
    with pytest.raises(WriteError, match="No space left"):
        train_target(RunOptions(tmp_path / "out"), corpus, TINY, STEPS)
    assert [f.name for f in tmp_path.iterdir()] == ["out.checkpoint"]
    monkeypatch.setattr(targets, "save", whole_save)
    figures = train_target(RunOptions(tmp_path / "out", resume=True), corpus, TINY, STEPS)
    assert figures["step"] == 6
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_draft_is_distilled_and_described(target: Path, corpus: Corpus) -> None:
    out = target.with_name("tiny-draft")
    figures = train_draft(RunOptions(out), target, corpus, TINY, STEPS, DistillConfig(top=16, generated_share=0.25))
    assert 0 < figures["overlap"] <= 1
    assert 0 <= figures["argmax_agreement"] <= 1
    assert sorted(f.name for f in target.parent.iterdir()) == ["tiny-draft", "tiny-target"]
    draft_tokens = (out / "tokenizer.json").read_bytes()
    assert draft_tokens == (target / "tokenizer.json").read_bytes()

    cards = write_cards(target, out, corpus)
    text = cards[1].read_text()
    assert "temperature 0" in text
    assert "Apache-2.0" in text
    assert "foretoken train draft tiny-draft tiny-target --top 16" in text
    assert json.loads((out / "zoo.json").read_text()) == {"name": "tiny-draft", "role": "draft"}


def test_a_draft_learns_from_text_that_the_target_writes_meanwhile(target, corpus, tmp_path, monkeypatch):
    """As on a GPU, whose device this machine need not have."""
    monkeypatch.setattr(drafting, "_in_every_step", lambda device: True)
    monkeypatch.setattr(sampling, "BATCH", 2)
    out = tmp_path / "draft"
    config = replace(STEPS, compile=False)
    figures = train_draft(RunOptions(out), target, corpus, TINY, config, DistillConfig(generated_share=0.5))
    assert 0 < figures["overlap"] <= 1 and [f.name for f in tmp_path.iterdir()] == ["draft"]
    facts = json.loads((out / "provenance.json").read_text())
    stream = encode(corpus.train, load_tokenizer(target))
    assert facts["taught_tokens"] == 2 * (len(stream) // config.window) * config.window


def test_settings_and_texts_that_do_not_suffice_are_refused(target, corpus, tmp_path, monkeypatch):
    with pytest.raises(InvalidRequest, match="less than one window of 100000"):
        train_draft(RunOptions(tmp_path / "draft"), target, corpus, TINY, replace(STEPS, window=100_000))
    monkeypatch.setattr(drafting, "_in_every_step", lambda device: True)
    with pytest.raises(InvalidRequest, match="generated_share is 1; on a GPU"):
        train_draft(RunOptions(tmp_path / "draft"), target, corpus, TINY, STEPS, DistillConfig(generated_share=1.0))


def test_the_most_likely_tokens_are_the_targets_and_are_reused(target, corpus, tmp_path, monkeypatch):
    frozen = FrozenTarget(target, torch.device("cpu"))
    windows = fixed_windows(encode(corpus.train, load_tokenizer(target)), 16, 0)[:8]
    first = TopTokens(frozen, windows, tmp_path / "distributions", top=8, compile_model=False)
    with monkeypatch.context() as without:
        without.setattr(frozen, "logits", lambda ids: pytest.fail("computed twice"))
        again = TopTokens(frozen, windows, tmp_path / "distributions", top=8, compile_model=False)
    rows = np.arange(len(first.ids))
    (ids, kept), (ids_again, _) = first.at(rows), again.at(rows)
    assert torch.equal(ids, ids_again)
    exact = frozen.logits(windows).float().log_softmax(-1)
    assert (exact[: len(ids)].gather(-1, ids) - kept).abs().max() < 0.02
    batches = list(islice(shuffled(8, 4, seed=1), 4))
    assert np.array_equal(next(shuffled(8, 4, seed=1, start=3)), batches[3])


def test_the_loss_is_zero_for_the_target_itself_and_the_kl_when_all_is_kept() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(2, 3, 11), torch.randn(2, 3, 11)
    law = p.log_softmax(-1).topk(11, dim=-1)
    ids_and_logs = (law.indices, law.values)
    for acceptance in (0.0, 1.0):
        assert distillation_loss(p, ids_and_logs, torch.tensor(acceptance)).abs() < 1e-4
    kl = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1).mean()
    assert distillation_loss(q, ids_and_logs, torch.tensor(0.0)) == pytest.approx(kl.item(), abs=1e-4)
    overlap = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)
    expected = -overlap.log().mean().item()
    assert distillation_loss(q, ids_and_logs, torch.tensor(1.0)) == pytest.approx(expected, abs=1e-4)
    for acceptance in (0.0, 0.4, 1.0):
        whole = distillation_loss(q, p, torch.tensor(acceptance))
        assert whole == pytest.approx(distillation_loss(q, ids_and_logs, torch.tensor(acceptance)).item(), abs=1e-4)
    assert agreement(p, p) == {"overlap": pytest.approx(1.0), "argmax_agreement": 1.0}
    assert agreement(p, q)["overlap"] == pytest.approx(overlap.mean().item())


def test_a_target_that_is_none_is_refused(tmp_path: Path, corpus: Corpus) -> None:
    with pytest.raises(ModelLoadError, match="cannot load the target"):
        train_draft(RunOptions(tmp_path / "out"), tmp_path / "nothing", corpus, TINY, STEPS)
    with pytest.raises(InvalidRequest, match="provenance"):
        write_cards(tmp_path, None, corpus)
    assert not list(tmp_path.iterdir())


WORK = """
import sys
from pathlib import Path
import torch
from foretoken.train import processes
from foretoken.train.trainer import Trainer
from foretoken.train.config import TrainConfig
from tests.train.test_models import batches, make

with processes.joined(torch.device("cpu")):
    rank, world = processes.rank(), processes.world()
    trainer = make(Path(sys.argv[1]))
    trainer.run(batches(2, rank), lambda x: trainer.model(x).square().mean(), dict)
    torch.save(trainer.model.state_dict(), Path(sys.argv[1]) / f"{rank}-of-{world}.pt")
"""


def make(folder: Path) -> Trainer:
    torch.manual_seed(0)
    config = TrainConfig(steps=3, batch=2, window=4, learning_rate=1e-2, compile=False)
    return Trainer(torch.nn.Linear(4, 3), config, folder / "run.checkpoint")


def batches(each, rank):  # type: ignore[no-untyped-def]
    """Rows ``rank * each`` to ``(rank + 1) * each`` of the same batches of four."""
    for step in range(10):
        whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        yield whole[rank * each : (rank + 1) * each]


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.slow
def test_two_processes_take_the_steps_of_one_with_both_their_batches(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's, at a port that is free
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORK, str(tmp_path)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=600)[1].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], errors[0][-800:]
    assert "step 3" in errors[0]
    assert "step 3" not in errors[1]
    first, second = (torch.load(tmp_path / f"{rank}-of-2.pt") for rank in range(2))
    alone = make(tmp_path)
    alone.run(batches(4, 0), lambda x: alone.model(x).square().mean(), dict)
    for name, value in alone.model.state_dict().items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name], value, atol=1e-3)  # Muon rounds to bfloat16 inside


def test_alone_nothing_is_asked_of_anybody() -> None:
    with processes.joined(torch.device("cpu")) as device:
        assert (device.type, processes.rank(), processes.world()) == ("cpu", 0, 1)
        assert processes.largest(2.5, True) == (2.5, True)
        processes.wait()

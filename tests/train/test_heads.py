"""Heads, end to end at a tiny size: trained, resumed, stored in the form that proposers load."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foretoken import LLM, SamplingParams
from foretoken.core import progress as reporting
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError, TrainingError
from foretoken.models.base import Model
from foretoken.models.heads.eagle import read_eagle
from foretoken.models.heads.loading import load_block, load_eagle, load_mtp
from foretoken.models.heads.medusa import read_blockwise
from foretoken.models.loading import load_model
from foretoken.quantize.run import quantize_checkpoint
from foretoken.train import heads, losses
from foretoken.train.config import (
    BlockwiseTrainConfig,
    DFlashTrainConfig,
    DSparkTrainConfig,
    Eagle3Config,
    EarlyExitTrainConfig,
    HeadConfig,
    MedusaTrainConfig,
    MtpTrainConfig,
    PEagleConfig,
    RunOptions,
    TrainConfig,
)
from foretoken.train.data import Corpus
from foretoken.train.eagle import Eagle3Head, PEagleHead
from foretoken.train.frozen_target import FrozenTarget, TrainBatch
from foretoken.train.heads import MODULES, train_head
from foretoken.train.shapes import LlamaShape
from foretoken.train.target import train_target

from .tiny import STEPS

CONFIG = replace(STEPS, steps=3, batch=2, window=24)
DATA = HeadConfig(windows=8, held_out=2, generated_share=0.75)
SETTINGS = {
    "eagle3": Eagle3Config(intermediate=48, vocabulary=100, depths=3, single_share=0.0),
    "peagle": PEagleConfig(intermediate=48, vocabulary=100, layers=2, depths=3),
    "mtp": MtpTrainConfig(intermediate=48, depths=3, single_share=0.0),
    "medusa": MedusaTrainConfig(3, 2),
    "blockwise": BlockwiseTrainConfig(2, 16),
    "early-exit": EarlyExitTrainConfig(2),
    "dflash": DFlashTrainConfig(block=4, layers=2, taps=(2, 4), anchors=3),
    "jetspec": DFlashTrainConfig(block=4, layers=2, taps=(2, 4), anchors=3),
    "dspark": DSparkTrainConfig(block=3, layers=1, taps=(1, 3), anchors=3, markov_rank=8),
}


@pytest.fixture(scope="module")
def target(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("zoo") / "tiny-target"
    train_target(RunOptions(out), corpus, LlamaShape(32, 48, 4, 2, 1, 16, 64), replace(STEPS, steps=40))
    return out


def train(
    role: str, out: Path, target: Path, corpus: Corpus, config: TrainConfig = CONFIG, **more: Any
) -> dict[str, float]:
    options, data = RunOptions(out, "cpu", more.pop("resume", False)), more.pop("data", DATA)
    return train_head(role, options, target, corpus, SETTINGS[role], config, data, **more)


@pytest.mark.parametrize("role", list(SETTINGS))
@pytest.mark.slow
def test_every_head_is_trained_and_stored(role: str, target: Path, corpus: Corpus, tmp_path: Path) -> None:
    figures = train(role, tmp_path / role, target, corpus)
    assert [f.name for f in tmp_path.iterdir()] == [role]
    assert figures["length_greedy"] >= 1
    assert figures["length_drawn"] > 1
    facts = json.loads((tmp_path / role / "provenance.json").read_text())
    assert facts["command"].startswith(f"foretoken train {role} {role} --model tiny-target --")
    assert facts["length_greedy"] == figures["length_greedy"]
    tensors = load_file(tmp_path / role / "model.safetensors")
    assert {t.dtype for t in tensors.values()} <= {torch.bfloat16, torch.int64, torch.bool}
    assert facts["parameters"] == sum(t.numel() for t in tensors.values() if t.is_floating_point())


@pytest.mark.parametrize("role", ["dflash", "dspark", "mtp"])
def test_windows_that_are_too_short_are_refused_before_any_text_is_made(role, target, corpus, tmp_path):
    with pytest.raises(InvalidRequest, match="windows of 4 tokens are too short"):
        train(role, tmp_path / role, target, corpus, replace(CONFIG, window=4))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_formats_are_those_that_proposers_read(target: Path, corpus: Corpus, tmp_path: Path) -> None:
    for role in SETTINGS:
        train(role, tmp_path / role, target, corpus, dataset=tmp_path / "lessons")
    eagle = read_eagle(tmp_path / "eagle3")
    assert (eagle.version, eagle.taps, eagle.exact, eagle.draft_vocab) == (3, (2, 2, 1), True, 100)
    assert len(eagle.ids().unique()) == 100
    assert bool(eagle.tensors["t2d"][eagle.ids()].all())
    peagle = read_eagle(tmp_path / "peagle")
    assert (peagle.version, peagle.layers, peagle.taps, peagle.draft_vocab) == (3, 2, (2, 2, 1), 100)
    assert peagle.mask_token is not None
    assert read_blockwise(tmp_path / "blockwise").depth == 2
    medusa = load_file(tmp_path / "medusa" / "model.safetensors")
    assert set(medusa) == {f"blocks.{i}.layers.{j}.{k}" for i in range(3) for j in range(2) for k in ("weight", "bias")}
    assert {n: tuple(t.shape) for n, t in load_file(tmp_path / "early-exit" / "model.safetensors").items()} == {
        "norm.weight": (32,),
        "adapter.weight": (32, 32),
    }
    assert json.loads((tmp_path / "early-exit" / "config.json").read_text())["exit_layer"] == 2


def test_a_trained_mtp_layer_drafts_as_it_was_trained(target: Path, corpus: Corpus, tmp_path: Path) -> None:
    train("mtp", tmp_path / "mtp", target, corpus)
    loaded, states, expected = runtime_and_training(
        "mtp", SETTINGS["mtp"], tmp_path / "mtp", target, lambda model: load_mtp(model, None, tmp_path / "mtp", target)
    )
    assert loaded.states.after is None and loaded.taps == (4,)  # the file says what it reads
    for row in (0, 5, 13):
        compare_chain(loaded.net, states, row, [logits[0, row] for logits in expected])


def test_a_trained_p_eagle_head_drafts_as_it_was_trained(target: Path, corpus: Corpus, tmp_path: Path) -> None:
    train("peagle", tmp_path / "peagle", target, corpus)
    loaded, states, expected = runtime_and_training(
        "peagle",
        SETTINGS["peagle"],
        tmp_path / "peagle",
        target,
        lambda model: load_eagle(model, None, tmp_path / "peagle", target),
    )
    net, features = loaded.net, loaded.net.features(states)
    for row in (0, 4, 16):
        handle = net.open()
        net.extend(handle, IDS[1 : row + 2], features[: row + 1])
        net.mask = net.mask_row()
        (logits,) = net.look_ahead([handle], [Draft.chain([net.head.mask_token] * 2)])
        for depth in range(3):
            torch.testing.assert_close(logits[depth], expected[depth][0, row // 4], rtol=1e-3, atol=1e-3)


def test_a_trained_eagle_31_head_drafts_as_it_was_trained(target: Path, corpus: Corpus, tmp_path: Path) -> None:
    settings = replace(SETTINGS["eagle3"], normed=True)
    head = tmp_path / "head"
    train_head("eagle3", RunOptions(head, "cpu"), target, corpus, settings, CONFIG, DATA)
    loaded, states, expected = runtime_and_training(
        "eagle3", settings, head, target, lambda model: load_eagle(model, None, head, target)
    )
    assert loaded.net.head.fc_norm and loaded.net.head.norm_output
    for row in (0, 5, 12):
        compare_chain(loaded.net, loaded.net.features(states), row, [logits[0, row] for logits in expected])


@pytest.mark.parametrize("role", ["jetspec", "dspark"])
def test_a_trained_block_drafter_drafts_as_it_was_trained(role, target, corpus, tmp_path):
    settings = replace(SETTINGS["dspark"], gated=True) if role == "dspark" else SETTINGS[role]
    train_head(role, RunOptions(tmp_path / role, "cpu"), target, corpus, settings, CONFIG, DATA)
    arguments = json.loads((tmp_path / role / "provenance.json").read_text())["command"]
    assert ("--gated --" in arguments) == (role == "dspark")
    loaded, states, expected = runtime_and_training(
        role, settings, tmp_path / role, target, lambda model: load_block(role, model, tmp_path / role, target)
    )
    for row in (0, 4, 12):
        compare_chain(loaded.net, loaded.net.features(states), row, [logits[0, row // 4] for logits in expected])


IDS = list(range(3, 23))


@torch.no_grad()
def runtime_and_training(
    role: str, settings: Any, folder: Path, target: Path, load: Callable[[Model], Any]
) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    """Returns the drafter of the runtime, the states that it reads, and the logits of the training's forward pass."""
    model, frozen = load_model(target, "float32", "cpu"), FrozenTarget(target, torch.device("cpu"))
    loaded = load(model)
    layers = tuple(sorted({*loaded.taps, model.num_layers}))
    (scores,) = model.score([model.open(IDS)], [Draft.empty()], layers)
    stored = getattr(loaded.net, "head", None)
    if (mask := getattr(stored, "mask_token", None)) is not None:
        settings = replace(settings, mask_token=mask)
    counts = torch.ones(frozen.vocab)
    if role in ("eagle3", "peagle"):
        counts[stored.ids()] += 1
    head = MODULES[role](settings, frozen, counts)
    head.eval().start(load_file(folder / "model.safetensors"))
    batch = _batch(frozen, IDS, torch.stack([scores.taps[i] for i in layers], dim=1), layers)
    return loaded, torch.cat([scores.taps[i] for i in loaded.taps], dim=-1), head(batch).logits


def compare_chain(net: Any, features: torch.Tensor, row: int, expected: list[torch.Tensor]) -> None:
    """Compares the logits of a chain behind a row with ``expected``, [V] at each depth."""
    handle = net.open(IDS[: row + 2])
    net.extend(handle, IDS[1 : row + 2], features[: row + 1])
    logits = [*net.catch_up([handle])]
    for depth in range(1, len(expected)):
        logits += net.grow([handle], [Draft.chain(IDS[row + 2 : row + 2 + depth])])
    for depth, row_logits in enumerate(expected):
        torch.testing.assert_close(logits[depth][0], row_logits, rtol=1e-3, atol=1e-3)


def test_deeper_positions_train_fewer_rows_with_the_logits_of_evaluation(target: Path) -> None:
    frozen = FrozenTarget(target, torch.device("cpu"))
    head = PEagleHead(replace(SETTINGS["peagle"], mask_token=7), frozen, -torch.arange(frozen.vocab))
    batch = _batch(frozen, range(40), torch.randn(40, 3, 32), (1, 2, 4))
    head.begin(0.5, step=3, length=40)
    with torch.no_grad():
        trained, judged = head.train()(batch), head.eval()(batch)
    assert [len(roots) for roots in trained.roots] == [37, 26, 18]
    for depth in range(3):
        at = {int(root): i for i, root in enumerate(trained.roots[depth])}
        both = [(at[int(root)], i) for i, root in enumerate(judged.roots[depth]) if int(root) in at]
        assert len(both) > 2
        mine, theirs = (list(rows) for rows in zip(*both, strict=True))
        torch.testing.assert_close(trained.logits[depth][0, mine], judged.logits[depth][0, theirs])


def test_a_p_eagle_head_starts_from_an_eagle3_head(target: Path, corpus: Corpus, tmp_path: Path) -> None:
    train("eagle3", tmp_path / "eagle3", target, corpus)
    config = replace(CONFIG, steps=1, learning_rate=1e-9)
    train("peagle", tmp_path / "peagle", target, corpus, config, start=tmp_path / "eagle3")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("eagle3", "peagle"))
    assert all(torch.equal(first[name], second[name.replace("midlayer", "layers.0")]) for name in first)
    assert {name.split(".")[0] for name in second} - {name.split(".")[0] for name in first} == {"layers", "mask_hidden"}


class OneDevice(TorchDispatchMode):
    """Refuses operators on tensors of two devices, numbers aside. Copies between devices are no such operators."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        devices = {t.device for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.ndim}
        assert len(devices) < 2, f"{func.name()} reads tensors of {devices}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("role", list(SETTINGS))
@pytest.mark.slow
def test_no_operator_of_a_training_step_reads_tensors_of_two_devices(role: str, target: Path) -> None:
    frozen, meta = FrozenTarget(target, torch.device("cpu")), torch.device("meta")
    head = heads.MODULES[role](SETTINGS[role], frozen, torch.ones(frozen.vocab)).to(meta)
    layers = tuple(sorted({*head.taps, frozen.layers}))
    vocabulary = torch.empty(frozen.vocab, frozen.hidden, device=meta)
    states = torch.empty(2, 24, len(layers), frozen.hidden, device=meta)
    batch = TrainBatch(torch.empty(2, 24, dtype=torch.int64, device=meta), states, layers, vocabulary, vocabulary)
    head.begin(1.0, step=3, length=24)
    with OneDevice():
        losses.head_loss(head, batch, 0.8, torch.ones((), device=meta)).backward()
    assert all(p.grad is not None and p.grad.is_meta for p in head.parameters())


def _batch(frozen: FrozenTarget, ids: Sequence[int], states: torch.Tensor, layers: tuple[int, ...]) -> TrainBatch:
    """Returns one window. states: [T, len(layers), H]."""
    return TrainBatch(torch.tensor([list(ids)]), states[None], layers, frozen.embeddings.float(), frozen.head.float())


@pytest.mark.slow
def test_training_lowers_the_loss_and_a_resumed_run_ends_the_same(target, corpus, tmp_path, monkeypatch):
    values: list[torch.Tensor] = []
    loss = losses.head_loss

    def counted(*a: Any) -> torch.Tensor:
        if len(values) == 40:
            values.append(values[-1])
            raise KeyboardInterrupt
        values.append(loss(*a))
        return values[-1]

    monkeypatch.setattr(heads, "head_loss", counted)
    config, data = replace(CONFIG, steps=30), replace(DATA, acceptance_share=0.0)
    train("eagle3", tmp_path / "a", target, corpus, config, data=data, dataset=tmp_path / "lessons")
    assert torch.stack(values[-4:]).mean() < 0.9 * torch.stack(values[:4]).mean()

    with pytest.raises(KeyboardInterrupt):
        train("eagle3", tmp_path / "b", target, corpus, config, data=data, dataset=tmp_path / "lessons")
    assert (tmp_path / "b.checkpoint").exists()
    train("eagle3", tmp_path / "b", target, corpus, config, data=data, dataset=tmp_path / "lessons", resume=True)
    whole, resumed = (load_file(tmp_path / n / "model.safetensors") for n in "ab")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_one_depth_is_trained_first_and_all_are_evaluated(target: Path) -> None:
    frozen = FrozenTarget(target, torch.device("cpu"))
    config = replace(SETTINGS["eagle3"], single_share=0.5)
    head = Eagle3Head(config, frozen, torch.arange(frozen.vocab))
    ids = torch.arange(24)[None]
    batch = TrainBatch(ids, frozen.states(ids, (1, 2, 4)).float(), (1, 2, 4), frozen.embeddings.float(), frozen.head)
    depths = {}
    for progress in (0.49, 0.5):
        head.begin(progress, 0, CONFIG.window)
        depths[progress] = len(head.train()(batch).logits), len(head.eval()(batch).logits)
    assert depths == {0.49: (1, 3), 0.5: (3, 3)}
    assert [tuple(logits.shape) for logits in head(batch).logits] == [(1, 21, 100)] * 3


@pytest.mark.slow
def test_a_head_continues_from_an_earlier_one_with_another_vocabulary(target, corpus, tmp_path):
    train("eagle3", tmp_path / "first", target, corpus)
    settings, config = replace(SETTINGS["eagle3"], vocabulary=120), replace(CONFIG, steps=1, learning_rate=1e-9)
    start = tmp_path / "first"
    second_run = RunOptions(tmp_path / "second", "cpu")
    train_head("eagle3", second_run, target, corpus, settings, config, DATA, start=start)
    first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("first", "second"))
    assert torch.equal(first["fc.weight"], second["fc.weight"])
    ids = [list((t["d2t"] + torch.arange(len(t["d2t"]))).numpy()) for t in (first, second)]
    rows = [ids[1].index(token) for token in ids[0]]
    assert torch.equal(first["lm_head.weight"], second["lm_head.weight"][rows])
    facts = json.loads((tmp_path / "second" / "provenance.json").read_text())
    assert facts["started_from"]["steps"] == 3
    assert "--start first" in facts["command"]
    settings = replace(settings, vocabulary=10_000)  # all of them: no maps
    for name in ("third", "fourth"):
        train_head("eagle3", RunOptions(tmp_path / name, "cpu"), target, corpus, settings, config, DATA, start=start)
        assert "d2t" not in load_file(tmp_path / name / "model.safetensors")
        start = tmp_path / name
    with pytest.raises(InvalidRequest, match="same shape"):
        train("medusa", tmp_path / "m", target, corpus, start=tmp_path / "first")


def test_a_head_of_a_base_model_is_realigned_to_a_fine_tune(target: Path, corpus: Corpus, tmp_path: Path) -> None:
    """The quantized head drafts for the fine-tune, whose statistics show its acceptance; training takes its sizes."""
    train("eagle3", tmp_path / "first", target, corpus)
    config_file = tmp_path / "first" / "config.json"
    window = {"layer_types": ["sliding_attention"], "sliding_window": 16}
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | window))
    quantize_checkpoint(tmp_path / "first", tmp_path / "head", "int8", lm_head=True)
    fine_tune = tmp_path / "fine-tune"
    shutil.copytree(target, fine_tune)
    weights = {name: 1.05 * weight for name, weight in load_file(target / "model.safetensors").items()}
    save_file(weights, fine_tune / "model.safetensors", metadata={"format": "pt"})
    options, config = RunOptions(tmp_path / "again", "cpu"), replace(CONFIG, steps=1, learning_rate=1e-9)
    train_head("eagle3", options, fine_tune, corpus, None, config, DATA, start=tmp_path / "head")
    sizes = json.loads((tmp_path / "again" / "provenance.json").read_text())["settings"]
    assert (sizes["intermediate"], sizes["vocabulary"]) == (48, 100)
    assert window.items() <= json.loads((tmp_path / "again" / "config.json").read_text()).items()
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "again"))
    torch.testing.assert_close(first["fc.weight"], again["fc.weight"], rtol=0.02, atol=0.02)
    for head in ("head", "again"):
        llm = LLM(fine_tune, tmp_path / head, speculative_config={"num_speculative_tokens": 3}, dtype="float32")
        stats = llm.generate([[3, 4, 5]], SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))[0].stats
        assert stats.drafted and stats.accepted_per_position and 1.0 <= stats.mean_acceptance_length <= 4.0


@pytest.mark.slow
def test_an_unfrozen_target_learns_and_is_held(target: Path, corpus: Corpus, tmp_path: Path) -> None:
    before = {f.name: f.read_bytes() for f in target.iterdir()}
    figures = train("medusa", tmp_path / "m", target, corpus, hold=10.0)
    assert abs(figures["target_loss"] - figures["target_loss_before"]) < 0.1
    assert before == {f.name: f.read_bytes() for f in target.iterdir()}
    old, new = (load_file(f / "model.safetensors") for f in (target, tmp_path / "m" / "target"))
    assert set(old) == set(new)
    assert any(not torch.equal(old[name], new[name]) for name in old)
    train("medusa", tmp_path / "again", tmp_path / "m" / "target", corpus)  # a target like any other


def test_patience_ends_a_run_with_its_best_weights(target, corpus, tmp_path, monkeypatch):
    lengths = iter((1.5, 1.9, 1.4, 1.3, 9.0))
    monkeypatch.setattr(heads, "evaluated", lambda *a: {"length_greedy": next(lengths), "length_drawn": 0.0})
    config = replace(CONFIG, steps=100, patience=2, evaluate_every_seconds=0.0)
    figures = train("blockwise", tmp_path / "b", target, corpus, config)
    assert (figures["step"], figures["length_greedy"]) == (2, 1.9)


def test_progress_shows_tokens_speed_time_left_and_held_out_tokens_per_pass(
    target: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reporting, "PLAIN_SECONDS", 0.0)
    data, config = replace(DATA, windows=200), replace(CONFIG, window=64, evaluate_every_seconds=0.0)
    train("blockwise", tmp_path / "b", target, corpus, config, data=data)
    shown = capsys.readouterr().err
    assert re.search(r"the target wrote [\d,]+ tokens in \d+ s \([\d,]+ tok/s\)", shown)
    assert re.search(r"training  67%  [\d.]+ min, [\d.]+ left  step 2  loss .* tok/s  held out \d\.\d+ tokens", shown)


def test_settings_that_do_not_fit_the_target_are_refused(target: Path, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot load"):
        train("medusa", tmp_path / "m", tmp_path / "nothing", corpus)
    with pytest.raises(InvalidRequest, match="taps"):
        train_head("eagle3", RunOptions(tmp_path / "e"), target, corpus, Eagle3Config(taps=(1, 2, 9)), CONFIG, DATA)
    with pytest.raises(InvalidRequest, match="exit_layer 4"):
        train_head("early-exit", RunOptions(tmp_path / "e"), target, corpus, EarlyExitTrainConfig(4), CONFIG, DATA)
    with pytest.raises(InvalidRequest, match="lower --window"):
        train("medusa", tmp_path / "m", target, corpus, replace(CONFIG, window=65))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_text_of_another_seed_is_refused(target: Path, corpus: Corpus, tmp_path: Path) -> None:
    train("medusa", tmp_path / "m", target, corpus, dataset=tmp_path / "lessons")
    with pytest.raises(InvalidRequest, match="choose another folder"):
        train("medusa", tmp_path / "n", target, corpus, replace(CONFIG, seed=1), dataset=tmp_path / "lessons")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["lessons", "m"]


@pytest.mark.slow
def test_a_full_disk_ends_training_and_leaves_nothing(target, corpus, tmp_path, monkeypatch):
    def full(*a: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(TrainingError, match="No space left"):
        train("medusa", tmp_path / "n", target, corpus)
    assert not list(tmp_path.iterdir())

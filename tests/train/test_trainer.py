"""The training loop, its runs and its data."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretoken.core.artifacts import MODEL
from foretoken.core.errors import InvalidRequest, TrainingError
from foretoken.train.config import AcceptanceConfig, DistillConfig, HeadConfig, RunOptions, TrainConfig
from foretoken.train.data import from_files, held_out_batches, standard_library, train_tokenizer, windows
from foretoken.train.runs import TrainingRun
from foretoken.train.trainer import Score, Trainer

from .tiny import STEPS


def batches(start: int = 0) -> Iterator[torch.Tensor]:
    while True:
        yield torch.randn(2, 8, generator=torch.Generator().manual_seed(start))
        start += 1


def trainer(folder: Path, config: TrainConfig = STEPS, score: Score | None = None) -> Trainer:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    return Trainer(model, config, folder / "run.checkpoint", score)


def run(
    t: Trainer,
    stop_at: int | None = None,
    by_signal: bool = False,
    evaluate: Callable[[], dict[str, float]] = lambda: {"held_out_loss": 1.0},
) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        if t.step == stop_at:
            if not by_signal:
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)
        return (t.model(x) - x).square().mean()

    t.run(batches(t.step), loss, evaluate)


def weights(t: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in t.model.parameters()])


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    whole = trainer(tmp_path / "a")
    run(whole)
    with pytest.raises(KeyboardInterrupt):
        run(trainer(tmp_path), stop_at=3)
    second = trainer(tmp_path)
    assert second.resume()
    assert second.step == 3
    run(second)
    assert torch.equal(weights(whole), weights(second))
    assert [row["step"] for row in second.history] == [6]


def test_ctrl_c_finishes_the_step_and_keeps_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(trainer(tmp_path), stop_at=2, by_signal=True)
    resumed = trainer(tmp_path)
    assert resumed.resume()
    assert resumed.step == 3
    assert "--resume" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [f.name for f in tmp_path.iterdir()] == ["run.checkpoint"]


def test_ctrl_c_keeps_the_best_weights_for_a_run_that_ends_early(tmp_path: Path) -> None:
    config, seen = replace(STEPS, evaluate_every_seconds=0.0), dict[int, torch.Tensor]()

    def evaluated(t: Trainer) -> dict[str, float]:
        seen[t.step] = weights(t)
        return {"score": 5.0 if t.step == 2 else 1.0}

    interrupted = trainer(tmp_path, config, lambda row: row["score"])
    with pytest.raises(KeyboardInterrupt):
        run(interrupted, 3, by_signal=True, evaluate=lambda: evaluated(interrupted))
    ended = trainer(tmp_path, replace(config, steps=4), lambda row: row["score"])
    assert ended.resume()
    run(ended, evaluate=lambda: evaluated(ended))
    assert ended.history[-1] | {"minutes": 0.0} == {"step": 2, "minutes": 0.0, "score": 5.0}
    assert torch.equal(weights(ended), seen[2])
    assert not torch.equal(seen[2], seen[4])


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t = trainer(tmp_path)
    t.save_checkpoint()
    before = t.checkpoint.read_bytes()

    def full(state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(TrainingError, match="No space left"):
        t.save_checkpoint()
    assert t.checkpoint.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_or_foreign_checkpoint_is_named(tmp_path: Path) -> None:
    t = trainer(tmp_path)
    t.checkpoint.write_bytes(b"not a checkpoint")
    with pytest.raises(TrainingError, match="damaged or was written with other settings"):
        t.resume()
    other = Trainer(torch.nn.Linear(3, 3), STEPS, t.checkpoint)
    other.save_checkpoint()
    with pytest.raises(TrainingError, match="other settings"):
        t.resume()


def test_a_diverged_run_says_so(tmp_path: Path) -> None:
    t = trainer(tmp_path)
    with pytest.raises(TrainingError, match="lower --learning-rate"):
        t.run(batches(), lambda x: t.model(x).sum() * float("nan"), dict)


@pytest.mark.parametrize(
    ("settings", "wrong", "says"),
    [
        (STEPS, {"steps": 0}, "steps must be an integer of at least 1"),
        (STEPS, {"batch": 0}, "batch must be an integer of at least 1"),
        (STEPS, {"window": 1}, "window must be an integer of at least 2"),
        (STEPS, {"learning_rate": float("nan")}, "learning_rate must be a number"),
        (STEPS, {"minutes": -1.0}, "minutes must be a number"),
        (STEPS, {"dropout": 1.0}, "dropout must be a number from 0 to"),
        (HeadConfig(), {"windows": 0}, "windows must be an integer of at least 1"),
        (HeadConfig(), {"discount": 0.0}, "discount must be a number from"),
        (HeadConfig(), {"disk_gigabytes": -1.0}, "disk_gigabytes must be a number of at least 0"),
        (HeadConfig(), {"generated_share": 1.5}, "generated_share must be a number from 0 to 1"),
        (AcceptanceConfig(), {"generated_share": 1.5}, "generated_share must be a number from 0 to 1"),
        (AcceptanceConfig(), {"intermediate": 0}, "intermediate must be an integer of at least 1"),
        (DistillConfig(), {"generated_share": 1.5}, "generated_share must be a number from 0 to 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: Any, wrong: dict[str, float], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        replace(settings, **wrong)


def test_the_rate_warms_up_holds_and_falls_to_zero(tmp_path: Path) -> None:
    t = trainer(tmp_path)
    assert t.rate_factor(0.0) < 0.1
    assert t.rate_factor(0.3) == 1.0
    assert t.rate_factor(0.7) == pytest.approx(0.5)
    assert t.rate_factor(1.0) == 0.0


def test_an_interrupted_run_is_not_started_over_by_accident(tmp_path: Path) -> None:
    checkpoint = tmp_path / "out.checkpoint"
    checkpoint.write_text("x")
    with pytest.raises(InvalidRequest, match="--resume"):
        TrainingRun(RunOptions(tmp_path / "out", resume=False, force=False), MODEL)
    TrainingRun(RunOptions(tmp_path / "out", resume=True, force=False), MODEL)
    assert checkpoint.exists()
    TrainingRun(RunOptions(tmp_path / "out", resume=False, force=True), MODEL)
    assert not checkpoint.exists()


@pytest.mark.parametrize("ending", ["lessons", "distributions", "checkpoint"])
@pytest.mark.parametrize("resume", [False, True])
def test_folders_beside_the_output_that_no_run_wrote_are_kept(tmp_path: Path, ending: str, resume: bool) -> None:
    """They would be deleted before the run or after it."""
    beside = tmp_path / f"out.{ending}"
    beside.mkdir()
    (beside / "notes.txt").write_text("x")
    with pytest.raises(InvalidRequest, match=f"out.{ending} holds files"):
        TrainingRun(RunOptions(tmp_path / "out", resume=resume, force=True), MODEL)
    assert (beside / "notes.txt").read_text() == "x"


def test_an_input_is_not_deleted_as_a_folder_beside_the_output(tmp_path: Path) -> None:
    lessons = tmp_path / "out.lessons"
    lessons.mkdir()
    (lessons / "windows.pt").write_text("x")
    with pytest.raises(InvalidRequest, match="uses"):
        TrainingRun(RunOptions(tmp_path / "out", force=True), MODEL, [lessons / "windows.pt"])
    TrainingRun(RunOptions(tmp_path / "out", force=True), MODEL)


@pytest.mark.slow
def test_standard_library_is_split_the_same_way_each_time_and_leaves_tests_out() -> None:
    first, second = standard_library(), standard_library()
    assert first == second
    assert len(first.train) > 300
    assert 0 < len(first.held_out) < len(first.train) // 20
    assert not set(first.train) & set(first.held_out)


def test_one_more_file_moves_no_other_between_train_and_held_out(tmp_path: Path) -> None:
    for i in range(120):
        (tmp_path / f"f{i}.py").write_text(f"x = {i}\n")
    before = from_files([tmp_path])
    (tmp_path / "another.py").write_text("y = 1\n")
    after = from_files([tmp_path])
    moved = set(before.held_out) ^ (set(after.held_out) - {"y = 1\n"})
    assert len(moved) <= 1  # only the border of the ranking


def test_too_few_or_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such file"):
        from_files([tmp_path / "nothing"])
    (tmp_path / "one.py").write_text("x = 1")
    with pytest.raises(InvalidRequest, match="at least two"):
        from_files([tmp_path])


def test_prompts_are_read_a_line_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n{"prompt": "two"}\n\n{"text": "three"}\n')
    corpus = from_files([file])
    assert sorted((*corpus.train, *corpus.held_out)) == ["one", "three", "two"]
    for wrong in ("not json", "3", '{"question": "?"}'):
        file.write_text(f'"fine"\n{wrong}\n')
        with pytest.raises(InvalidRequest, match="text 2"):
            from_files([file])


@given(text=st.text(max_size=200))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_text_round_trips_through_the_tokenizer(tokenizer: Any, text: str) -> None:
    text = text.replace("<|endoftext|>", "")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


def test_the_tokenizer_is_the_same_for_the_same_corpus(corpus: Any) -> None:
    assert train_tokenizer(corpus, 300).get_vocab() == train_tokenizer(corpus, 300).get_vocab()


def test_windows_depend_on_seed_and_index_alone() -> None:
    stream = torch.arange(1000)
    through = windows(stream, 3, 16, seed=5)
    batches = [next(through) for _ in range(50)]
    for start in (0, 7, 49):
        assert torch.equal(next(windows(stream, 3, 16, seed=5, start=start)), batches[start])
    assert not torch.equal(next(windows(stream, 3, 16, seed=6)), batches[0])


def test_an_epoch_shows_no_window_twice() -> None:
    per_epoch = (1000 - 16) // 16 // 3
    source = windows(torch.arange(1000), 3, 16, seed=0)
    seen = torch.cat([next(source)[:, 0] for _ in range(per_epoch)])
    assert len(seen.unique()) == len(seen) == per_epoch * 3


def test_short_texts_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least"):
        next(windows(torch.arange(20), 3, 16, seed=0))
    with pytest.raises(InvalidRequest, match="held-out"):
        held_out_batches(torch.arange(3), 2, 16)

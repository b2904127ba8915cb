"""``foretoken train eagle3|peagle|mtp|dflash|...``: trains a head on text that the target sampled."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.core.artifacts import TRAINING_TEXT, Destination, heads_of
from foretoken.core.errors import InvalidRequest
from foretoken.core.schema import read_object
from foretoken.models.loading import resolve_device
from foretoken.quantize.cached import checkpoint_folder
from foretoken.train import processes
from foretoken.train.acceptance import chain_acceptance, figures, head_loss
from foretoken.train.block_heads import DFlashHead, DFlashTrainConfig, DSparkHead, DSparkTrainConfig
from foretoken.train.cotrain import TARGET_RATE, CoTrained, text_loss
from foretoken.train.data import Corpus
from foretoken.train.distillation import acceptance_weight
from foretoken.train.eagle3 import Eagle3Config, Eagle3Head
from foretoken.train.files import PROVENANCE, check_run, checkpoint_of, lessons_of, write_json
from foretoken.train.generated import Prompts, prepare_windows
from foretoken.train.head_config import HEAD, HeadConfig, changed_options
from foretoken.train.lessons import Head, Lessons, Teacher
from foretoken.train.mtp import MtpHead, MtpTrainConfig
from foretoken.train.optimization import TrainConfig
from foretoken.train.parallel_heads import (
    BlockwiseHead,
    BlockwiseTrainConfig,
    EarlyExitHead,
    EarlyExitTrainConfig,
    MedusaHead,
    MedusaTrainConfig,
)
from foretoken.train.peagle import PEagleConfig, PEagleHead
from foretoken.train.provenance import command_line, provenance, write_trained
from foretoken.train.trainer import Trainer

HEAD_CONFIG = TrainConfig(minutes=20.0, batch=4, window=512, learning_rate=2e-3, weight_decay=0.05)

Batch = tuple[Tensor, Tensor, Tensor]
"""Token ids, hidden states, and the weight of the acceptance loss."""


@dataclass(frozen=True)
class Role:
    """A kind of head.

    Args:
        settings: Class of its settings.
        make: Makes a head from settings, the target, and the counts [V] of tokens in its text.
        learning_rate: Its learning rate.
    """

    settings: Any
    make: Callable[[Any, Teacher, Tensor], Head]
    learning_rate: float = 2e-3


ROLES = {
    "eagle3": Role(Eagle3Config, Eagle3Head.made),
    "peagle": Role(PEagleConfig, PEagleHead.made),
    "mtp": Role(MtpTrainConfig, MtpHead.made),
    "medusa": Role(MedusaTrainConfig, MedusaHead.made, 6e-3),
    "blockwise": Role(BlockwiseTrainConfig, BlockwiseHead.made, 6e-3),
    "early-exit": Role(EarlyExitTrainConfig, EarlyExitHead.made),
    "dflash": Role(DFlashTrainConfig, DFlashHead.made),
    "dspark": Role(DSparkTrainConfig, DSparkHead.made),
}


def head_config(role: str) -> TrainConfig:
    """Returns the default configuration for a kind of head."""
    return replace(HEAD_CONFIG, learning_rate=ROLES[role].learning_rate)


def train_head(
    role: str,
    out: Path,
    target: Path,
    corpus: Corpus,
    settings: Any = None,
    config: TrainConfig | None = None,
    data: HeadConfig = HEAD,
    resume: bool = False,
    device: str = "auto",
    lessons: Path | None = None,
    hold: float | None = None,
    start: Path | None = None,
    force: bool = False,
) -> dict[str, float]:
    """Trains a head and writes it to ``out``.

    Args:
        role: A key of ``ROLES``.
        out: Folder of the head.
        target: Folder or GGUF file of the target.
        corpus: Text. It must be split as it was for the target, or the held-out figures are too good.
        settings: Settings of the head, by default those of its role.
        config: Training configuration. Its ``minutes`` include sampling text and computing hidden states.
        data: Settings of data and loss.
        resume: Continues an interrupted run.
        device: "auto", "cpu" or "cuda".
        lessons: Folder of text and hidden states, which are reused or created there and kept. None removes them after
            the run.
        hold: Trains the target too, with this weight of the penalty on changes of its distribution, and writes it to
            ``out/target``. None leaves the target as it is.
        start: Folder of an earlier head of the same shape, to continue from.
        force: Replaces an earlier head at ``out``, and starts an interrupted run again.

    Returns:
        The last evaluation.

    Raises:
        ModelLoadError: The target cannot be loaded.
        InvalidRequest: The settings are not valid.
        TrainingError: Files cannot be written, or the loss diverges.
    """
    settings = settings or ROLES[role].settings()
    config = config or head_config(role)
    started = time.monotonic()
    inputs = (target, start, *corpus.paths)
    run = check_run(out, heads_of("eagle3" if role == "peagle" else role), (*inputs, lessons), resume, force)
    if lessons is not None:
        Destination.checked(lessons, TRAINING_TEXT, inputs, force=True)
    source, target = target, checkpoint_folder(target)
    with processes.joined(resolve_device(device)) as where, _lessons_folder(run.path, lessons, resume) as folder:
        teacher = Teacher(target, where, config.compile)
        _check_window(ROLES[role].make(settings, teacher, torch.ones(teacher.vocab)), config)  # before any work
        text = prepare_windows(target, where, corpus, folder, config, data, source)
        torch.manual_seed(config.seed)
        head = ROLES[role].make(settings, teacher, torch.bincount(text["train"].flatten(), minlength=teacher.vocab))
        earlier = _start(head, start)
        head.to(where)
        data_by_name = _lessons(teacher, head, text, folder, data)
        together = None if hold is None else CoTrained(head, teacher, hold).to(where)
        trainer = Trainer(together or head, config, checkpoint_of(run.path), _length, _rate)
        if resume:
            trainer.resume()
        trainer.shorten(time.monotonic() - started)
        loss = _loss(head, data_by_name["train"], data, together)
        evaluate = _evaluation(head, data_by_name, together, text["text"])
        trainer.run(_batches(head, data_by_name["train"], trainer, data), loss, evaluate)
        if processes.rank() == 0:
            what = f"{role} {run.path.name} --model {target.name} {changed_options(settings)} {data.arguments()}"
            what += f" --start {start.name}" if start is not None else ""
            what += f" --unfreeze --hold {hold:g}" if hold is not None else ""
            card = provenance(
                command_line(what, config, corpus.name, "--data"),
                config,
                trainer,
                role=role,
                corpus=corpus.name,
                target=target.name,
                settings=asdict(settings),
                data=asdict(data),
                **earlier,
                **trainer.history[-1],
                preparing_minutes=round((time.monotonic() - started - trainer.elapsed) / 60, 1),
                parameters=sum(t.numel() for t in head.tensors(teacher).values() if t.is_floating_point()),
            )
            write_trained(run, trainer, card, partial(_save, head, teacher, together))
        return trainer.history[-1]


@contextmanager
def _lessons_folder(out: Path, named: Path | None, resume: bool) -> Iterator[Path]:
    """Yields the folder of text and hidden states.

    One that the user did not name is emptied before a new run and removed after it, unless the run is interrupted.
    """
    folder = named or lessons_of(out)
    own = named is None and processes.rank() == 0
    if own and not resume:
        shutil.rmtree(folder, ignore_errors=True)
    processes.wait()
    yield folder
    if own:
        shutil.rmtree(folder, ignore_errors=True)


def _check_window(head: Head, config: TrainConfig) -> None:
    """Raises InvalidRequest where windows are too short for what the head predicts."""
    if head.depths + 2 > config.window:
        raise InvalidRequest(
            f"windows of {config.window} tokens are too short for a head that predicts {head.depths}; expected at "
            f"least {head.depths + 2}"
        )


def _lessons(
    teacher: Teacher, head: Head, text: dict[str, Tensor], folder: Path, data: HeadConfig
) -> dict[str, Lessons]:
    shares = {"greedy": 0.05, "drawn": 0.05, "train": 0.9}
    gigabytes = data.disk_gigabytes
    if gigabytes is None:
        gigabytes = 12.0 if teacher.device.type == "cpu" else 0.0
    budget = gigabytes * 1e9
    return {name: Lessons(teacher, text[name], head.taps, folder, s * budget, name) for name, s in shares.items()}


def _start(head: Head, start: Path | None) -> dict[str, Any]:
    """Loads an earlier head. Returns its provenance as an entry of the new one's."""
    if start is None:
        return {}
    try:
        head.start(load_file(start / "model.safetensors"))
        return {"started_from": read_object(start / PROVENANCE)}
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise InvalidRequest(
            f"cannot start from {start}: {reason}; pass a folder of 'foretoken train' with a head of the same shape"
        ) from error


def _rate(name: str) -> float:
    """Returns the factor of a parameter's learning rate, which is small for a target that is trained too."""
    return TARGET_RATE if name.startswith("target.") else 1.0


def _length(row: dict[str, float]) -> float:
    return row["length_greedy"] + row["length_drawn"]


def _loss(head: Head, lessons: Lessons, data: HeadConfig, together: CoTrained | None) -> Callable[[Batch], Tensor]:
    def loss_fn(batch: Batch) -> Tensor:
        ids, states, acceptance = batch
        lesson = lessons.of(ids, states)
        with torch.autocast(ids.device.type, torch.bfloat16):
            if together is not None:
                return together.loss(lesson, data.discount, acceptance)
            return head_loss(head, lesson, data.discount, acceptance)

    return loss_fn


def _evaluation(
    head: Head, lessons: dict[str, Lessons], together: CoTrained | None, text: Tensor
) -> Callable[[], dict[str, float]]:
    greedy, drawn = lessons["greedy"], lessons["drawn"]
    if together is None:
        return lambda: evaluated(head, greedy, drawn)
    before = text_loss(greedy.teacher, text)
    live = [each.with_teacher(together.live(each.teacher)) for each in (greedy, drawn)]

    def evaluate() -> dict[str, float]:
        now = text_loss(live[1].teacher, text)
        return evaluated(head, *live) | {"target_loss_before": before, "target_loss": now}

    return evaluate


def evaluated(head: Head, greedy: Lessons, drawn: Lessons) -> dict[str, float]:
    """Returns ``acceptance.figures`` on text that the target sampled at temperatures 0 and 1, prompts left out."""
    skip = min(Prompts().longest, greedy.windows.shape[1] // 2)
    return figures(chain_acceptance(head, greedy, True, skip), chain_acceptance(head, drawn, False, skip))


def _batches(head: Head, lessons: Lessons, trainer: Trainer, data: HeadConfig) -> Iterator[Batch]:
    """Yields lessons with the weight of the acceptance loss."""
    config = trainer.config
    for lesson in lessons.batches(config.batch, config.seed, trainer.step):
        progress = trainer.progress()
        head.begin(progress, trainer.step, lessons.windows.shape[1])
        yield lesson.ids, lesson.states, acceptance_weight(progress, data.acceptance_share).to(lesson.ids.device)


def _save(head: Head, teacher: Teacher, together: CoTrained | None, folder: Path) -> None:
    save_file(head.tensors(teacher), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", head.describe(teacher))
    if together is not None:
        together.save(teacher.path, folder / "target")

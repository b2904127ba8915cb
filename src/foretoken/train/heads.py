"""``foretoken train eagle3|medusa|blockwise|early-exit``: a head for a target, from text that the target wrote."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.core.checks import integer, number
from foretoken.core.errors import InvalidRequest
from foretoken.core.schema import read_object
from foretoken.models.loading import resolve_device
from foretoken.train import processes
from foretoken.train.acceptance import chain_acceptance, figures, head_loss, known
from foretoken.train.cotrain import TARGET_RATE, CoTrained, text_loss
from foretoken.train.data import Corpus
from foretoken.train.eagle3 import Eagle3Config, Eagle3Head
from foretoken.train.files import PROVENANCE, atomic_directory, checkpoint_of, write_json
from foretoken.train.generated import Prompts, prepared
from foretoken.train.lessons import Head, Lessons, Teacher
from foretoken.train.parallel_heads import (
    BlockwiseHead,
    BlockwiseTrainConfig,
    EarlyExitHead,
    EarlyExitTrainConfig,
    MedusaHead,
    MedusaTrainConfig,
)
from foretoken.train.trainer import TrainConfig, Trainer, provenance

HEAD_CONFIG = TrainConfig(minutes=20.0, batch=4, window=512, learning_rate=2e-3, weight_decay=0.05)

Batch = tuple[Tensor, Tensor, Tensor]  # ids, hidden states, weight of the acceptance loss


@dataclass(frozen=True)
class Role:
    """A kind of head: its settings, how it is made of them, the target and the counts [V] of its text, and its rate."""

    settings: Any
    make: Callable[[Any, Teacher, Tensor], Head]
    learning_rate: float = 2e-3


ROLES = {
    "eagle3": Role(Eagle3Config, Eagle3Head.made),
    "medusa": Role(MedusaTrainConfig, MedusaHead.made, 6e-3),
    "blockwise": Role(BlockwiseTrainConfig, BlockwiseHead.made, 6e-3),
    "early-exit": Role(EarlyExitTrainConfig, EarlyExitHead.made),
}


@dataclass(frozen=True)
class HeadConfig:
    """The lessons, and what is asked of the head."""

    windows: int = 6400  # at most
    generated_share: float = 0.2  # of the windows: written by the target, the others cut from the corpus
    writing_share: float = 0.2  # of ``minutes``: the longest that the target may write
    disk_gigabytes: float = 12.0  # for hidden states; what does not fit is computed anew each time
    held_out: int = 32  # windows that the target writes on from held-out files, at each of two temperatures
    acceptance_share: float = 0.3  # the last share of the run, which turns from cross-entropy to the acceptance loss
    discount: float = 0.8  # of the loss, per depth

    def __post_init__(self) -> None:
        integer("windows", self.windows, 1)
        integer("held_out", self.held_out, 1)
        for name in ("generated_share", "writing_share", "acceptance_share"):
            number(name, getattr(self, name), 0, 1)
        number("discount", self.discount, 1e-6, 1)
        number("disk_gigabytes", self.disk_gigabytes, 0)

    def arguments(self) -> str:
        """The command line options that give these settings."""
        usual = asdict(HEAD)
        changed = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in changed.items())


HEAD = HeadConfig()


def head_config(role: str) -> TrainConfig:
    """What suits heads of that kind: those that correct the target's own guess have a long way to go from it."""
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
) -> dict[str, float]:
    """Train a head of the kind ``role`` for the checkpoint ``target`` and write it; returns the last evaluation.

    ``config.minutes`` covers the target's writing, its hidden states and the training. ``lessons``: a folder whose
    text and hidden states are used, made where it has none, and kept for the next head; else they go with the run.
    ``hold`` trains the target too, with that penalty on any change of its law, and writes it to ``out/target``.
    ``start`` is the folder of an earlier head of the same shape, to go on from.
    The corpus must be split as it was for the target, or the held-out figures mean too much. Raises ModelLoadError,
    InvalidRequest, TrainingError.
    """
    settings = settings or ROLES[role].settings()
    config = config or head_config(role)
    folder = lessons or out.with_name(out.name + ".lessons")
    with processes.joined(resolve_device(device)) as where:
        started = time.monotonic()
        if lessons is None and not resume and processes.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        processes.wait()
        teacher = Teacher(target, where, config.compile)
        ROLES[role].make(settings, teacher, torch.ones(teacher.vocab))  # wrong settings are refused before any work
        text = prepared(target, where, corpus, folder, config, data)
        torch.manual_seed(config.seed)
        head = ROLES[role].make(settings, teacher, torch.bincount(text["train"].flatten(), minlength=teacher.vocab))
        earlier = _start(head, start)
        head.to(where)
        taught = _taught(teacher, head, text, folder, data)
        together = None if hold is None else CoTrained(head, teacher, hold).to(where)
        trainer = Trainer(together or head, config, checkpoint_of(out), _length, _rate)
        if resume:
            trainer.resume()
        _shorten(trainer, time.monotonic() - started)
        loss, evaluate = _loss(head, taught["train"], data, together), _evaluation(head, taught, together, text["text"])
        trainer.run(_batches(head, taught["train"], trainer, data), loss, evaluate)
        if processes.rank() == 0:
            what = f"{role} {out.name} --model {target.name} {options(settings)} {data.arguments()}"
            preparing = (time.monotonic() - started - trainer.elapsed) / 60
            card = provenance(
                _command(what, config, corpus, start, hold), config, trainer, role=role, corpus=corpus.name,
                target=target.name, settings=asdict(settings), data=asdict(data), **earlier, **trainer.history[-1],
                preparing_minutes=round(preparing, 1),
            )  # fmt: skip
            _save(out, head, teacher, card, together)
            trainer.checkpoint.unlink(missing_ok=True)
            if lessons is None:
                shutil.rmtree(folder, ignore_errors=True)
        return trainer.history[-1]


def _shorten(trainer: Trainer, seconds: float) -> None:
    """Take what was spent before training off its minutes, in all processes alike."""
    minutes = trainer.config.minutes
    if minutes is not None:
        spent = processes.largest(seconds, False)[0] / 60
        trainer.config = replace(trainer.config, minutes=max(minutes - spent, minutes / 10))


def _taught(
    teacher: Teacher, head: Head, text: dict[str, Tensor], folder: Path, data: HeadConfig
) -> dict[str, Lessons]:
    shares = {"greedy": 0.05, "drawn": 0.05, "train": 0.9}
    budget = data.disk_gigabytes * 1e9
    return {name: Lessons(teacher, text[name], head.taps, folder, s * budget, name) for name, s in shares.items()}


def _start(head: Head, start: Path | None) -> dict[str, Any]:
    """Go on from an earlier head. -> what its provenance is kept under"""
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
    """Of the learning rate, by the name of a parameter: a target that is trained along moves slowly."""
    return TARGET_RATE if name.startswith("target.") else 1.0


def options(settings: Any) -> str:
    """The command line options for what differs from the usual settings."""
    usual = asdict(type(settings)())
    changed = {name: value for name, value in asdict(settings).items() if value != usual[name]}
    return " ".join(f"--{n.replace('_', '-')} {_argument(value)}" for n, value in changed.items())


def _argument(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


def _command(what: str, config: TrainConfig, corpus: Corpus, start: Path | None, hold: float | None) -> str:
    what += f" --start {start.name}" if start is not None else ""
    what += f" --unfreeze --hold {hold:g}" if hold is not None else ""
    texts = "" if "standard library" in corpus.name else "--data FILES"
    return " ".join(f"foretoken train {what} {config.arguments()} {texts}".split())


def _length(row: dict[str, float]) -> float:
    return row["length_greedy"] + row["length_drawn"]


def _loss(head: Head, lessons: Lessons, data: HeadConfig, together: CoTrained | None) -> Callable[[Batch], Tensor]:
    def loss_fn(batch: Batch) -> Tensor:
        ids, states, acceptance = batch
        lesson = lessons.of(ids, states)
        with torch.autocast(ids.device.type, torch.bfloat16):
            if together is not None:
                return together.loss(lesson, data.discount, acceptance)
            logits, law = head(lesson), known(lesson.law(), head)
        return head_loss(logits, law, data.discount, acceptance)

    return loss_fn


def _evaluation(
    head: Head, taught: dict[str, Lessons], together: CoTrained | None, text: Tensor
) -> Callable[[], dict[str, float]]:
    greedy, drawn = taught["greedy"], taught["drawn"]
    if together is None:
        return lambda: evaluated(head, greedy, drawn)
    before = text_loss(greedy.teacher, text)
    live = [lessons.told_by(together.live(lessons.teacher)) for lessons in (greedy, drawn)]

    def evaluate() -> dict[str, float]:
        now = text_loss(live[1].teacher, text)
        return evaluated(head, *live) | {"target_loss_before": before, "target_loss": now}

    return evaluate


def evaluated(head: Head, greedy: Lessons, drawn: Lessons) -> dict[str, float]:
    """`acceptance.figures` of the head on text that the target wrote at temperatures 0 and 1, prompts left out."""
    skip = min(Prompts().longest, greedy.windows.shape[1] // 2)
    return figures(chain_acceptance(head, greedy, True, skip), chain_acceptance(head, drawn, False, skip))


def _batches(head: Head, lessons: Lessons, trainer: Trainer, data: HeadConfig) -> Iterator[Batch]:
    """The lessons with the acceptance loss's weight: 0, then rising over a third of the last share, then 1."""
    share, config = data.acceptance_share, trainer.config
    for lesson in lessons.batches(config.batch, config.seed, trainer.step):
        head.begin(trainer.progress())
        into = 0.0 if share <= 0 else (trainer.progress() - (1 - share)) / (share / 3)
        yield lesson.ids, lesson.states, torch.tensor(min(1.0, max(0.0, into)), device=lesson.ids.device)


def _save(out: Path, head: Head, teacher: Teacher, card: dict[str, object], together: CoTrained | None) -> None:
    tensors = head.tensors(teacher)
    card |= {"parameters": sum(t.numel() for t in tensors.values() if t.is_floating_point())}
    with atomic_directory(out) as folder:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / "config.json", head.describe(teacher))
        write_json(folder / PROVENANCE, card)
        if together is not None:
            together.save(teacher.path, folder / "target")

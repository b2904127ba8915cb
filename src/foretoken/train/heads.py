"""``foretoken train eagle3|peagle|mtp|dflash|...``: trains a head on text that the target sampled."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foretoken.core.artifacts import PROVENANCE, TRAINING_TEXT, Destination, heads_of
from foretoken.core.errors import InvalidRequest
from foretoken.core.files import write_json
from foretoken.core.schema import read_object
from foretoken.core.settings import changed_options
from foretoken.models.formats.checkpoint import load_tokenizer, quiet_transformers
from foretoken.models.loading import resolve_device
from foretoken.quantize.cached import checkpoint_folder
from foretoken.train import processes
from foretoken.train.block_heads import DFlashHead, DSparkHead
from foretoken.train.config import HEADS, HeadConfig, RunOptions, TrainConfig
from foretoken.train.data import Corpus
from foretoken.train.dataset import HiddenStateDataset
from foretoken.train.eagle import Eagle3Head, PEagleHead
from foretoken.train.frozen_target import FrozenTarget, TrainBatch
from foretoken.train.head import Head
from foretoken.train.losses import acceptance_weight, evaluated, head_loss
from foretoken.train.mtp import MtpHead
from foretoken.train.parallel_heads import BlockwiseHead, EarlyExitHead, MedusaHead
from foretoken.train.runs import TrainingRun
from foretoken.train.target import next_token_loss
from foretoken.train.trainer import Trainer
from foretoken.train.windows import MAX_PROMPT, prepare_windows

TARGET_RATE = 0.05  # factor of the target's learning rate, with --unfreeze
Batch = tuple[Tensor, Tensor, Tensor]
"""Token ids, hidden states, and the weight of the acceptance loss."""

MODULES: dict[str, Callable[[Any, FrozenTarget, Tensor], Head]] = {
    "eagle3": Eagle3Head,
    "peagle": PEagleHead,
    "mtp": MtpHead,
    "medusa": MedusaHead,
    "blockwise": BlockwiseHead,
    "early-exit": EarlyExitHead,
    "dflash": DFlashHead,
    "dspark": DSparkHead,
}
"""Makes a head from its settings, the target, and the counts [V] of tokens in its text."""


def train_head(
    role: str,
    options: RunOptions,
    target: Path,
    corpus: Corpus,
    settings: Any = None,
    config: TrainConfig | None = None,
    data: HeadConfig | None = None,
    dataset: Path | None = None,
    hold: float | None = None,
    start: Path | None = None,
) -> dict[str, float]:
    """Trains a head and writes it.

    Args:
        role: A key of ``config.HEADS``.
        options: Output and device of the run.
        target: Folder or GGUF file of the target.
        corpus: Text. It must be split as it was for the target, or the held-out figures are too good.
        settings: Settings of the head, by default those of its role.
        config: Training configuration. Its ``minutes`` include sampling text and computing hidden states.
        data: Settings of data and loss.
        dataset: Folder of text and hidden states, which are reused or created there and kept. None removes them after
            the run.
        hold: Trains the target too, with this weight of the penalty on changes of its distribution, and writes it to
            ``out/target``. None leaves the target as it is.
        start: Folder of an earlier head of the same shape, to continue from.

    Returns:
        The last evaluation.

    Raises:
        ModelLoadError: The target cannot be loaded.
        InvalidRequest: The settings are not valid.
        TrainingError: Files cannot be written, or the loss diverges.
    """
    settings, data, config = settings or HEADS[role].settings, data or HeadConfig(), config or HEADS[role].config
    started = time.monotonic()
    inputs = (target, start, *corpus.paths)
    run = TrainingRun(options, heads_of(HEADS[role].method), (*inputs, dataset))
    if dataset is not None:
        Destination.checked(dataset, TRAINING_TEXT, inputs, force=True)
    source, target = target, checkpoint_folder(target)
    with processes.joined(resolve_device(options.device)) as where, run.text_folder(dataset) as folder:
        frozen = FrozenTarget(target, where, config.compile)
        _check_window(MODULES[role](settings, frozen, torch.ones(frozen.vocab)), config)  # before any work
        text = prepare_windows(target, where, corpus, folder, config, data, source)
        torch.manual_seed(config.seed)
        head = MODULES[role](settings, frozen, torch.bincount(text["train"].flatten(), minlength=frozen.vocab))
        earlier = _start(head, start)
        head.to(where)
        datasets = _datasets(frozen, head, text, folder, data)
        together = None if hold is None else CoTrained(head, frozen, hold).to(where)
        trainer = run.trainer(together or head, config, _length, scale=_rate, headline=_headline)
        trainer.shorten(time.monotonic() - started)
        loss = _loss(head, datasets["train"], data, together)
        evaluate = _evaluation(head, datasets, together, text["text"])
        trainer.run(_batches(head, datasets["train"], trainer, data), loss, evaluate)
        if processes.rank() > 0:
            return trainer.history[-1]
        arguments = f"{role} {run.name} --model {target.name} {changed_options(settings)} {changed_options(data)}"
        arguments += f" --start {start.name}" if start is not None else ""
        arguments += f" --unfreeze --hold {hold:g}" if hold is not None else ""
        return run.write(
            arguments,
            corpus.name,
            partial(_save, head, frozen, together),
            "--data",
            role=role,
            target=target.name,
            settings=asdict(settings),
            data=asdict(data),
            **earlier,
            preparing_minutes=round((time.monotonic() - started - trainer.elapsed) / 60, 1),
            parameters=sum(t.numel() for t in head.tensors(frozen).values() if t.is_floating_point()),
        )


def _check_window(head: Head, config: TrainConfig) -> None:
    """Raises InvalidRequest if windows are too short for the tokens that the head predicts."""
    if head.depths + 2 > config.window:
        raise InvalidRequest(
            f"windows of {config.window} tokens are too short for a head that predicts {head.depths}; expected at "
            f"least {head.depths + 2}"
        )


def _datasets(
    target: FrozenTarget, head: Head, text: dict[str, Tensor], folder: Path, data: HeadConfig
) -> dict[str, HiddenStateDataset]:
    """Returns the windows with their hidden states, by name; most of the disk space goes to those for training."""
    gigabytes = data.disk_gigabytes
    if gigabytes is None:
        gigabytes = 12.0 if target.device.type == "cpu" else 0.0
    shares = {"greedy": 0.05, "drawn": 0.05, "train": 0.9}
    return {
        name: HiddenStateDataset(target, text[name], head.taps, folder, share * gigabytes * 1e9, name)
        for name, share in shares.items()
    }


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


def _headline(row: dict[str, float]) -> str:
    return f"held out {row['length_greedy']:.2f} tokens/pass greedily, {row['length_drawn']:.2f} at temperature 1"


def _loss(
    head: Head, dataset: HiddenStateDataset, data: HeadConfig, together: CoTrained | None
) -> Callable[[Batch], Tensor]:
    def loss_fn(batch: Batch) -> Tensor:
        ids, states, acceptance = batch
        train_batch = dataset.target.batch(ids, states, dataset.layers)
        with torch.autocast(ids.device.type, torch.bfloat16):
            if together is not None:
                return together.loss(train_batch, data.discount, acceptance)
            return head_loss(head, train_batch, data.discount, acceptance)

    return loss_fn


def _evaluation(
    head: Head, datasets: dict[str, HiddenStateDataset], together: CoTrained | None, text: Tensor
) -> Callable[[], dict[str, float]]:
    """Returns the evaluation on text that the target sampled, without the prompts."""
    greedy, drawn = datasets["greedy"], datasets["drawn"]
    skip = min(MAX_PROMPT, greedy.windows.shape[1] // 2)
    if together is None:
        return lambda: evaluated(head, greedy, drawn, skip)
    before = text_loss(greedy.target, text)
    greedy, drawn = (dataset.with_target(together.live(dataset.target)) for dataset in (greedy, drawn))

    def evaluate() -> dict[str, float]:
        now = text_loss(drawn.target, text)
        return evaluated(head, greedy, drawn, skip) | {"target_loss_before": before, "target_loss": now}

    return evaluate


def _batches(head: Head, dataset: HiddenStateDataset, trainer: Trainer, data: HeadConfig) -> Iterator[Batch]:
    """Yields training batches with the weight of the acceptance loss."""
    config = trainer.config
    for batch in dataset.batches(config.batch, config.seed, trainer.step):
        progress = trainer.progress()
        head.begin(progress, trainer.step, dataset.windows.shape[1])
        yield batch.ids, batch.states, acceptance_weight(progress, data.acceptance_share).to(batch.ids.device)


def _save(head: Head, target: FrozenTarget, together: CoTrained | None, folder: Path) -> None:
    save_file(head.tensors(target), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", head.describe(target))
    if together is not None:
        together.save(target.path, folder / "target")


class CoTrained(nn.Module):
    """A head, and a copy of the target that is trained with it.

    The target is trained with a penalty (Medusa-2, 2401.10774): ``hold`` times KL(p || p'), where p is its distribution
    before and p' the present one.
    """

    def __init__(self, head: Head, target: FrozenTarget, hold: float) -> None:
        super().__init__()
        self.head, self.hold = head, hold
        self.target = copy.deepcopy(target.model).float().requires_grad_(True)
        self.softcap = target.softcap

    def live(self, target: FrozenTarget) -> FrozenTarget:
        """Returns ``target`` with the present weights."""
        now = copy.copy(target)
        now.adopt(self.target)
        return now

    def loss(self, frozen: TrainBatch, discount: float, acceptance: Tensor) -> Tensor:
        """Returns the head's loss on the present target plus the penalty. frozen: batch of the original target."""
        output: Any = self.target.base_model(frozen.ids, use_cache=False, output_hidden_states=True)
        states = torch.stack([output.hidden_states[layer] for layer in frozen.layers], dim=2)
        vectors = self.target.get_input_embeddings().weight, self.target.get_output_embeddings().weight
        now = TrainBatch(frozen.ids, states, frozen.layers, *vectors, self.softcap)
        loss = head_loss(self.head, now, discount, acceptance)
        before, after = (batch.target_logits().float().log_softmax(-1) for batch in (frozen, now))
        return loss + self.hold * (before.exp() * (before - after)).sum(-1).mean()

    def save(self, source: Path, folder: Path) -> None:
        """Writes the changed target in bfloat16, with the tokenizer of ``source``."""
        with quiet_transformers():
            copy.deepcopy(self.target).bfloat16().save_pretrained(folder)
            load_tokenizer(source).save_pretrained(folder)


@torch.no_grad()
def text_loss(target: FrozenTarget, windows: Tensor) -> float:
    """Returns the target's loss on ``windows`` [N, T] of the corpus, in nats per token."""
    losses = [next_token_loss(target.logits(rows), rows.to(target.device)).item() for rows in windows.split(4)]
    return sum(losses) / len(losses)

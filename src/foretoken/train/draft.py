"""``foretoken train draft``: distils a small Llama from a target."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foretoken.core.artifacts import MODEL
from foretoken.core.checks import changed_options
from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import resolve_device
from foretoken.quantize.run import checkpoint_folder
from foretoken.train.config import DRAFT_CONFIG, DistillConfig, RunOptions, TrainConfig
from foretoken.train.data import Corpus, encode, held_out_batches, sample_continuations
from foretoken.train.frozen_target import FrozenTarget, TopTokens, fixed_windows, shuffled
from foretoken.train.losses import acceptance_weight, agreement, distillation_loss, weighted_means
from foretoken.train.runs import TrainingRun
from foretoken.train.sampling import mixed_temperatures, open_decoder
from foretoken.train.shapes import DRAFT_SHAPE, LlamaShape
from foretoken.train.target import new_model, next_token_loss, save
from foretoken.train.trainer import Trainer


def train_draft(
    options: RunOptions,
    target: Path,
    corpus: Corpus,
    shape: LlamaShape = DRAFT_SHAPE,
    config: TrainConfig = DRAFT_CONFIG,
    distill: DistillConfig | None = None,
) -> dict[str, float]:
    """Distils a draft from a target and writes it, see ``runs``.

    On a CPU the target's most likely tokens are computed once, before training, and kept on disk. On a GPU the target
    computes its complete distributions in every step, which costs less than reading them from a disk. The minutes
    include sampling text and the pass over the target, a folder or GGUF file.
    """
    distill = distill or DistillConfig()
    run = TrainingRun(options, MODEL, (target, *corpus.paths))
    target = checkpoint_folder(target)
    where = resolve_device(options.device)
    frozen, tokenizer = FrozenTarget(target, where), load_tokenizer(target)
    stream = encode(corpus.train, tokenizer)
    held_out = held_out_batches(encode(corpus.held_out, tokenizer), config.batch, config.window)
    model = new_model(shape, tokenizer, config.seed, frozen.vocab).to(where)
    trainer = run.trainer(model, config, lambda row: row["overlap"])
    text = _TrainingText(frozen, stream, config, distill, run.distributions)
    trainer.shorten(text.seconds)

    def loss_fn(batch: tuple[Tensor, ...]) -> Tensor:
        ids, acceptance, *most_likely = batch
        expected = (most_likely[0], most_likely[1]) if most_likely else frozen.logits(ids)
        with torch.autocast(where.type, torch.bfloat16):
            logits = model(ids, use_cache=False).logits
        return distillation_loss(logits, expected, acceptance)

    batches = text.batches(trainer, distill.acceptance_share, where)
    trainer.run(batches, loss_fn, lambda: measure(frozen, model, held_out))
    gpu = " --device cuda" if where.type == "cuda" else ""
    figures = run.write(
        f"draft {run.name} {target.name} {changed_options(distill)}{gpu} {changed_options(shape, DRAFT_SHAPE)}",
        corpus.name,
        lambda folder: save(model, tokenizer, folder),
        role="draft",
        corpus_tokens=len(stream),
        target=target.name,
        parameters=model.num_parameters(),
        taught_tokens=text.windows.numel(),
        teaching_minutes=round(text.seconds / 60, 1),
        distill=asdict(distill),
    )
    shutil.rmtree(run.distributions, ignore_errors=True)
    return figures


@torch.no_grad()
def measure(target: FrozenTarget, model: torch.nn.Module, held_out: list[Tensor]) -> dict[str, float]:
    """Returns held-out loss (nats), overlap and argmax agreement with the target, over the whole vocabulary."""

    def figures(batch: Tensor) -> tuple[int, dict[str, float]]:
        ids = batch.to(target.device)
        p, q = target.logits(ids), model(ids, use_cache=False).logits
        return ids.numel(), {"held_out_loss": next_token_loss(q, ids).item(), **agreement(p, q)}

    return weighted_means(map(figures, held_out))


class _TrainingText:
    """Text of a run.

    Attributes:
        windows: Token ids, int64 [N, T].
        top: The target's most likely tokens there, None if it computes its distributions in every step.
        seconds: Time spent on sampling windows, or on the most likely tokens.
    """

    def __init__(
        self, target: FrozenTarget, stream: Tensor, config: TrainConfig, distill: DistillConfig, folder: Path
    ) -> None:
        every_step, started = _in_every_step(target.device), time.monotonic()
        limit = None if config.minutes is None else config.minutes * 60 * distill.teacher_share
        self.windows = _windows(target, stream, config, distill, limit if every_step else None, every_step)
        self.top, self.seconds = None, time.monotonic() - started
        if not every_step:
            self.top = TopTokens(target, self.windows, folder, distill.top, limit, config.compile)
            self.windows, self.seconds = self.top.ids, self.top.seconds

    def batches(self, trainer: Trainer, share: float, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
        """Yields token ids, the weight of the acceptance loss, and the most likely tokens if they were computed."""
        config = trainer.config
        for rows in shuffled(len(self.windows), config.batch, config.seed, trainer.step):
            ids, weight = self.windows[torch.from_numpy(rows)], acceptance_weight(trainer.progress(), share)
            yield ids.to(device), weight.to(device), *(() if self.top is None else self.top.at(rows))


def _in_every_step(device: torch.device) -> bool:
    """Returns whether the target computes its distributions in every step."""
    return device.type == "cuda"


def _windows(
    target: FrozenTarget,
    stream: Tensor,
    config: TrainConfig,
    distill: DistillConfig,
    limit: float | None,
    every_step: bool,
) -> Tensor:
    """Returns windows of the corpus and continuations of its prompts, shuffled so that any prefix is a fair sample.

    On a GPU they are the whole corpus, and as many continuations as the requested fraction needs. Otherwise the disk
    space for the target's distributions bounds their number.
    """
    share, length = distill.generated_share, config.window
    if len(stream) < length:
        raise InvalidRequest(
            f"the corpus has {len(stream)} tokens, less than one window of {length}: add text or lower --window"
        )
    windows = fixed_windows(stream, length, config.seed)
    if every_step and share >= 1:
        raise InvalidRequest(
            f"generated_share is {share:g}; on a GPU, which reads all of the corpus, it must be below 1"
        )
    if every_step:
        count = round(len(windows) * share / (1 - share))
    else:
        windows = windows[: max(1, int(distill.disk_gigabytes * 1e9 / (length * distill.top * 4)))]
        count = int(share * len(windows))
        windows = windows[: len(windows) - count]
    if not count:
        return windows
    rng = np.random.default_rng([config.seed, 4])
    with open_decoder(target.path, target.path, target.device, length) as decoder:
        temperatures = mixed_temperatures(rng, count)
        sampled = sample_continuations(decoder, stream, temperatures, length, config.seed, limit)
    rows = torch.cat([windows, sampled])
    return rows[torch.from_numpy(rng.permutation(len(rows)))]

"""``foretoken train draft``: distils a small Llama from a target (see ``distillation``)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foretoken.core.artifacts import MODEL
from foretoken.core.errors import InvalidRequest, ModelLoadError, reason_of
from foretoken.models.loading import resolve_device
from foretoken.quantize.cached import checkpoint_folder
from foretoken.train.data import Corpus, encode, held_out_batches
from foretoken.train.distillation import (
    DISTILL,
    DistillConfig,
    acceptance_weight,
    agreement,
    distillation_loss,
    full_distillation_loss,
)
from foretoken.train.files import check_run, checkpoint_of, distributions_of
from foretoken.train.live_teacher import live_windows
from foretoken.train.optimization import TrainConfig
from foretoken.train.progress import Reporter, quiet_transformers
from foretoken.train.provenance import command_line, provenance, write_trained
from foretoken.train.target import DRAFT_SHAPE, Shape, new_model, next_token_loss, save
from foretoken.train.teacher import TaughtWindows, fixed_windows, teach
from foretoken.train.trainer import LossFn, Trainer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

DRAFT_CONFIG = TrainConfig(minutes=20.0, batch=8, window=512, learning_rate=4e-3, weight_decay=0.05)


def train_draft(
    out: Path,
    target: Path,
    corpus: Corpus,
    shape: Shape = DRAFT_SHAPE,
    config: TrainConfig = DRAFT_CONFIG,
    resume: bool = False,
    distill: DistillConfig = DISTILL,
    device: str = "cpu",
    force: bool = False,
) -> dict[str, float]:
    """Distils a draft from a target and writes it to ``out``.

    On a GPU the target computes its distributions in every step (``live_teacher``); on a CPU once, before.

    Args:
        out: Folder of the draft.
        target: Folder or GGUF file of the target.
        corpus: Text. It must be split as it was for the target, or the held-out figures are meaningless.
        shape: Size of the draft.
        config: Training configuration. Its ``minutes`` include the pass over the target.
        resume: Continues an interrupted run.
        distill: Settings of the target's distributions and of the loss.
        device: "auto", "cpu" or "cuda".
        force: Replaces an earlier model at ``out``, and starts an interrupted run again.

    Returns:
        The last evaluation.

    Raises:
        ModelLoadError: The target cannot be loaded.
        InvalidRequest: The settings are not valid, or ``out`` must not be written.
        TrainingError: Files cannot be written, or the loss diverges.
    """
    run = check_run(out, MODEL, (target, *corpus.paths), resume, force)
    target = checkpoint_folder(target)
    where = resolve_device(device)
    teacher, tokenizer = load_teacher(target)
    teacher.to(where)
    stream = encode(corpus.train, tokenizer)
    if len(stream) < config.window:
        raise InvalidRequest(
            f"the corpus has {len(stream)} tokens, less than one window of {config.window}: add text or lower --window"
        )
    held_out = held_out_batches(encode(corpus.held_out, tokenizer), config.batch, config.window)
    model = new_model(shape, tokenizer, config.seed).to(where)
    trainer = Trainer(model, config, checkpoint_of(run.path), lambda row: row["overlap"])
    if resume:
        trainer.resume()
    store = distributions_of(run.path)
    lessons = _live if where.type == "cuda" else partial(_on_disk, store)
    taught = lessons(teacher, model, trainer, stream, distill)
    trainer.shorten(taught.seconds)

    def evaluate() -> dict[str, float]:
        return measure(teacher, model, [batch.to(where) for batch in held_out])

    trainer.run(taught.batches, taught.loss, evaluate)
    what = (
        f"draft {run.path.name} {target.name} {distill.arguments()}{' --device cuda' if where.type == 'cuda' else ''}"
    )
    card = provenance(
        command_line(f"{what} {shape.arguments(DRAFT_SHAPE)}", config, corpus.name),
        config,
        trainer,
        role="draft",
        corpus=corpus.name,
        corpus_tokens=len(stream),
        target=target.name,
        parameters=model.num_parameters(),
        taught_tokens=taught.tokens,
        teaching_minutes=round(taught.seconds / 60, 1),
        distill=asdict(distill),
        **trainer.history[-1],
    )
    figures = write_trained(run, trainer, card, lambda folder: save(model, tokenizer, folder))
    shutil.rmtree(store, ignore_errors=True)
    return figures


def load_teacher(path: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Loads the target in bfloat16, frozen, and its tokenizer. Raises ModelLoadError."""
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    try:
        with quiet_transformers():
            model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa")
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    except Exception as error:
        raise ModelLoadError(
            f"cannot load the target {path}: {reason_of(error)}; pass a folder written by 'foretoken train target'"
        ) from error
    return model.eval().requires_grad_(False), tokenizer


@torch.no_grad()
def measure(teacher: LlamaForCausalLM, model: LlamaForCausalLM, held_out: list[torch.Tensor]) -> dict[str, float]:
    """Returns held-out loss (nats), overlap and argmax agreement with the target, over the whole vocabulary."""
    loss = overlap = equal = tokens = 0.0
    for batch in held_out:
        p, q = teacher(batch, use_cache=False).logits, model(batch, use_cache=False).logits
        both = agreement(p, q)
        n = batch.numel()
        loss += n * next_token_loss(q, batch).item()
        overlap, equal, tokens = overlap + n * both[0], equal + n * both[1], tokens + n
    return {"held_out_loss": loss / tokens, "overlap": overlap / tokens, "argmax_agreement": equal / tokens}


@dataclass(frozen=True)
class _Lessons:
    """What a run trains on.

    Attributes:
        batches: Endless batches for ``loss``.
        loss: Returns the loss of a batch.
        tokens: Number of different tokens.
        seconds: Time that was spent before the first batch.
    """

    batches: Iterator[Any]
    loss: LossFn
    tokens: int
    seconds: float


def _live(
    teacher: LlamaForCausalLM, model: LlamaForCausalLM, trainer: Trainer, stream: torch.Tensor, distill: DistillConfig
) -> _Lessons:
    """Returns lessons whose distributions the target computes in every step."""
    config = trainer.config
    limit = None if config.minutes is None else config.minutes * 60 * distill.teacher_share
    windows = live_windows(teacher, stream, config.window, config.seed, distill.generated_share, limit)

    def loss_fn(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids, acceptance = batch
        with torch.no_grad():
            target_logits = teacher(ids, use_cache=False).logits
        with torch.autocast(ids.device.type, torch.bfloat16):
            logits = model(ids, use_cache=False).logits
        return full_distillation_loss(logits, target_logits, acceptance)

    batches = windows.batches(config.batch, config.seed, trainer.step)
    weighted = (
        (ids, acceptance_weight(trainer.progress(), distill.acceptance_share).to(ids.device)) for ids in batches
    )
    return _Lessons(weighted, loss_fn, windows.ids.numel(), windows.seconds)


def _on_disk(
    store: Path,
    teacher: LlamaForCausalLM,
    model: LlamaForCausalLM,
    trainer: Trainer,
    stream: torch.Tensor,
    distill: DistillConfig,
) -> _Lessons:
    """Returns lessons whose distributions the target computes once, into ``store``."""
    config = trainer.config
    taught = _taught(teacher, stream, store, config, distill)

    def loss_fn(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        ids, top_ids, top_logp, acceptance = batch
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids, use_cache=False).logits
        return distillation_loss(logits, (top_ids, top_logp), acceptance)

    batches = taught.batches(config.batch, config.seed, trainer.step)
    weighted = ((*batch, acceptance_weight(trainer.progress(), distill.acceptance_share)) for batch in batches)
    return _Lessons(weighted, loss_fn, taught.ids.numel(), taught.seconds)


def _taught(
    teacher: LlamaForCausalLM, stream: torch.Tensor, store: Path, config: TrainConfig, distill: DistillConfig
) -> TaughtWindows:
    windows = fixed_windows(stream, config.window, config.seed)
    bytes_per_window = config.window * distill.top * 4
    windows = windows[: max(1, int(distill.disk_gigabytes * 1e9 / bytes_per_window))]
    count = int(distill.generated_share * len(windows))
    if count:
        windows = torch.cat([windows[: len(windows) - count], _continued(teacher, windows[-count:], config.seed)])
        windows = fixed_windows(windows.flatten(), config.window, config.seed + 1)
    limit = None if config.minutes is None else config.minutes * 60 * distill.teacher_share
    return teach(teacher, windows, store, distill.top, limit, config.compile)


@torch.no_grad()
def _continued(teacher: LlamaForCausalLM, windows: torch.Tensor, seed: int) -> torch.Tensor:
    """Continues the first quarter of each window to its full length, sampled from the target at temperature 1."""
    torch.manual_seed(seed)
    generate: Any = teacher.generate
    length, rows = windows.shape[1], []
    with quiet_transformers(), Reporter("generating") as report:
        for i, part in enumerate(windows.split(64)):
            prompt = part[:, : max(1, length // 4)]
            text = generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_length=length,
                eos_token_id=None,  # windows of the corpus continue past the end of a file, too
                pad_token_id=0,
            )
            rows.append(text)
            report.update((i + 1) * 64 / len(windows))
    return torch.cat(rows)

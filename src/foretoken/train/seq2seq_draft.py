"""``foretoken train seq2seq-draft``: distils a T5 of under a million parameters from a T5 target.

The loss is that of a causal draft (see ``distillation``). The target runs in every step, so its distribution is
complete and nothing is kept on disk.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from foretoken.core.artifacts import MODEL
from foretoken.core.errors import InvalidRequest, ModelLoadError, reason_of
from foretoken.quantize.cached import checkpoint_folder
from foretoken.train.data import Corpus
from foretoken.train.distillation import acceptance_weight, agreement, full_distillation_loss
from foretoken.train.files import check_run, checkpoint_of
from foretoken.train.optimization import TrainConfig
from foretoken.train.progress import quiet_transformers
from foretoken.train.provenance import command_line, provenance, write_trained
from foretoken.train.repair import IGNORED, Batch, batches, bundled_tokenizer, snippets
from foretoken.train.seq2seq import (
    T5Shape,
    compiled_by_length,
    evaluation_batches,
    label_loss,
    logits_of,
    new_model,
    rate_scale,
    save,
)
from foretoken.train.trainer import Trainer

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration

SEQ2SEQ_DRAFT_SHAPE = T5Shape(96, 192, 2, 2, 4, 32)
SEQ2SEQ_DRAFT_CONFIG = TrainConfig(minutes=20.0, batch=16, window=176, learning_rate=4e-3, weight_decay=0.05)
ACCEPTANCE_SHARE = 0.3  # last share of the run, which changes from KL to the acceptance loss


def train_seq2seq_draft(
    out: Path,
    target: Path,
    corpus: Corpus,
    shape: T5Shape = SEQ2SEQ_DRAFT_SHAPE,
    config: TrainConfig = SEQ2SEQ_DRAFT_CONFIG,
    resume: bool = False,
    acceptance_share: float = ACCEPTANCE_SHARE,
    force: bool = False,
) -> dict[str, float]:
    """Distils a T5 with tied embeddings from a T5 target on repair tasks.

    Args:
        out: Folder of the draft.
        target: Folder of the target.
        corpus: Text. It must be split as it was for the target, or the held-out figures are meaningless.
        shape: Size of the draft.
        config: Training configuration, see ``train_seq2seq``.
        resume: Continues an interrupted run.
        acceptance_share: Last share of the run, which changes from KL to the acceptance loss.
        force: Replaces an earlier model at ``out``, and starts an interrupted run again.

    Returns:
        The last evaluation.

    Raises:
        ModelLoadError: The target cannot be loaded.
        InvalidRequest: The settings are not valid.
        TrainingError: Files cannot be written, or the loss diverges.
    """
    run = check_run(out, MODEL, (target, *corpus.paths), resume, force)
    teacher, tokenizer = load_seq2seq(checkpoint_folder(target)).float(), bundled_tokenizer()
    teacher.set_attn_implementation("eager")  # as `new_model`
    if teacher.config.vocab_size != len(tokenizer):
        raise InvalidRequest(
            f"{target} has {teacher.config.vocab_size} tokens and the bundled tokenizer {len(tokenizer)}; "
            "pass a target written by 'foretoken train seq2seq'"
        )
    data = snippets(corpus.train, tokenizer, config.window, config.seed)
    held = evaluation_batches(corpus, tokenizer, config)
    model = new_model(shape, tokenizer, config.seed, tied=True)
    trainer = Trainer(
        model, replace(config, compile=False), checkpoint_of(run.path), lambda row: row["overlap"], rate_scale
    )
    if resume:
        trainer.resume()

    def loss_fn(given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        labels, source, mask, acceptance = given
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                target_logits = logits_of(teacher, (labels, source, mask))
            logits = logits_of(model, (labels, source, mask))
        return full_distillation_loss(logits, target_logits, acceptance, labels != IGNORED)

    each = batches(data, config.batch * config.window, config.seed + 1, trainer.step)
    weighted = ((*batch, acceptance_weight(trainer.progress(), acceptance_share)) for batch in each)
    trainer.run(weighted, compiled_by_length(loss_fn, config), lambda: measure_pair(teacher, model, held))
    what = f"seq2seq-draft {run.path.name} --target {target.name} --acceptance-share {acceptance_share:g}"
    card = provenance(
        command_line(f"{what} {shape.arguments(SEQ2SEQ_DRAFT_SHAPE)}", config, corpus.name),
        config,
        trainer,
        role="seq2seq-draft",
        corpus=corpus.name,
        snippets=sum(map(len, data.by_length.values())),
        target=target.name,
        parameters=model.num_parameters(),
        acceptance_share=acceptance_share,
        **trainer.history[-1],
    )
    return write_trained(run, trainer, card, lambda folder: save(model, tokenizer, folder, tied=True))


def load_seq2seq(path: Path) -> T5ForConditionalGeneration:
    """Loads the T5 at ``path`` in bfloat16, frozen. Raises ModelLoadError."""
    from transformers import T5ForConditionalGeneration

    try:
        with quiet_transformers():
            model = T5ForConditionalGeneration.from_pretrained(path, dtype=torch.bfloat16)
    except Exception as error:
        raise ModelLoadError(
            f"cannot load the target {path}: {reason_of(error)}; pass a folder written by 'foretoken train seq2seq'"
        ) from error
    return model.eval().requires_grad_(False)


@torch.no_grad()
def measure_pair(
    teacher: T5ForConditionalGeneration, model: T5ForConditionalGeneration, held_out: list[Batch]
) -> dict[str, float]:
    """Returns held-out loss (nats), overlap and argmax agreement with the target, over the whole vocabulary."""
    loss = overlap = equal = tokens = 0.0
    for batch in held_out:
        counted = batch[0] != IGNORED
        with torch.autocast("cpu", torch.bfloat16):
            p, q = logits_of(teacher, batch), logits_of(model, batch)
        both, n = agreement(p[counted], q[counted]), int(counted.sum())
        loss += n * label_loss(q, batch[0]).item()
        overlap, equal, tokens = overlap + n * both[0], equal + n * both[1], tokens + n
    return {"held_out_loss": loss / tokens, "overlap": overlap / tokens, "argmax_agreement": equal / tokens}

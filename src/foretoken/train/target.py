"""``foretoken train target``: trains a small Llama from scratch on the standard library's source.

Other families are trained likewise, see ``Recipe``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from foretoken.core.artifacts import MODEL
from foretoken.core.checks import changed_options
from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.checkpoint import quiet_transformers
from foretoken.models.loading import resolve_device
from foretoken.train.config import TARGET_CONFIG, RunOptions, TrainConfig
from foretoken.train.data import Corpus, encode, held_out_batches, train_tokenizer, windows
from foretoken.train.losses import weighted_means
from foretoken.train.runs import TrainingRun
from foretoken.train.shapes import TARGET_SHAPE, LlamaShape

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def new_model(
    shape: LlamaShape, tokenizer: PreTrainedTokenizerFast, seed: int, vocab: int | None = None
) -> LlamaForCausalLM:
    """Returns a freshly initialized Llama with tied embeddings, and ``vocab`` tokens if a target has more."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab or len(tokenizer),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **vars(shape),
    )
    return LlamaForCausalLM(config)


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy of logits [B, T, V] for the next tokens of ids [B, T]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Recipe:
    """The model, loss and file format of a family that is trained from scratch."""

    command: str  # its name after ``foretoken train``
    role: str  # role among the bundled models
    usual: Any  # sizes of the bundled model
    # returns a freshly initialized model of a shape
    new: Callable[[Any, PreTrainedTokenizerFast, TrainConfig], nn.Module]
    # returns the loss of ids [B, T], of a model in evaluation the mean cross-entropy of the next tokens
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    save: Callable[[Any, PreTrainedTokenizerFast, Path], None]  # writes bf16 weights, config and tokenizer
    recordable: bool = False  # whether a step waits for no device, so that it can be recorded as a CUDA graph


LLAMA = Recipe(
    "target",
    "target",
    TARGET_SHAPE,
    lambda shape, tokenizer, config: new_model(shape, tokenizer, config.seed),
    lambda model, ids: next_token_loss(model(ids, use_cache=False).logits, ids),
    lambda model, tokenizer, folder: save(model, tokenizer, folder),
)


def train_target(
    options: RunOptions,
    corpus: Corpus,
    shape: Any = TARGET_SHAPE,
    config: TrainConfig = TARGET_CONFIG,
    recipe: Recipe = LLAMA,
) -> dict[str, float]:
    """Trains a tokenizer and a model of a family, and writes them, see ``runs``."""
    if config.window > shape.max_position_embeddings:
        raise InvalidRequest(f"windows of {config.window} exceed the model's {shape.max_position_embeddings} positions")
    run = TrainingRun(options, MODEL, corpus.paths)
    where = resolve_device(options.device)
    tokenizer = train_tokenizer(corpus)
    stream = encode(corpus.train, tokenizer)
    held_out = [b.to(where) for b in held_out_batches(encode(corpus.held_out, tokenizer), config.batch, config.window)]
    model = recipe.new(shape, tokenizer, config).to(where)
    config = replace(config, recorded=recipe.recordable and where.type == "cuda")
    trainer = run.trainer(model, config, lambda row: -row["held_out_loss"])

    def loss_fn(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(where.type, torch.bfloat16):
            return recipe.loss(model, ids)

    def evaluate() -> dict[str, float]:
        return weighted_means((ids.numel(), {"held_out_loss": loss_fn(ids).item()}) for ids in held_out)

    batches = windows(stream, config.batch, config.window, config.seed, trainer.step)
    trainer.run((batch.to(where) for batch in batches), loss_fn, evaluate)
    return run.write(
        f"{recipe.command} {run.name} {changed_options(shape, recipe.usual)}",
        corpus.name,
        lambda folder: recipe.save(model, tokenizer, folder),
        role=recipe.role,
        corpus_tokens=len(stream),
        parameters=sum(p.numel() for p in model.parameters()),
    )


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes bf16 weights, config and tokenizer."""
    with quiet_transformers():
        model.bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)

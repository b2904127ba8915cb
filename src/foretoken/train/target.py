"""``foretoken train target``: trains a small Llama from scratch on the standard library's source.

Other families are trained likewise, see ``Recipe``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from foretoken.core.artifacts import MODEL
from foretoken.core.errors import InvalidRequest
from foretoken.models.loading import resolve_device
from foretoken.train.data import Corpus, encode, held_out_batches, train_tokenizer, windows
from foretoken.train.files import check_run, checkpoint_of
from foretoken.train.optimization import TrainConfig
from foretoken.train.progress import quiet_transformers
from foretoken.train.provenance import command_line, provenance, write_trained
from foretoken.train.trainer import Trainer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Shape:
    """Size of a Llama. The defaults are the bundled target's, about 14.6 M parameters."""

    hidden_size: int = 384
    intermediate_size: int = 1024
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    num_key_value_heads: int = 3
    head_dim: int = 64
    max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise InvalidRequest(f"{name} is {value}; it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidRequest(
                f"{self.num_attention_heads} heads do not divide among {self.num_key_value_heads} key heads"
            )
        if self.head_dim % 2:
            raise InvalidRequest(f"head_dim is {self.head_dim}; rotary positions need an even one")

    @staticmethod
    def of(config: Mapping[str, Any]) -> Shape:
        """Returns the size of a model with this config.json."""
        return Shape(**{field.name: config[field.name] for field in fields(Shape)})

    def arguments(self, usual: Shape) -> str:
        """Returns the command line options for fields that differ from ``usual``."""
        options = {
            "hidden_size": "--hidden",
            "intermediate_size": "--intermediate",
            "num_hidden_layers": "--layers",
            "num_attention_heads": "--heads",
            "num_key_value_heads": "--kv-heads",
            "head_dim": "--head-dim",
            "max_position_embeddings": "--positions",
        }
        return " ".join(f"{o} {getattr(self, n)}" for n, o in options.items() if getattr(self, n) != getattr(usual, n))


TARGET_SHAPE = Shape()
TARGET_CONFIG = TrainConfig(minutes=120.0, batch=14)
DRAFT_SHAPE = Shape(128, 384, 2, 4, 4, 32)


def new_model(shape: Shape, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Returns a freshly initialized Llama with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
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


class ModelShape(Protocol):
    """Size of a model of some family."""

    @property
    def max_position_embeddings(self) -> int:
        """Positions."""

    @staticmethod
    def of(config: Mapping[str, Any]) -> ModelShape:
        """Returns the size of a model with this config.json."""

    def arguments(self, usual: Any) -> str:
        """Returns the command line options for fields that differ from ``usual``."""


class Recipe(ABC):
    """How a family of models is made, trained and written.

    Attributes:
        command: Its name after ``foretoken train``.
        role: Of the model among the bundled ones.
        usual: Size of the bundled model.
        recordable: Whether a step waits for no device, so that it can be recorded as a CUDA graph.
    """

    command: str
    role: str
    usual: ModelShape
    recordable = False

    @abstractmethod
    def new(self, shape: Any, tokenizer: PreTrainedTokenizerFast, config: TrainConfig) -> nn.Module:
        """Returns a freshly initialized model."""

    @abstractmethod
    def loss(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """Returns the loss of ids [B, T], of a model in evaluation the mean cross-entropy of the next tokens."""

    @abstractmethod
    def save(self, model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        """Writes bf16 weights, config and tokenizer."""


class LlamaRecipe(Recipe):
    """A small Llama of transformers."""

    command = "target"
    role = "target"
    usual = TARGET_SHAPE

    def new(self, shape: Shape, tokenizer: PreTrainedTokenizerFast, config: TrainConfig) -> nn.Module:
        return new_model(shape, tokenizer, config.seed)

    def loss(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        return next_token_loss(model(ids, use_cache=False).logits, ids)

    def save(self, model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        save(model, tokenizer, folder)


LLAMA = LlamaRecipe()


def train_target(
    out: Path,
    corpus: Corpus,
    shape: ModelShape = TARGET_SHAPE,
    config: TrainConfig = TARGET_CONFIG,
    resume: bool = False,
    recipe: Recipe = LLAMA,
    device: str = "cpu",
    force: bool = False,
) -> dict[str, float]:
    """Trains a tokenizer and a model, and writes them to ``out``. Ctrl-C leaves a checkpoint beside ``out``.

    Args:
        out: Folder of the model.
        corpus: Text.
        shape: Size of the model.
        config: Training configuration.
        resume: Continues an interrupted run.
        recipe: Family of the model.
        device: "auto", "cpu" or "cuda".
        force: Replaces an earlier model at ``out``, and starts an interrupted run again.

    Returns:
        The last evaluation.

    Raises:
        InvalidRequest: The settings are not valid, or ``out`` must not be written.
        TrainingError: Files cannot be written, or the loss diverges.
    """
    if config.window > shape.max_position_embeddings:
        raise InvalidRequest(f"windows of {config.window} exceed the model's {shape.max_position_embeddings} positions")
    run = check_run(out, MODEL, corpus.paths, resume, force)
    where = resolve_device(device)
    tokenizer = train_tokenizer(corpus)
    stream = encode(corpus.train, tokenizer)
    held_out = [b.to(where) for b in held_out_batches(encode(corpus.held_out, tokenizer), config.batch, config.window)]
    model = recipe.new(shape, tokenizer, config).to(where)
    config = replace(config, recorded=recipe.recordable and where.type == "cuda")
    trainer = Trainer(model, config, checkpoint_of(run.path), lambda row: -row["held_out_loss"])
    if resume:
        trainer.resume()

    def loss_fn(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(where.type, torch.bfloat16):
            return recipe.loss(model, ids)

    def evaluate() -> dict[str, float]:
        losses = [loss_fn(ids).item() * ids.numel() for ids in held_out]
        return {"held_out_loss": sum(losses) / sum(ids.numel() for ids in held_out)}

    batches = windows(stream, config.batch, config.window, config.seed, trainer.step)
    trainer.run((batch.to(where) for batch in batches), loss_fn, evaluate)
    card = provenance(
        command_line(f"{recipe.command} {run.path.name} {shape.arguments(recipe.usual)}", config, corpus.name),
        config,
        trainer,
        role=recipe.role,
        corpus=corpus.name,
        corpus_tokens=len(stream),
        parameters=sum(p.numel() for p in model.parameters()),
        **trainer.history[-1],
    )
    return write_trained(run, trainer, card, lambda folder: recipe.save(model, tokenizer, folder))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes bf16 weights, config and tokenizer."""
    with quiet_transformers():
        model.bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)

"""Configuration of a training run, its optimizers, and compilation of its functions."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foretoken.core.errors import InvalidRequest
from foretoken.train.muon import StackedMuon


@dataclass(frozen=True)
class TrainConfig:
    """Length of a run, learning rate and batches.

    Args:
        steps: Optimizer steps, used if ``minutes`` is None.
        minutes: Length of the run in minutes. The schedule then follows the clock.
        batch: Windows per step.
        window: Tokens per window.
        learning_rate: Greatest learning rate.
        weight_decay: Weight decay of matrices.
        warmup: First share of the run, in which the learning rate rises.
        decay: Last share of the run, in which the learning rate falls to zero.
        seed: Seed of initialization and batches.
        evaluate_every_seconds: Seconds between evaluations.
        compile: Whether to compile, None for where a C++ compiler exists.
        patience: Evaluations without improvement after which the run ends with the best weights.
        dropout: Share of the outputs of layers that is dropped in training, of models that know it.
        recorded: Whether steps are recorded as a CUDA graph, of models whose operations allow it.
    """

    steps: int = 2000
    minutes: float | None = None
    batch: int = 10
    window: int = 768
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup: float = 0.02
    decay: float = 0.6
    seed: int = 0
    evaluate_every_seconds: float = 300.0
    compile: bool | None = None
    patience: int | None = None
    dropout: float = 0.0
    recorded: bool = False

    def __post_init__(self) -> None:
        for name, minimum in (("steps", 1), ("batch", 1), ("window", 2)):
            if getattr(self, name) < minimum:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be at least {minimum}")
        if self.patience is not None and self.patience < 1:
            raise InvalidRequest(f"patience is {self.patience}; it must be at least 1 evaluation")
        if not 0 <= self.dropout < 1:
            raise InvalidRequest(f"dropout is {self.dropout}; it must be a share, at least 0 and below 1")
        for name in ("learning_rate", "warmup", "decay", "minutes"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidRequest(f"{name} is {value}; it must be a positive number")

    def arguments(self) -> str:
        """Returns the command line options that give these settings."""
        length = f"--steps {self.steps}" if self.minutes is None else f"--minutes {self.minutes:g}"
        dropout = f" --dropout {self.dropout:g}" if self.dropout else ""
        patience = f" --patience {self.patience}" if self.patience is not None else ""
        return (
            f"{length} --batch {self.batch} --window {self.window} --learning-rate {self.learning_rate:g} "
            f"--seed {self.seed}{dropout}{patience}"
        )


def optimizers(model: nn.Module, config: TrainConfig, scale: Callable[[str], float]) -> list[torch.optim.Optimizer]:
    """Returns Muon (orthogonalized momentum) for matrices and stacks of experts, and AdamW for all else."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            matrix = (parameter.ndim == 2 and _is_matrix(name)) or ".experts." in name
            groups.setdefault((matrix, scale(name)), []).append(parameter)
    rate, decay, made = config.learning_rate, config.weight_decay, list[torch.optim.Optimizer]()
    for matrices in (False, True):
        own = [{"params": listed, "scale": s} for (kind, s), listed in groups.items() if kind == matrices]
        if own and matrices:
            made.append(StackedMuon(own, lr=rate, weight_decay=decay))
        elif own:
            made.append(torch.optim.AdamW(own, lr=rate, weight_decay=0.0, betas=(0.9, 0.95), fused=True))
    return made


def _is_matrix(name: str) -> bool:
    return not any(
        table in name for table in ("embed", "lm_head", "shared.weight", "relative_attention_bias", "markov_w")
    )


def compiled(fn: Callable[..., Any], enabled: bool | None, dynamic: bool | None = None) -> Callable[..., Any]:
    """Returns ``fn`` compiled by torch.compile.

    Args:
        fn: A function or model.
        enabled: Whether to compile, None for where a C++ compiler exists.
        dynamic: As in torch.compile.
    """
    if enabled is None:
        enabled = shutil.which("g++") is not None
    return torch.compile(fn, dynamic=dynamic) if enabled else fn

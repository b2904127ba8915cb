"""Heads that draft every position from one hidden state of the target: Medusa, blockwise, early exit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import InvalidRequest
from foretoken.train.lessons import Head, Lesson, RmsNorm, Teacher


def _at_least_one(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise InvalidRequest(f"{name} is {getattr(config, name)}; it must be at least 1")


@dataclass(frozen=True)
class MedusaTrainConfig:
    """One head for each of ``heads`` positions, with ``layers`` residual layers each."""

    heads: int = 4
    layers: int = 1

    def __post_init__(self) -> None:
        _at_least_one(self, "heads", "layers")


class MedusaHead(Head):
    """Medusa (2401.10774): x + SiLU(W x + b) of the normed hidden state x, before the target's vocabulary head."""

    def __init__(self, config: MedusaTrainConfig, teacher: Teacher) -> None:
        super().__init__()
        self.depths, self.layers = config.heads, config.layers
        self.blocks = nn.ModuleList(_Block(config.layers, teacher.hidden) for _ in range(config.heads))

    @classmethod
    def made(cls, config: MedusaTrainConfig, teacher: Teacher, counts: Tensor) -> MedusaHead:
        """Returns the untrained head."""
        return cls(config, teacher)

    def forward(self, lesson: Lesson) -> list[Tensor]:
        x = lesson.last()[:, : -self.depths].float()
        return [lesson.read(block(x)) for block in self.blocks]

    def describe(self, teacher: Teacher) -> dict[str, Any]:
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": teacher.hidden,
            "vocab_size": teacher.vocab,
            "truncated_vocab_size": teacher.vocab,
            "num_heads": self.depths,
            "num_hidden_layers": self.layers,
            "original_lm_head": True,
        }


class _Block(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        made = [nn.Linear(width, width) for _ in range(layers)]
        for layer in made:  # the initial output is the target's own, for the token before
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.layers = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


@dataclass(frozen=True)
class BlockwiseTrainConfig:
    """One head for each of ``heads`` positions, with one hidden layer of ``intermediate`` units each."""

    heads: int = 4
    intermediate: int = 192

    def __post_init__(self) -> None:
        _at_least_one(self, "heads", "intermediate")


class BlockwiseHead(Head):
    """Blockwise parallel decoding (1811.03115): x + down(relu(up x)), before the target's vocabulary head."""

    def __init__(self, config: BlockwiseTrainConfig, teacher: Teacher) -> None:
        super().__init__()
        self.depths, self.intermediate = config.heads, config.intermediate
        self.heads = nn.ModuleList(_Residual(teacher.hidden, config.intermediate) for _ in range(config.heads))

    @classmethod
    def made(cls, config: BlockwiseTrainConfig, teacher: Teacher, counts: Tensor) -> BlockwiseHead:
        """Returns the untrained head."""
        return cls(config, teacher)

    def forward(self, lesson: Lesson) -> list[Tensor]:
        x = lesson.last()[:, : -self.depths].float()
        return [lesson.read(head(x)) for head in self.heads]

    def describe(self, teacher: Teacher) -> dict[str, Any]:
        return {
            "model_type": "foretoken_blockwise",
            "hidden_size": teacher.hidden,
            "vocab_size": teacher.vocab,
            "intermediate_size": self.intermediate,
            "num_heads": self.depths,
        }


class _Residual(nn.Module):
    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, intermediate)
        self.down = nn.Linear(intermediate, width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.relu(self.up(x)))
        return out


@dataclass(frozen=True)
class EarlyExitTrainConfig:
    """Exits the target before layer ``exit_layer``, None for after a quarter of its layers."""

    exit_layer: int | None = None

    def tapped(self, layers: int) -> int:
        """Returns the layer whose input is read."""
        layer = max(1, layers // 4) if self.exit_layer is None else self.exit_layer
        if not 0 < layer < layers:
            raise InvalidRequest(f"exit_layer {layer} for a target of {layers} layers; expected 1 to {layers - 1}")
        return layer


class EarlyExitHead(Head):
    """Early exit (LayerSkip, 2404.16710): n + A n of n = norm(hidden state), before the target's vocabulary head.

    It replaces the target's later layers, so depths differ only in their rows.
    """

    drawn = True

    def __init__(self, config: EarlyExitTrainConfig, teacher: Teacher, depths: int = 4) -> None:
        super().__init__()
        self.depths, self.exit_layer = depths, config.tapped(teacher.layers)
        self.taps = (self.exit_layer,)
        self.norm = RmsNorm(teacher.hidden, teacher.config.rms_norm_eps)
        self.adapter = nn.Linear(teacher.hidden, teacher.hidden, bias=False)
        nn.init.zeros_(self.adapter.weight)
        if (norm := teacher.final_norm()) is not None:
            with torch.no_grad():
                self.norm.weight.copy_(norm)

    @classmethod
    def made(cls, config: EarlyExitTrainConfig, teacher: Teacher, counts: Tensor) -> EarlyExitHead:
        """Returns the untrained head."""
        return cls(config, teacher)

    def forward(self, lesson: Lesson) -> list[Tensor]:
        n = self.norm(lesson.tapped(self.taps).float())
        logits = lesson.read(n + self.adapter(n))
        roots = lesson.ids.shape[1] - self.depths
        # Row i + 1 is for token i + 2. In training one depth suffices: the others are the same rows, shifted.
        depths = 1 if self.training else self.depths
        return [logits[:, 1 + depth : 1 + depth + roots] for depth in range(depths)]

    def describe(self, teacher: Teacher) -> dict[str, Any]:
        return {
            "model_type": "foretoken_early_exit",
            "hidden_size": teacher.hidden,
            "exit_layer": self.exit_layer,
        }

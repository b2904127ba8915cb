"""Heads that draft every position from one hidden state of the target: Medusa, blockwise, early exit."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.models.heads.layers import RmsNorm
from foretoken.train.config import BlockwiseTrainConfig, EarlyExitTrainConfig, MedusaTrainConfig
from foretoken.train.frozen_target import FrozenTarget, TrainBatch
from foretoken.train.head import Drafted, Head


class MedusaHead(Head):
    """Medusa (2401.10774): x + SiLU(W x + b) of the normed hidden state x, before the target's vocabulary head."""

    def __init__(self, config: MedusaTrainConfig, target: FrozenTarget, counts: Tensor) -> None:
        super().__init__()
        self.depths, self.layers = config.heads, config.layers
        self.blocks = nn.ModuleList(_Block(config.layers, target.hidden) for _ in range(config.heads))

    def forward(self, batch: TrainBatch) -> Drafted:
        x = batch.last()[:, : -self.depths].float()
        return Drafted([batch.logits(block(x)) for block in self.blocks])

    def describe(self, target: FrozenTarget) -> dict[str, Any]:
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": target.hidden,
            "vocab_size": target.vocab,
            "truncated_vocab_size": target.vocab,
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


class BlockwiseHead(Head):
    """Blockwise parallel decoding (1811.03115): x + down(relu(up x)), before the target's vocabulary head."""

    def __init__(self, config: BlockwiseTrainConfig, target: FrozenTarget, counts: Tensor) -> None:
        super().__init__()
        self.depths, self.intermediate = config.heads, config.intermediate
        self.heads = nn.ModuleList(_Residual(target.hidden, config.intermediate) for _ in range(config.heads))

    def forward(self, batch: TrainBatch) -> Drafted:
        x = batch.last()[:, : -self.depths].float()
        return Drafted([batch.logits(head(x)) for head in self.heads])

    def describe(self, target: FrozenTarget) -> dict[str, Any]:
        return {
            "model_type": "foretoken_blockwise",
            "hidden_size": target.hidden,
            "vocab_size": target.vocab,
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


class EarlyExitHead(Head):
    """Early exit (LayerSkip, 2404.16710): n + A n of n = norm(hidden state), before the target's vocabulary head.

    It replaces the target's later layers, so depths differ only in their rows.
    """

    samples = True

    def __init__(self, config: EarlyExitTrainConfig, target: FrozenTarget, counts: Tensor, depths: int = 4) -> None:
        super().__init__()
        self.depths, self.exit_layer = depths, config.tapped(target.layers)
        self.taps = (self.exit_layer,)
        self.norm = RmsNorm(target.hidden, target.config.rms_norm_eps)
        self.adapter = nn.Linear(target.hidden, target.hidden, bias=False)
        nn.init.zeros_(self.adapter.weight)
        if (norm := target.final_norm()) is not None:
            with torch.no_grad():
                self.norm.weight.copy_(norm)

    def forward(self, batch: TrainBatch) -> Drafted:
        n = self.norm(batch.tapped(self.taps).float())
        logits = batch.logits(n + self.adapter(n))
        roots = batch.ids.shape[1] - self.depths
        # Row i + 1 is for token i + 2. In training one depth suffices: the others are the same rows, shifted.
        depths = 1 if self.training else self.depths
        return Drafted([logits[:, 1 + depth : 1 + depth + roots] for depth in range(depths)])

    def describe(self, target: FrozenTarget) -> dict[str, Any]:
        return {
            "model_type": "foretoken_early_exit",
            "hidden_size": target.hidden,
            "exit_layer": self.exit_layer,
        }

"""``foretoken train hybrid``: trains a small hybrid mixture of experts from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from foretoken.train.files import write_json
from foretoken.train.hybrid.model import HybridModel
from foretoken.train.hybrid.shape import HybridShape
from foretoken.train.optimization import TrainConfig
from foretoken.train.target import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HYBRID_CONFIG = TrainConfig(minutes=120.0, batch=20, dropout=0.1)


class HybridRecipe(Recipe):
    """A small model of the layout of Qwen3.5's mixtures of experts, with an MTP layer."""

    command = "hybrid"
    role = "hybrid-target"
    usual = HybridShape()
    recordable = True

    def new(self, shape: HybridShape, tokenizer: PreTrainedTokenizerFast, config: TrainConfig) -> HybridModel:
        torch.manual_seed(config.seed)
        return HybridModel(shape.config(len(tokenizer), tokenizer.eos_token_id), config.dropout)

    def loss(self, model: HybridModel, ids: Tensor) -> Tensor:
        return model.loss(ids)

    def save(self, model: HybridModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        state = {name: t.detach().cpu().bfloat16().contiguous() for name, t in model.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / "config.json", model.config)
        tokenizer.save_pretrained(folder)


HYBRID = HybridRecipe()

"""``foretoken train hybrid``: the hybrid mixture of experts as it is trained from scratch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from foretoken.core.files import write_json
from foretoken.train.config import TrainConfig
from foretoken.train.hybrid.layers import HybridLayer, MtpBlock
from foretoken.train.layers import OffsetNorm
from foretoken.train.shapes import HybridShape
from foretoken.train.target import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BALANCE = 0.03
"""Weight of the loss that keeps all experts in use."""


class _Decoder(nn.Module):
    def __init__(self, shape: Any, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(HybridLayer(shape, kind, dropout) for kind in shape.layer_types)
        self.norm = OffsetNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, balances = self.embedded(ids), []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        return self.norm(x), torch.stack(balances).mean()

    def embedded(self, ids: Tensor) -> Tensor:
        """Returns embeddings [B, T, H]. The gradient of this selection, unlike an embedding's, waits for no device."""
        return self.embed_tokens.weight.index_select(0, ids.flatten()).unflatten(0, ids.shape)


class HybridModel(nn.Module):
    """A hybrid mixture of experts with tied embeddings and an MTP layer.

    Its state is the checkpoint of Qwen3_5MoeForCausalLM. The MTP layer learns beside the model, which it does not
    change.

    Args:
        config: Its config.json.
        dropout: Fraction of the outputs of mixers and MLPs that is dropped in training.
    """

    def __init__(self, config: dict[str, Any], dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        shape = SimpleNamespace(**config)
        self.model, self.mtp = _Decoder(shape, dropout), MtpBlock(shape)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits [B, T, V] of ids [B, T], and how unevenly their rows used the experts, 1 for evenly."""
        hidden, balance = self.model(ids)
        return F.linear(hidden, self.model.embed_tokens.weight), balance

    def loss(self, ids: Tensor) -> Tensor:
        """Returns the loss of ids [B, T] in nats a token; in training with those of the MTP layer and the experts."""
        hidden, balance = self.model(ids)
        loss = _cross_entropy(F.linear(hidden, self.model.embed_tokens.weight)[:, :-1], ids[:, 1:])
        if not self.training:
            return loss
        further, unevenly = self._further(ids, hidden)
        return loss + further + BALANCE * (balance + unevenly)

    def _further(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self.model.embed_tokens.weight.detach()
        hidden, balance = self.mtp(self.model.embedded(ids[:, 1:]).detach(), hidden[:, :-1].detach())
        return _cross_entropy(F.linear(hidden, embedding)[:, :-1], ids[:, 2:]), balance


def _cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def _new(shape: HybridShape, tokenizer: PreTrainedTokenizerFast, config: TrainConfig) -> HybridModel:
    torch.manual_seed(config.seed)
    return HybridModel(shape.config(len(tokenizer), tokenizer.eos_token_id), config.dropout)


def _save(model: HybridModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    state = {name: t.detach().cpu().bfloat16().contiguous() for name, t in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", model.config)
    tokenizer.save_pretrained(folder)


HYBRID = Recipe("hybrid", "hybrid-target", HybridShape(), _new, HybridModel.loss, _save, recordable=True)

"""The hybrid as it is trained."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.train.hybrid.layers import GatedAttention, GatedDeltaNet, OffsetNorm, SparseMlp

BALANCE = 0.03
"""Weight of the loss that keeps all experts in use."""


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any], kind: str, dropout: float) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = GatedAttention(config)
        self.mlp = SparseMlp(config)
        self.input_layernorm, self.post_attention_layernorm = OffsetNorm(hidden, eps), OffsetNorm(hidden, eps)
        self._dropout, self._mixer = dropout, "linear_attn" if kind == "linear_attention" else "self_attn"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self._dropped(getattr(self, self._mixer)(_narrowed(self.input_layernorm(x))))
        added, balance = self.mlp(_narrowed(self.post_attention_layernorm(x)))
        return x + self._dropped(added), balance

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self._dropout, self.training)


def _narrowed(x: Tensor) -> Tensor:
    """Returns x in the dtype in which its many readers multiply it, so that it is converted once."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class _Decoder(nn.Module):
    def __init__(self, config: dict[str, Any], dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(_Layer(config, kind, dropout) for kind in config["layer_types"])
        self.norm = OffsetNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, balances = self.embedded(ids), []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        return self.norm(x), torch.stack(balances).mean()

    def embedded(self, ids: Tensor) -> Tensor:
        """Returns embeddings [B, T, H]. The gradient of this selection, unlike an embedding's, waits for no device."""
        return self.embed_tokens.weight.index_select(0, ids.flatten()).unflatten(0, ids.shape)


class _Mtp(nn.Module):
    """A layer that predicts token i + 2 from the state at row i and the embedding of token i + 1 (2412.19437)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = OffsetNorm(hidden, eps), OffsetNorm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([_Layer(config, "full_attention", 0.0)])
        self.norm = OffsetNorm(hidden, eps)

    def forward(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1)
        x, balance = self.layers[0](self.fc(both))
        return self.norm(x), balance


class HybridModel(nn.Module):
    """A hybrid mixture of experts with tied embeddings and an MTP layer.

    Its state is the checkpoint of Qwen3_5MoeForCausalLM. The MTP layer learns beside the model, which it does not
    change.

    Args:
        config: Its config.json.
        dropout: Share of the outputs of mixers and MLPs that is dropped in training.
    """

    def __init__(self, config: dict[str, Any], dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model, self.mtp = _Decoder(config, dropout), _Mtp(config)
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

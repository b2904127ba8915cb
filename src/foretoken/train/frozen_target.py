"""A frozen target in transformers, and batches of its text with its hidden states there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import InvalidRequest, ModelLoadError, reason_of
from foretoken.models.formats.checkpoint import quiet_transformers
from foretoken.train.optimization import compiled


class FrozenTarget:
    """A frozen target: hidden states by layer, embeddings, vocabulary head.

    Raises:
        ModelLoadError: The checkpoint cannot be loaded.
        InvalidRequest: The logits are not the vocabulary head's product with the last normed hidden state, up to a soft
            cap.
    """

    def __init__(self, path: Path, device: torch.device, compile_model: bool | None = False) -> None:
        from transformers import AutoModelForCausalLM

        try:
            with quiet_transformers():
                self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, use_safetensors=True)
        except Exception as error:  # transformers raises many kinds
            raise ModelLoadError(
                f"cannot load the target {path}: {reason_of(error)}; pass the folder of a checkpoint"
            ) from error
        self.model.to(device).eval().requires_grad_(False)
        self.path, self.device = path, device
        self.config: Any = self.model.config.get_text_config()
        self.hidden, self.layers = int(self.config.hidden_size), int(self.config.num_hidden_layers)
        self.vocab = int(self.head.shape[0])
        self.softcap: float = getattr(self.config, "final_logit_softcapping", None) or 0.0
        self._base: Callable[..., Any] = self.model.base_model
        self._check()
        self._base = compiled(self.model.base_model, compile_model)

    def adopt(self, model: Any) -> None:
        """Replaces the model by another of the same shape."""
        self.model, self._base = model, model.base_model

    @property
    def embeddings(self) -> Tensor:
        """Input embeddings, [V, H]."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Tensor:
        """Vocabulary head, [V, H]."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def layer(self, number: int) -> nn.Module | None:
        """Returns a decoder layer, -1 the last; None if the model has no such layer."""
        layers = getattr(self.model.base_model, "layers", None)
        return layers[number] if layers is not None and -len(layers) <= number < len(layers) else None

    def final_norm(self) -> Tensor | None:
        """Returns the weight of the norm before the vocabulary head, None if the model has no ``norm``."""
        return getattr(getattr(self.model.base_model, "norm", None), "weight", None)

    @torch.no_grad()
    def states(self, ids: Tensor, layers: Sequence[int]) -> Tensor:
        """Returns hidden states [B, T, layers, H] of ids [B, T].

        Index i of ``layers`` is the input of layer i. The last one is the output after the norm.
        """
        output = self._base(ids.to(self.device), use_cache=False, output_hidden_states=True)
        return torch.stack([output.hidden_states[layer] for layer in layers], dim=2)

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Returns logits [B, T, V] of ids [B, T]."""
        logits: Tensor = self.model(ids.to(self.device), use_cache=False).logits
        return logits

    def batch(self, ids: Tensor, states: Tensor, layers: tuple[int, ...]) -> TrainBatch:
        """Returns a training batch of this target."""
        return TrainBatch(ids, states, layers, self.embeddings, self.head, self.softcap)

    def _check(self) -> None:
        ids = torch.arange(min(8, self.vocab), device=self.device)[None]
        expected = self.logits(ids).float()
        computed = self.batch(ids, self.states(ids, [self.layers]), (self.layers,)).target_logits().float()
        if (expected - computed).abs().max() > 0.05 * expected.abs().max() + 1e-3:
            raise InvalidRequest(
                f"{self.path} scales or changes its logits in a way that heads here do not follow; "
                "train heads for a model of the Llama family"
            )


@dataclass(frozen=True)
class TrainBatch:
    """Windows of text and the target's hidden states there.

    Args:
        ids: Token ids, int64 [B, T].
        states: Hidden states, [B, T, len(layers), H] in the order of ``layers``, the normed output last.
        layers: Indices of the hidden states.
        embeddings: The target's, [V, H].
        head: The target's vocabulary head, [V, H].
        softcap: Soft cap of its logits as in Gemma 2, 0 for none.
    """

    ids: Tensor
    states: Tensor
    layers: tuple[int, ...]
    embeddings: Tensor
    head: Tensor
    softcap: float = 0.0

    def tapped(self, taps: Sequence[int]) -> Tensor:
        """Returns the concatenated hidden states of ``taps``, [B, T, len(taps) * H]."""
        return torch.cat([self.states[:, :, self.layers.index(tap)] for tap in taps], dim=-1)

    def last(self) -> Tensor:
        """Returns the normed output, [B, T, H]."""
        return self.states[:, :, -1]

    def embedded(self) -> Tensor:
        """Returns the embeddings of the tokens, [B, T, H]."""
        return F.embedding(self.ids, self.embeddings)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., V] of the target's vocabulary head for ``hidden`` [..., H]."""
        logits = F.linear(hidden, self.head.to(hidden.dtype))
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def target_logits(self) -> Tensor:
        """Returns the target's logits after each token, [B, T, V]."""
        return self.logits(self.last())

    @torch.no_grad()
    def target_probs(self) -> Tensor:
        """Returns the target's distribution after each token, float32 [B, T, V]."""
        return self.target_logits().float().softmax(-1)

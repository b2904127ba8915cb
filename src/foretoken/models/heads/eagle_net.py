"""An EAGLE head on our runtime (2401.15077, 2503.01840): a decoder layer on features, with its own KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.quantize import Quantizer
from foretoken.models.formats.weights import Ends, Entry, NormWeight
from foretoken.models.heads.eagle import MASK, EagleHead
from foretoken.models.heads.feature_net import FeatureNet
from foretoken.models.heads.weights import HeadProduct, layer_weights, norm_weight, without_matrices
from foretoken.models.runners.choose import build_runner


class EagleNet(FeatureNet):
    """The network of an EAGLE head.

    Args:
        embedding: the head's own or the target's, [V, H].
        max_length: maximum length of a sequence in tokens, drafts included.
        unembed: the target's vocabulary head, for heads without their own.
        quantizer: quantizes the matrices; None leaves them in ``dtype``.
        window: number of tokens that attention sees at most; None for the head's own window.
    """

    def __init__(
        self,
        head: EagleHead,
        embedding: Tensor,
        dtype: torch.dtype,
        device: torch.device,
        max_length: int,
        unembed: Callable[[Tensor], Tensor] | None = None,
        quantizer: Quantizer | None = None,
        window: int | None = None,
    ) -> None:
        self.head, self.joined, self.dtype, self.device = head, head.version == 3, dtype, device
        fc, bias = head.tensors["fc.weight"].to(device, dtype), head.tensors.get("fc.bias")
        self._fc = HeadProduct(fc, bias, device, dtype)
        self._norms = [head.tensors[name].to(device, torch.float32) for name in self._norm_names()]
        self._embedding, self._unembed_target, self._quantizer = embedding.to(dtype), unembed, quantizer
        self._window = window
        vocabulary = head.tensors.get("lm_head.weight", torch.zeros(1, head.hidden))  # zeros: unused
        config = {**head.layer, "model_type": "llama", "vocab_size": vocabulary.shape[0]}
        config |= {"num_hidden_layers": head.layers, "max_position_embeddings": max_length}
        architecture = Architecture.of(config).windowed(head.window).windowed(window)
        self._eps = architecture.eps
        state = head.layers if head.norm_output else head.layers + 1
        layers = [layer_weights(head.tensors, i, dtype, quantizer) for i in range(head.layers)]
        quantized = vocabulary.to(dtype) if quantizer is None else quantizer(vocabulary)
        norm = self._norm("norm") if self.joined or head.norm_output else None
        ends = Ends(self._embedding, norm, quantized)
        entry = Entry(self.joined, self._norm("layers.0.hidden_norm"), head.norm_before_residual)
        if self.joined and not self._norms:  # features are the product alone, so passes may compute them
            layers_read = fc.shape[1] // head.target_hidden
            entry = replace(entry, fusion=fc, fusion_bias=bias, fused_layers=layers_read)
        if not self.joined:
            entry = replace(entry, fusion=fc, fusion_bias=bias, fused_layers=2, fuses_embedding=True)
        runner = build_runner(architecture, layers, ends, dtype, device, entry)
        borrowed = None if unembed is None or "lm_head.weight" in head.tensors else (unembed, state)
        super().__init__(runner, state, head.vocab, max_length, borrowed)
        self._draft_from(head.ids(), chained=self.joined or runner.fuses)
        self.head = replace(head, tensors=without_matrices(head.tensors))

    @property
    def embedding(self) -> Tensor:
        """The embedding of the target's tokens, [V, H]."""
        return self._embedding

    def like(self, head: EagleHead) -> EagleNet:
        """Returns the network of another version of the head, on the same device and in the same dtype."""
        shared = self._unembed_target, self._quantizer, self._window
        return EagleNet(head, self._embedding, self.dtype, self.device, self.max_length, *shared)

    # features

    def mask_feature(self) -> Tensor:
        """Returns the features [1, H] of a mask token, in a head that has one."""
        return self.features(self.head.tensors[MASK][None].to(self.device, self.dtype))

    def features(self, taps: Tensor) -> Tensor:
        if not self.joined:
            return taps
        if self.head.norm_before_fc:
            taps = self._normalize(taps, self._norms[0])
        if self.head.fc_norm:
            norms = self._norms[-(taps.shape[-1] // self.head.target_hidden) :]
            parts = taps.split(self.head.target_hidden, dim=-1)
            taps = torch.cat([self._normalize(p, w) for p, w in zip(parts, norms, strict=True)], dim=-1)
        return self._multiply(taps)

    def _entering(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        if self.joined:
            return features
        ids = torch.tensor(tokens, device=self._embedding.device)
        embedded = F.embedding(ids, self._embedding).to(self.device)
        return self._multiply(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))

    def _multiply(self, x: Tensor) -> Tensor:
        return self._fc(x.to(self.device, self.dtype))

    # weights

    def _norm(self, name: str) -> NormWeight | None:
        return norm_weight(self.head.tensors, name)

    def _norm_names(self) -> list[str]:
        count = self.head.tensors["fc.weight"].shape[-1] // self.head.target_hidden
        before = ["input_norm.weight"] if self.head.norm_before_fc else []
        return before + ([f"fc_norm.{i}.weight" for i in range(count)] if self.head.fc_norm else [])

    def _normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, self._eps).to(x.dtype)

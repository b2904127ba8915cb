"""A multi-token-prediction layer on our runtime (2412.19437, section 2.2), with its own KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.formats.weights import Ends, Entry, NormWeight
from foretoken.models.heads.feature_net import FeatureNet
from foretoken.models.heads.mtp import MtpLayer
from foretoken.models.heads.weights import HeadProduct
from foretoken.models.runners.choose import build_runner

_NORMED, _PLAIN = 1, 2  # taps of a runner of one layer


class MtpNet(FeatureNet):
    """The network of one MTP layer.

    Args:
        embedding: the target's embedding, [V, H].
        unembed: the target's vocabulary head.
        max_length: maximum length of a sequence in tokens, drafts included.
        normed: whether children read the layer's output after its last norm; otherwise before it.
        window: number of tokens that attention sees at most; None for the layer's own window.
    """

    def __init__(
        self,
        layer: MtpLayer,
        embedding: Tensor,
        unembed: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        device: torch.device,
        max_length: int,
        normed: bool = True,
        window: int | None = None,
    ) -> None:
        self.hidden = layer.architecture.hidden
        self._device, self._dtype, self._eps = device, dtype, layer.architecture.eps
        self._embedding = embedding
        self._norms = layer.embedding_norm.to(device), layer.hidden_norm.to(device)
        architecture = replace(layer.architecture, embedding_scale=1.0).windowed(window)
        unused = torch.zeros(1, architecture.hidden, dtype=dtype)
        ends = Ends(embedding.to(dtype), layer.norm, unused)
        norms = NormWeight(layer.embedding_norm), NormWeight(layer.hidden_norm)
        entry = Entry(fusion=layer.projection.to(dtype), fused_layers=2, fuses_embedding=True, fusion_norms=norms)
        runner = build_runner(architecture, [layer.weights], ends, dtype, device, entry)
        self._projection = None if runner.fuses else HeadProduct(layer.projection, None, device, dtype)
        state = _NORMED if normed else _PLAIN
        super().__init__(runner, state, embedding.shape[0], max_length, (unembed, _NORMED))
        self._draft_from(torch.arange(self.vocab_size), chained=runner.fuses)

    @property
    def normed(self) -> bool:
        return self._state == _NORMED

    @normed.setter
    def normed(self, normed: bool) -> None:
        self._state = _NORMED if normed else _PLAIN

    def features(self, taps: Tensor) -> Tensor:
        return taps

    def _entering(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        assert self._projection is not None
        embedded = F.embedding(torch.tensor(tokens, device=self._embedding.device), self._embedding).to(self._device)
        parts = zip((embedded, features.to(self._device)), self._norms, strict=True)
        rows = torch.cat([F.rms_norm(x.float(), w.shape, w, self._eps).to(self._dtype) for x, w in parts], dim=-1)
        return self._projection(rows)

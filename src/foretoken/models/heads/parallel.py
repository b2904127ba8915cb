"""Networks that predict several tokens from one hidden state: Medusa and blockwise heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.devices import on_host
from foretoken.models.heads.blockwise import BlockwiseHeads
from foretoken.models.heads.medusa import MedusaHeads
from foretoken.models.heads.weights import HeadProduct

Unembed = Callable[[Tensor], Tensor]
"""The target's vocabulary head: normed states [rows, H] -> float32 [rows, V]."""


class ParallelNet(Protocol):
    """Predicts the tokens at the next ``depth`` positions."""

    depth: int

    def __call__(self, x: Tensor) -> Tensor:
        """Returns logits [rows, depth, V]; -inf for tokens outside a head's vocabulary.

        Args:
            x: the target's normed last states [rows, H].
        """


class MedusaNet:
    """x <- x + SiLU(W x + b) for each head, then its vocabulary head (2401.10774).

    The first layers of all heads are one product.
    """

    def __init__(self, heads: MedusaHeads, dtype: torch.dtype, device: torch.device, unembed: Unembed) -> None:
        self.depth, self._heads, self._dtype, self._device = heads.depth, heads, dtype, device
        first = [block[0] for block in heads.blocks]
        biases = [b if b is not None else w.new_zeros(heads.hidden) for w, b in first]
        self._first = HeadProduct(torch.cat([w for w, _ in first]), torch.cat(biases), device, dtype)
        self._later = [[HeadProduct(w, b, device, dtype) for w, b in block[1:]] for block in heads.blocks]
        self._own = [HeadProduct(matrix, None, device, dtype) for matrix in heads.vocabulary]
        self._unembed = unembed
        self._tokens = heads.tokens

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(self._device, self._dtype)
        states = rows[:, None] + F.silu(self._first(rows).view(len(rows), self.depth, -1))
        for i, layers in enumerate(self._later):
            for layer in layers:
                states[:, i] += F.silu(layer(states[:, i].contiguous()))
        if len(self._own) == self.depth:
            logits = torch.stack([m(states[:, i].contiguous()) for i, m in enumerate(self._own)], dim=1)
        else:
            shared = self._unembed if not self._own else lambda flat: self._own[0](flat)
            logits = shared(states.flatten(0, 1).contiguous()).view(len(rows), self.depth, -1)
        return self._spread(on_host(logits.float()))

    def _spread(self, logits: Tensor) -> Tensor:
        if self._tokens is None:
            return logits
        spread = logits.new_full((*logits.shape[:2], self._heads.vocab), -torch.inf)
        spread[..., self._tokens] = logits
        return spread


class BlockwiseNet:
    """x + down(relu(up x)) for each head, then the target's vocabulary head (1811.03115).

    The up-projections of all heads are one product.
    """

    def __init__(self, heads: BlockwiseHeads, dtype: torch.dtype, device: torch.device, unembed: Unembed) -> None:
        self.depth, self._dtype, self._device, self._unembed = heads.depth, dtype, device, unembed
        up, bias = torch.cat([head.up for head in heads.heads]), torch.cat([head.up_bias for head in heads.heads])
        self._up = HeadProduct(up, bias, device, dtype)
        self._down = [HeadProduct(head.down, head.down_bias, device, dtype) for head in heads.heads]

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(self._device, self._dtype)
        inner = F.relu(self._up(rows)).view(len(rows), self.depth, -1)
        added = torch.stack([down(inner[:, i].contiguous()) for i, down in enumerate(self._down)], dim=1)
        return self._unembed((rows[:, None] + added).flatten(0, 1)).view(len(rows), self.depth, -1)

"""Latent attention on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.families.latent import LatentAttention
from foretoken.models.formats.experts import MatrixStack
from foretoken.models.formats.latent import LatentWeights
from foretoken.models.formats.quantize import stacked
from foretoken.models.runners.attention import Geometry, attend
from foretoken.models.runners.functional import rotate
from foretoken.models.runners.linear import Product, moved, product


@dataclass(frozen=True, slots=True, eq=False)
class TorchLatent:
    """The weights of a layer's latent attention on the device. Each head has products of its own.

    The cache has latents and rotary keys twice, as keys and as values.
    """

    sizes: LatentAttention
    into: Product
    query_norm: Tensor | None
    query_up: Product | None
    latent_norm: Tensor
    absorb: tuple[Product, ...]
    expand: tuple[Product, ...]
    out: Product

    @staticmethod
    def of(device: torch.device, w: LatentWeights, sizes: LatentAttention) -> TorchLatent:
        """Packs the weights for ``device``."""

        def products(stack: MatrixStack) -> tuple[Product, ...]:
            return tuple(product(stacked(stack.read(head)).to(device)) for head in range(stack.count))

        return TorchLatent(
            sizes=sizes,
            into=product(stacked(w.into).to(device), moved(w.into_bias, device)),
            query_norm=moved(w.query_norm, device),
            query_up=None if w.query_up is None else product(w.query_up.to(device)),
            latent_norm=w.latent_norm.to(device),
            absorb=products(w.absorb),
            expand=products(w.expand),
            out=product(w.out.to(device), moved(w.out_bias, device)),
        )

    def __call__(
        self,
        a: Architecture,
        number: int,
        x: Tensor,
        turns: Sequence[tuple[Tensor, Tensor]],
        g: Geometry,
        alone: bool,
    ) -> Tensor:
        """Returns what layer ``number``'s attention computes of the normed rows ``x`` [R, H]."""
        s, layer = self.sizes, a.stack[number]
        first = self.into(x, alone)
        queries, latents, keys = first.split((first.shape[1] - s.rank - s.rotated, s.rank, s.rotated), dim=1)
        if self.query_up is not None and self.query_norm is not None:
            queries = self.query_up(self._normed(queries, self.query_norm), alone)
        plain, rotated = queries.unflatten(1, (a.heads, -1)).split((s.plain, s.rotated), dim=2)
        absorbed = torch.stack([of(plain[:, head].contiguous(), alone) for head, of in enumerate(self.absorb)], dim=1)
        latents = self._normed(latents, self.latent_norm)
        rotated = torch.cat((rotated, keys[:, None]), dim=1)
        if layer.rope >= 0:
            rotated = rotate(rotated, *turns[layer.rope], a.paired)
        queries_keys = torch.cat((torch.cat((absorbed, latents[:, None]), dim=1), rotated), dim=2)
        values = queries_keys[:, a.heads :]
        mixed = attend(number, queries_keys, values, g, a, g.masks[layer.view])
        mixed = mixed.unflatten(1, (a.heads, -1))[..., : s.rank]
        heads = [of(mixed[:, head].contiguous(), alone) for head, of in enumerate(self.expand)]
        return self.out(torch.cat(heads, dim=1), alone)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, self.sizes.eps).to(x.dtype)

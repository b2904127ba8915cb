"""Latent attention on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.families.latent import LatentAttention
from foretoken.models.formats.experts import MatrixStack
from foretoken.models.formats.latent import LatentWeights
from foretoken.models.formats.quantize import stacked
from foretoken.models.runners.functional import rotate
from foretoken.models.runners.layout import Layout
from foretoken.models.runners.linear import Product, by_fixed_rows, moved, product
from foretoken.models.runners.triton_kernels import has_kernels, kernels

# the products of all heads: x [R, heads, in] and ``any_kernel`` -> [R, heads, out]
ByHead = Callable[[Tensor, bool], Tensor]


def by_head(stack: MatrixStack, device: torch.device) -> ByHead:
    """Packs a matrix for each head. On CUDA matrices of floats are one tensor, multiplied at once."""
    read = [stacked(stack.read(head)) for head in range(stack.count)]
    matrices = [matrix for matrix in read if isinstance(matrix, Tensor)]
    if has_kernels(device) and len(matrices) == len(read):
        joined = torch.stack([matrix.to(device) for matrix in matrices]).transpose(1, 2)  # [heads, in, out]
        return lambda x, _: by_fixed_rows(partial(_multiply, joined), x.flatten(1)).unflatten(1, (len(joined), -1))
    products = [product(matrix.to(device)) for matrix in read]
    return lambda x, any_kernel: torch.stack(
        [multiply(x[:, head].contiguous(), any_kernel) for head, multiply in enumerate(products)], dim=1
    )


def _multiply(matrices: Tensor, x: Tensor) -> Tensor:
    """Returns the products of all heads for x [R, heads * in], [R, heads * out]."""
    return torch.bmm(x.unflatten(1, (len(matrices), -1)).transpose(0, 1), matrices).transpose(0, 1).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class TorchLatent:
    """The weights of a layer's latent attention on the device. Each head has separate products.

    Latents and rotary keys are cached twice, as keys and as values.
    """

    sizes: LatentAttention
    into: Product
    query_norm: Tensor | None
    query_up: Product | None
    latent_norm: Tensor
    absorb: ByHead
    expand: ByHead
    out: Product

    @staticmethod
    def of(device: torch.device, w: LatentWeights, sizes: LatentAttention) -> TorchLatent:
        return TorchLatent(
            sizes=sizes,
            into=product(stacked(w.into).to(device), moved(w.into_bias, device)),
            query_norm=moved(w.query_norm, device),
            query_up=None if w.query_up is None else product(w.query_up.to(device)),
            latent_norm=w.latent_norm.to(device),
            absorb=by_head(w.absorb, device),
            expand=by_head(w.expand, device),
            out=product(w.out.to(device), moved(w.out_bias, device)),
        )

    def __call__(
        self,
        a: Architecture,
        number: int,
        x: Tensor,
        turns: Sequence[tuple[Tensor, Tensor]],
        g: Layout,
        any_kernel: bool,
    ) -> Tensor:
        """Returns the output of layer ``number``'s attention for the normed rows ``x`` [R, H]."""
        s, layer = self.sizes, a.stack[number]
        first = self.into(x, any_kernel)
        queries, latents, keys = first.split((first.shape[1] - s.rank - s.rotated, s.rank, s.rotated), dim=1)
        if self.query_up is not None and self.query_norm is not None:
            queries = self.query_up(self._normed(queries, self.query_norm), any_kernel)
        plain, rotated = queries.unflatten(1, (a.heads, -1)).split((s.plain, s.rotated), dim=2)
        absorbed = self.absorb(plain, any_kernel)
        latents = self._normed(latents, self.latent_norm)
        rotated = torch.cat((rotated, keys[:, None]), dim=1)
        if layer.rope >= 0:
            rotated = rotate(rotated, *turns[layer.rope], a.paired)
        queries_keys = torch.cat((torch.cat((absorbed, latents[:, None]), dim=1), rotated), dim=2)
        values = queries_keys[:, a.heads :]
        mixed = g.attend(number, queries_keys, values, a, layer.view)
        mixed = mixed.unflatten(1, (a.heads, -1))[..., : s.rank]
        return self.out(self.expand(mixed, any_kernel).flatten(1), any_kernel)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        if has_kernels(x.device):
            normed: Tensor = kernels().rms_norm(x, weight, self.sizes.eps)
            return normed
        return F.rms_norm(x.float(), weight.shape, weight, self.sizes.eps).to(x.dtype)

"""Latent attention on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.weights import NormWeight
from foretoken.models.runners.functional import rotate
from foretoken.models.runners.layout import AttentionSizes, Layout
from foretoken.models.runners.torch_layers import TorchLatent
from foretoken.models.runners.triton_kernels import has_kernels, kernels


def attend_latents(
    a: Architecture,
    number: int,
    w: TorchLatent,
    x: Tensor,
    turns: Sequence[tuple[Tensor, Tensor]],
    g: Layout,
    any_kernel: bool,
) -> Tensor:
    """Returns the output of layer ``number``'s attention for the normed rows ``x`` [R, H].

    Each head has separate products. Latents and rotary keys are cached twice, as keys and as values.
    """
    s, layer = a.latent, a.stack[number]
    assert s is not None
    first = w.into(x, any_kernel)
    queries, latents, keys = first.split((first.shape[1] - s.rank - s.rotated, s.rank, s.rotated), dim=1)
    if w.query_up is not None and w.query_norm is not None:
        queries = w.query_up(_normed(queries, w.query_norm, s.eps), any_kernel)
    plain, rotated = queries.unflatten(1, (a.heads, -1)).split((s.plain, s.rotated), dim=2)
    absorbed = w.absorb.by_head(plain, any_kernel)
    latents = _normed(latents, w.latent_norm, s.eps)
    rotated = torch.cat((rotated, keys[:, None]), dim=1)
    if layer.rope >= 0:
        rotated = rotate(rotated, *turns[layer.rope], a.paired)
    queries_keys = torch.cat((torch.cat((absorbed, latents[:, None]), dim=1), rotated), dim=2)
    mixed = g.attend(number, queries_keys, queries_keys[:, a.heads :], AttentionSizes.of(a, layer), layer.view)
    mixed = mixed.unflatten(1, (a.heads, -1))[..., : s.rank]
    return w.out(w.expand.by_head(mixed, any_kernel).flatten(1), any_kernel)


def _normed(x: Tensor, norm: NormWeight, eps: float) -> Tensor:
    if has_kernels(x.device):
        normed: Tensor = kernels().rms_norm(x, norm.weight, eps)
        return normed
    return F.rms_norm(x.float(), norm.weight.shape, norm.weight, eps).to(x.dtype)

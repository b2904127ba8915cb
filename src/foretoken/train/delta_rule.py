"""Gated DeltaNet in training (2412.06464): its short convolution, and the delta rule over chunks (section 3.3)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # rows of a chunk


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        taps = weight.shape[-1]
        return _convolved(F.pad(x, (0, 0, taps - 1, 0)), weight.unbind(-1), x.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (gradient,), length, taps = gradients, x.shape[1], weight.shape[-1]
        x_gradient = _convolved(F.pad(gradient, (0, 0, 0, taps - 1)), weight.flip(-1).unbind(-1), length)
        padded = F.pad(x, (0, 0, taps - 1, 0))
        weight_gradient = [(padded[:, tap : tap + length] * gradient).sum((0, 1)) for tap in range(taps)]
        return x_gradient.to(x.dtype), torch.stack(weight_gradient, dim=-1)


def _convolved(padded: Tensor, taps: tuple[Tensor, ...], length: int) -> Tensor:
    out = padded[:, :length] * taps[0]
    for tap in range(1, len(taps)):
        out = torch.addcmul(out, padded[:, tap : tap + length].to(out.dtype), taps[tap])
    return out


def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Returns rows [B, T, C], each the sum of x's rows up to it times their taps [C, 1, taps], the own row's last."""
    out: Tensor = _ShortConvolution.apply(x, weight[:, 0])
    return out


class _UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower triangular A [..., C, C], where C is a power of two.

    The inverses of the diagonal blocks of a size give those of twice the size: [[P, 0], [L, Q]]^-1 is
    [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]. Few large multiplications instead of a substitution row by row.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        size, block = a.shape[-1], 1
        index = torch.arange(size, device=a.device)
        apart = index[:, None] ^ index
        inverse = torch.eye(size, device=a.device, dtype=a.dtype).expand_as(a)
        while block < size:
            below = a * (apart // block == 1)  # the blocks L: rows and columns are of two blocks that make one
            inverse = inverse - inverse @ below @ inverse
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.mT
        return -(turned @ gradients[0] @ turned).tril(-1)


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Returns (I + A)^-1 of strictly lower triangular A [..., C, C], where C is a power of two."""
    out: Tensor = _UnitLowerInverse.apply(a)
    return out


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """Returns the outputs [B, T, heads, Dv], float32, of S <- exp(g) S; S <- S + beta k (v - k^T S); q^T S / sqrt(Dk).

    Args:
        q: Queries [B, T, heads, Dk]. They and the keys are normalized here.
        k: Keys [B, T, heads, Dk].
        v: Values [B, T, heads, Dv].
        g: Logarithms of decays [B, T, heads], not positive.
        beta: Fractions of a row that the state takes [B, T, heads].
        chunk: Rows of a chunk, a power of two.
    """
    length = v.shape[1]
    chunk = min(chunk, 1 << (length - 1).bit_length())
    pad = -length % chunk

    def chunked(x: Tensor) -> Tensor:
        x = F.pad(x.float(), (0, 0) * (x.ndim - 2) + (0, pad)).transpose(1, 2)
        return x.unflatten(2, (-1, chunk)).contiguous()  # [B, heads, chunks, chunk, ...]

    q, k, v, g, beta = (chunked(x) for x in (q, k, v, g, beta))
    with torch.autocast(q.device.type, enabled=False):
        return _of_chunks(_unit(q) / math.sqrt(q.shape[-1]), _unit(k), v, g, beta[..., None])[:, :length]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _of_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    total = g.cumsum(-1)  # of the chunk up to each row
    causal = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -math.inf).exp()
    inner = (q @ k.mT) * decay
    grown = total[..., None].exp()
    # A row's value, less the value for its key in its chunk's earlier rows and in the state before the chunk.
    solved = unit_lower_inverse(((beta * k) @ k.mT * decay).tril(-1)) * beta.mT
    fresh, held = solved @ v, solved @ (k * grown)
    kept = (k * (total[..., -1:] - total).exp()[..., None]).mT  # each row's weight in the state after the chunk
    last = grown[..., -1:, :]
    step = last * torch.eye(k.shape[-1], device=k.device) - kept @ held
    written = kept @ fresh
    states = [torch.zeros(*q.shape[:2], k.shape[-1], v.shape[-1], device=q.device)]
    for kept_of_state, added in zip(step.unbind(2), written.unbind(2), strict=True):
        states.append(kept_of_state @ states[-1] + added)
    before = torch.stack(states[:-1], dim=2)
    out = (q * grown) @ before + inner @ (fresh - held @ before)
    return out.flatten(2, 3).transpose(1, 2)

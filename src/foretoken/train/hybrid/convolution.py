"""The short convolution of recurrent layers, as shifted rows times their taps.

On a GPU that takes a fraction of the time of a convolution with one channel a group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        taps = weight.shape[-1]
        return _taken(F.pad(x, (0, 0, taps - 1, 0)), weight.unbind(-1), x.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (gradient,), length, taps = gradients, x.shape[1], weight.shape[-1]
        of_x = _taken(F.pad(gradient, (0, 0, 0, taps - 1)), weight.flip(-1).unbind(-1), length)
        padded = F.pad(x, (0, 0, taps - 1, 0))
        of_weight = [(padded[:, tap : tap + length] * gradient).sum((0, 1)) for tap in range(taps)]
        return of_x.to(x.dtype), torch.stack(of_weight, dim=-1)


def _taken(padded: Tensor, taps: tuple[Tensor, ...], length: int) -> Tensor:
    out = padded[:, :length] * taps[0]
    for tap in range(1, len(taps)):
        out = torch.addcmul(out, padded[:, tap : tap + length].to(out.dtype), taps[tap])
    return out


def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Returns rows [B, T, C], each the sum of x's rows up to it times their taps [C, 1, taps], the own row's last."""
    out: Tensor = _ShortConvolution.apply(x, weight[:, 0])
    return out

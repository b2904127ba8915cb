"""The operations between the products of a decoder, on torch tensors."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.families.config import Activation
from foretoken.models.formats.weights import NormWeight
from foretoken.models.runners.triton_kernels import has_kernels, kernels


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": _relu2,
}


def normalize(a: Architecture, x: Tensor, norm: NormWeight | None) -> Tensor:
    """Returns the norm over the last dimension, computed in float32 and rounded once; x without a norm.

    The weight is [n], or [..., n] with one for each head.
    """
    if norm is None:
        return x
    weight = norm.weight
    if not a.centered and weight.ndim == 1 and norm.bias is None and has_kernels(x.device):
        return kernels().rms_norm(x, weight, a.eps)
    if a.centered:
        normed = F.layer_norm(x.float(), weight.shape[-1:], eps=a.eps) * weight
    elif weight.ndim > 1:
        normed = F.rms_norm(x.float(), weight.shape[-1:], eps=a.eps) * weight
    else:
        normed = F.rms_norm(x.float(), weight.shape, weight, a.eps)
    return (normed if norm.bias is None else normed + norm.bias).to(x.dtype)


def activate(a: Architecture, x: Tensor, gated: bool) -> Tensor:
    """Returns the input of an MLP's last matrix.

    Args:
        x: gate and up side by side if the MLP is gated, otherwise up alone.
        gated: whether the MLP is gated.
    """
    function = _ACTIVATIONS[a.activation]
    if not gated:
        return function(x)
    if function is F.silu and a.gate_factor == 1.0 and has_kernels(x.device):
        return kernels().silu_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return function(gate if a.gate_factor == 1.0 else gate * a.gate_factor) * up


def clamped_gate(x: Tensor, limit: float, slope: float) -> Tensor:
    """Returns gpt-oss's activation: (up + 1) * gate * sigmoid(slope * gate), both within a limit.

    Args:
        x: gate and up side by side.
        limit: bound of up on both sides, and of gate above.
        slope: factor of the gate in the sigmoid.
    """
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(slope * gate)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, paired: bool = False) -> Tensor:
    """Applies the rotary embedding to the first elements of each head.

    Args:
        x: [..., head_dim].
        cos: cosines, broadcast to [..., rotated elements]: equal halves, or equal pairs.
        sin: sines, with the sign of the pair's other element.
        paired: whether elements 2i and 2i + 1 are rotated together; otherwise i and i + half.
    """
    if x.ndim == 3 and has_kernels(x.device):
        return kernels().rotate_heads(x, cos, sin, paired)
    rotated, unrotated = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
    if paired:
        other = rotated.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        other = rotated.roll(rotated.shape[-1] // 2, dims=-1)
    turned = rotated * cos + other * sin
    return turned if not unrotated.shape[-1] else torch.cat((turned, unrotated), dim=-1)


def rotary_table(a: Architecture, number: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosines and signed sines for ``rotate``, float32 [positions, rotated elements]."""
    angles = torch.outer(positions.float(), a.frequencies[number])
    scale = a.rotary_scales[number] if a.rotary_scales else 1.0
    cos, sin = angles.cos() * scale, angles.sin() * scale
    if a.paired:
        return torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def ranked(logits: Tensor, count: int) -> Tensor:
    """Returns the ``count`` likeliest tokens of each row, int64 [R, count]: lower ids first on ties, NaN before all."""
    bits = (logits + 0.0).view(torch.int32)  # 0 and -0 are equal
    order = torch.where(bits < 0, bits ^ (2**31 - 1), bits).masked_fill_(logits.isnan(), 2**31 - 1).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.topk((order << 32) - ids, min(count, len(ids)), dim=-1).indices


def best(logits: Tensor, ranks: int) -> Tensor:
    """Returns the argmax of each row and its ``ranks`` likeliest tokens, int64 [R, 1 + ranks].

    The argmax is -1 where a logit is NaN or the largest is not finite.
    """
    argmax = logits.argmax(-1, keepdim=True)  # the first of equal ones; NaN is the largest
    argmax = argmax.where(logits.gather(1, argmax).isfinite(), -1)
    return torch.cat((argmax, ranked(logits, ranks)), 1) if ranks else argmax

"""Rotary positions (2104.09864) of heads in training."""

from __future__ import annotations

import torch
from torch import Tensor


def rotations(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [n, width] of positions [n]."""
    frequencies = theta ** (-torch.arange(0, width, 2, device=positions.device).float() / width)
    angles = torch.outer(positions.float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Returns x [..., width] rotated by cosines and sines of its positions."""
    low, high = x.chunk(2, dim=-1)
    return (x * turn[0] + torch.cat((-high, low), dim=-1) * turn[1]).to(x.dtype)


def partly_rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Returns x [..., D] with as much of it rotated as there are cosines; the rest stays."""
    width = turn[0].shape[-1]
    return (
        torch.cat((rotated(x[..., :width], turn), x[..., width:]), dim=-1) if width < x.shape[-1] else rotated(x, turn)
    )

"""Rotary positions (2104.09864) of heads in training."""

from __future__ import annotations

import torch
from torch import Tensor


def rotations(count: int, first: int, width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [count, width] of the positions from ``first`` on."""
    frequencies = theta ** (-torch.arange(0, width, 2, device=device).float() / width)
    angles = torch.outer(torch.arange(first, first + count, device=device).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Returns x [..., width] rotated by cosines and sines of its positions."""
    low, high = x.chunk(2, dim=-1)
    return (x * turn[0] + torch.cat((-high, low), dim=-1) * turn[1]).to(x.dtype)

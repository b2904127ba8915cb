"""Waiting for a device, and fetching from it."""

from __future__ import annotations

import torch
from torch import Tensor


def wait_for(device: torch.device) -> None:
    """Waits until ``device`` has finished its work, which a GPU does while the processor goes on."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on_host(tensor: Tensor) -> Tensor:
    """Returns a tensor in the host's memory: itself, or a copy once the device has computed it."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)  # torch reuses such memory
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host

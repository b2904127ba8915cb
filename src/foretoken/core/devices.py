"""Waiting for a device."""

from __future__ import annotations

import torch


def wait_for(device: torch.device) -> None:
    """Returns once ``device`` has done all work that it was given. A GPU works while the processor goes on."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Collective operations of several processes under torchrun. With one process they do nothing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


@contextmanager
def joined(device: torch.device) -> Iterator[torch.device]:
    """Joins the process group within the block, if torchrun started one. Yields this process's device."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def wait() -> None:
    if world() > 1:
        dist.barrier()


def largest(seconds: float, stop: bool) -> tuple[float, bool]:
    """Returns the greatest time of all processes, and whether any must stop, so that all end at one step."""
    if world() == 1:
        return seconds, stop
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    both = torch.tensor([seconds, float(stop)], device=device, dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return both[0].item(), bool(both[1].item())


def average_gradients(model: nn.Module) -> None:
    """Replaces every parameter's gradient by the mean over the processes."""
    if world() == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= world()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))

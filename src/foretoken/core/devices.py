"""Devices: waiting for them, copying to and from them, times of their work, and the memory that is left.

Memory is that of the machine, its control groups, its address space, and a GPU.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foretoken.core.threads import read_or_empty


def wait_for(device: torch.device) -> None:
    """Waits until ``device`` has finished its work, which a GPU does while the processor goes on."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Returns an int64 tensor on ``device``, to which it is copied while the host goes on."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def on_host(tensor: Tensor) -> Tensor:
    """Returns a tensor in the host's memory: itself, or a copy once the device has computed it."""
    return fetching(tensor)() if tensor.device.type == "cuda" else tensor


def fetched(tensor: Tensor) -> Tensor:
    """Returns a copy in the host's memory, which later work of the device does not overwrite."""
    return fetching(tensor)()


def fetching(tensor: Tensor) -> Callable[[], Tensor]:
    """Begins to copy a tensor as ``fetched`` does. Returns a function that waits for the copy and returns it."""
    if tensor.device.type != "cuda":
        copy = tensor.clone()
        return lambda: copy
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)  # torch reuses such memory
    host.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait


class TimeMark:
    """A moment of a device's work: that at which it has finished all work that was given to it before."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._seconds = 0.0
        self._device = device

    def set(self) -> None:
        """Sets the mark, without waiting for the device."""
        self._seconds = time.perf_counter()
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def since(self, earlier: "TimeMark") -> float:
        """Returns the seconds since an earlier mark; those of the host while the device has not reached this one."""
        if self._event is None or earlier._event is None or not self._event.query():
            return self._seconds - earlier._seconds
        return earlier._event.elapsed_time(self._event) / 1e3


if sys.platform != "win32":
    import resource

_GIB = 2**30
_LIMITS = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}  # version 2, version 1


@dataclass(frozen=True, slots=True)
class Memory:
    """Free memory."""

    free: int  # bytes that can still be allocated
    limit: int  # bytes in total

    @property
    def low(self) -> float:
        """Free bytes below which memory is short."""
        return min(0.06 * self.limit, _GIB)


class FreeMemory:
    """Reads the tightest memory limit of this process.

    Args:
        device: Device of the models, whose memory counts if it is a GPU.
        proc: The proc file system.
        groups: The control groups.
    """

    def __init__(self, device: torch.device, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> None:
        self._device, self._proc = device, proc
        self._folders = _group_folders(proc, groups)

    def __call__(self) -> Memory | None:
        """Returns the tightest limit, None if no limit is readable."""
        host = machine_memory(self._proc), address_space(self._proc)
        limits = filter(None, (*host, self._cuda(), *map(_group, self._folders)))
        return min(limits, key=lambda memory: memory.free / memory.low, default=None)

    def _cuda(self) -> Memory | None:
        """Returns the device's free memory, with that which the allocator holds unused."""
        if self._device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self._device)
        idle = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return Memory(free + idle, total)


def machine_memory(proc: Path = Path("/proc")) -> Memory | None:
    """Returns the memory of the machine, None if the system does not report it."""
    sizes = _table(proc / "meminfo")
    if "MemAvailable:" not in sizes or "MemTotal:" not in sizes:
        return None
    return Memory(sizes["MemAvailable:"] * 1024, sizes["MemTotal:"] * 1024)


def address_space(proc: Path = Path("/proc")) -> Memory | None:
    """Returns the memory that ``ulimit -v`` or the like leaves to this process, None without such a limit."""
    if sys.platform == "win32":
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = read_or_empty(proc / "self/statm").split()
    return Memory(max(0, limit - int(pages[0]) * resource.getpagesize()), limit) if pages else None


def group_limits(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> list[Memory]:
    """Returns the memory limits of the control groups of this process."""
    return [limit for limit in map(_group, _group_folders(proc, groups)) if limit is not None]


def _group_folders(proc: Path, groups: Path) -> list[Path]:
    """Returns the control groups of either version that limit this process: its own and all above."""
    folders = [groups, groups / "memory"]
    for line in read_or_empty(proc / "self/cgroup").splitlines():
        _, kinds, name = line.split(":", 2)
        if kinds == "" or "memory" in kinds.split(","):
            root = groups / "memory" if kinds else groups
            folder = root / name.strip("/")
            folders += [folder, *(above for above in folder.parents if above.is_relative_to(root))]
    return [f for f in dict.fromkeys(folders) if any((f / name).is_file() for name in _LIMITS)]


def _group(folder: Path) -> Memory | None:
    for limit_file, usage_file in _LIMITS.items():
        limit = read_or_empty(folder / limit_file).strip()
        if limit.isdigit() and int(limit) < 2**60 and (used := read_or_empty(folder / usage_file).strip()).isdigit():
            sizes = _table(folder / "memory.stat")
            cached = sizes.get("inactive_file", sizes.get("total_inactive_file", 0))  # freed before anything fails
            return Memory(max(0, int(limit) - int(used) + cached), int(limit))
    return None


def _table(file: Path) -> dict[str, int]:
    rows = (line.split() for line in read_or_empty(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}

"""Free memory is watched: under pressure drafting shrinks, then stops, before anything fails, and comes back."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foretoken.control.base import Controller
from foretoken.core.context import Context
from foretoken.core.step import StepOutput

_GIB = 2**30
_EVERY, _CALM, _PLENTY = 0.05, 0.25, 1.0  # seconds between two looks: memory is short, is not, is far from it
_FAR = 4.0  # times what is low; so much more cannot be gone before the next look, which takes half a millisecond
_PATIENCE = 20  # looks with room to spare before drafting grows again
_NONE = 6  # halvings that leave nothing, whatever the budget


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. free: what could still be had. limit: of how much."""

    free: int
    limit: int

    @property
    def low(self) -> float:
        """Below it drafting shrinks, below half of it it stops; it comes back above twice as much."""
        return min(0.06 * self.limit, _GIB)


class MemoryWatch(Controller):
    """``inner`` with at most half, a quarter, ... and then none of its budget, as long as memory is short.

    It holds for requests that name their own depth, too: theirs is a wish for speed, and this keeps them alive.
    """

    def __init__(
        self,
        inner: Controller,
        read: Callable[[], Memory | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """read: what is free; None says that it cannot be known, and nothing is limited."""
        self.inner, self._read, self._clock = inner, read, clock
        self.halvings = 0
        self._next, self._spare, self._wanted = 0.0, 0, 0

    def budgets(self, contexts: Sequence[Context], rooms: Sequence[int]) -> list[int]:
        self._look()
        wanted = self.inner.budgets(contexts, rooms)
        self._wanted = max([self._wanted, *wanted])
        if self.halvings:
            none = self.halvings >= _NONE
            wanted = self.inner.budgets(contexts, [0 if none else k >> self.halvings for k in wanted])
        return wanted

    def observe(self, steps: Sequence[StepOutput]) -> None:
        self.inner.observe(steps)

    def rest(self) -> int:
        return 0 if self.halvings else self.inner.rest()

    def rested(self, rounds: int) -> None:
        self.inner.rested(rounds)

    def forget(self, context: Context) -> None:
        self.inner.forget(context)

    def _look(self) -> None:
        now = self._clock()
        if now < self._next:
            return
        memory = self._read()
        if memory is None:
            self.halvings = 0
        elif memory.free < memory.low:
            self._spare = 0
            self.halvings = _NONE if memory.free < memory.low / 2 else min(_NONE, self.halvings + 1)
        elif self.halvings and memory.free > 2 * memory.low:
            self._spare += 1
            if self._spare >= _PATIENCE:
                self._spare = 0
                leaves_none = max(1, self._wanted.bit_length())
                self.halvings = min(self.halvings, leaves_none) - 1
        else:
            self._spare = 0
        plenty = memory is None or memory.free > _FAR * memory.low
        self._next = now + (_EVERY if self.halvings else _PLENTY if plenty else _CALM)


class Free:
    """What a process on ``device`` may still take: the tightest of machine, control groups, and its own limits."""

    def __init__(self, device: torch.device, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> None:
        self._device, self._proc = device, proc
        self._folders = _group_folders(proc, groups)

    def __call__(self) -> Memory | None:
        found = [m for m in (self._machine(), self._limits(), self._cuda(), *map(_group, self._folders)) if m]
        return min(found, key=lambda memory: memory.free / memory.low, default=None)

    def _machine(self) -> Memory | None:
        sizes = _table(self._proc / "meminfo")
        if "MemAvailable:" not in sizes or "MemTotal:" not in sizes:
            return None
        return Memory(sizes["MemAvailable:"] * 1024, sizes["MemTotal:"] * 1024)

    def _limits(self) -> Memory | None:
        """The address space, where ``ulimit -v`` or its like bounds it."""
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return None
        pages = _text(self._proc / "self/statm").split()
        return Memory(max(0, limit - int(pages[0]) * resource.getpagesize()), limit) if pages else None

    def _cuda(self) -> Memory | None:
        """What the device has, and what the allocator holds without using it."""
        if self._device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self._device)
        idle = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return Memory(free + idle, total)


def _group_folders(proc: Path, groups: Path) -> list[Path]:
    """The control groups, of either version, that bound this process's memory: its own and all above."""
    folders = [groups, groups / "memory"]
    for line in _text(proc / "self/cgroup").splitlines():
        _, kinds, name = line.split(":", 2)
        if kinds == "" or "memory" in kinds.split(","):
            root = groups / "memory" if kinds else groups
            own = root / name.strip("/")
            folders += [own, *(above for above in own.parents if above.is_relative_to(root))]
    return [f for f in dict.fromkeys(folders) if any((f / name).is_file() for name in _LIMITS)]


_LIMITS = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}


def _group(folder: Path) -> Memory | None:
    for limit, usage in _LIMITS.items():
        most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
        if most.isdigit() and used.isdigit() and int(most) < 2**60:
            sizes = _table(folder / "memory.stat")
            cached = sizes.get("inactive_file", sizes.get("total_inactive_file", 0))  # given up before anything fails
            return Memory(max(0, int(most) - int(used) + cached), int(most))
    return None


def _table(file: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""

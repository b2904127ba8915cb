"""Number of threads to compute with, by the system's limits for this process."""

import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from foretoken.core.native.cpu import sysctl

VARIABLE = "OMP_NUM_THREADS"
_log = logging.getLogger(__name__)


def usable_threads(root: Path = Path("/")) -> int:
    """Returns the number of threads that can compute at once, at least 1.

    It is ``OMP_NUM_THREADS`` if that is set. Otherwise it is the number of processors that this process may run on (of
    a hybrid processor only those of its performance cores), and no more than its control groups' quotas.
    root: Root of the file system.
    """
    requested = os.environ.get(VARIABLE, "").partition(",")[0].strip()
    if requested.isdecimal() and int(requested) > 0:
        return int(requested)
    processors = _allowed()
    fast = len(processors & _performance_cores(root)) or sysctl("hw.perflevel0.logicalcpu") or len(processors)
    count = min(fast, len(processors))
    return max(1, min([count, *(round(quota) for quota in quotas(root))]))


def quotas(root: Path = Path("/")) -> Iterator[float]:
    """Yields the limits of this process's control groups and those above them, in processors (cgroup v1 and v2)."""
    groups = root / "sys/fs/cgroup"
    for line in read_or_empty(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            homes = [groups, groups / "unified"]
        elif "cpu" in controllers.split(","):
            homes = [groups / "cpu", groups / controllers]
        else:
            continue
        for home in homes:
            group = home / path.strip("/")
            for folder in (group, *group.parents):
                if folder == groups.parent:
                    break
                yield from _quota(folder)


def respect_limits() -> None:
    """Limits the threads of torch and the kernels to ``usable_threads``, unless their number is set."""
    _respect_limits(os.getpid())


@functools.cache
def _respect_limits(_process: int) -> None:
    import torch

    if os.environ.get(VARIABLE):
        return
    usable, threads = usable_threads(), torch.get_num_threads()
    if threads > usable:
        _log.info("computing with %d threads instead of %d: this process may not use more", usable, threads)
        torch.set_num_threads(usable)


def _quota(folder: Path) -> Iterator[float]:
    """Yields the quota of one control group, if it has one."""
    unified = read_or_empty(folder / "cpu.max").split()
    pairs = [unified, [read_or_empty(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]]
    for quota, period in (pair for pair in pairs if len(pair) == 2):
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:  # "max" and -1: no limit
            yield int(quota) / int(period)


def _allowed() -> set[int]:
    """Returns the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _performance_cores(root: Path) -> set[int]:
    """Returns the processors of a hybrid processor's performance cores; empty if all cores are equal."""
    processors: set[int] = set()
    for part in read_or_empty(root / "sys/devices/cpu_core/cpus").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            processors |= set(range(int(first), int(last or first) + 1))
    return processors


def read_or_empty(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""

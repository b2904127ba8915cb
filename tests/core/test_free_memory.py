from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretoken.core.free_memory import FreeMemory, Memory

GIB = 2**30


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


PROC = {"meminfo": "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n"}


@pytest.mark.parametrize(
    "group, where, current, limit",
    [
        ("0::/box/inner", "box/", "memory.current", "memory.max"),
        ("0::/", "", "memory.current", "memory.max"),
        ("4:cpu,memory:/box", "memory/box/", "memory.usage_in_bytes", "memory.limit_in_bytes"),
    ],
)
def test_the_tightest_limit_counts(tmp_path, group, where, current, limit):
    """A control group of either version, be it the process's own or one above it."""
    proc = files(tmp_path / "proc", PROC | {"self/cgroup": group + "\n"})
    name = "inactive_file" if limit == "memory.max" else "total_inactive_file"
    groups = files(
        tmp_path / "groups",
        {where + limit: str(GIB), where + current: str(GIB - 1000), where + "memory.stat": f"anon 5\n{name} 400\n"},
    )
    assert FreeMemory(torch.device("cpu"), proc, groups)() == Memory(1400, GIB)


def test_without_limits_the_machine_counts(tmp_path):
    proc = files(tmp_path / "proc", PROC | {"self/cgroup": "0::/\n"})
    groups = files(tmp_path / "groups", {"memory.max": "max", "memory.current": "7"})
    assert FreeMemory(torch.device("cpu"), proc, groups)() == Memory(4 * GIB, 8 * GIB)


def test_free_memory_is_none_on_systems_that_do_not_report_it(tmp_path, monkeypatch):
    assert FreeMemory(torch.device("cpu"), tmp_path, tmp_path)() is None
    real = FreeMemory(torch.device("cpu"))()
    assert real is None or real.free >= 0

"""The number of threads and the free memory, from affinity, control groups, hybrid processors and the environment."""

from pathlib import Path

import pytest
import torch

from foretoken.core import threads
from foretoken.core.devices import FreeMemory, Memory
from foretoken.core.threads import quotas, respect_limits, usable_threads


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_allowed", lambda: set(range(8)))


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


def group_v1(quota: int, folder: str = "cpu/box") -> dict[str, str]:
    base = f"sys/fs/cgroup/{folder}"
    return {f"{base}/cpu.cfs_quota_us": f"{quota}\n", f"{base}/cpu.cfs_period_us": "100000\n"}


CASES = {
    "nothing": ({}, 8),
    "no limit": ({"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": "max 100000\n"}, 8),
    "one processor": ({"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": "100000 100000\n"}, 1),
    "half a processor": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
    "one and three quarters": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "175000 100000\n"}, 2),
    "the group above": (
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
        },
        3,
    ),
    "version 1": ({"proc/self/cgroup": "3:memory:/x\n1:cpu:/box\n", **group_v1(200_000)}, 2),
    "version 1, no limit": ({"proc/self/cgroup": "1:cpu,cpuacct:/box\n", **group_v1(-1)}, 8),
    "version 1, both controllers": (
        {"proc/self/cgroup": "1:cpu,cpuacct:/box\n", **group_v1(100_000, "cpu,cpuacct/box")},
        1,
    ),
    "version 1, the container's own root": ({"proc/self/cgroup": "1:cpu:/docker/1f\n", **group_v1(400_000, "cpu")}, 4),
    "performance cores": ({"sys/devices/cpu_core/cpus": "0-3,6\n", "sys/devices/cpu_atom/cpus": "4-5,7\n"}, 5),
    "no performance core allowed": ({"sys/devices/cpu_core/cpus": "16-31\n"}, 8),
    "damaged": ({"proc/self/cgroup": "nonsense\n0::\n1:cpu\n", "sys/fs/cgroup/cpu.max": "ten of\n"}, 8),
}


@pytest.mark.parametrize(("files", "count"), CASES.values(), ids=CASES)
def test_the_number_of_threads_follows_the_limits(tmp_path, files, count):
    assert usable_threads(system(tmp_path, files)) == count


def test_the_environment_wins(tmp_path, monkeypatch):
    root = system(tmp_path, CASES["one processor"][0])
    for text, count in {"3": 3, "4,2": 4, "0": 1, "many": 1, "": 1}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert usable_threads(root) == count


def test_quotas_are_in_processors(tmp_path):
    assert set(quotas(system(tmp_path, CASES["one and three quarters"][0]))) == {1.75}


def test_torch_is_limited_once_and_never_raised(monkeypatch):
    threads._respect_limits.cache_clear()
    monkeypatch.setattr(threads, "usable_threads", lambda: 1)
    torch.set_num_threads(2)
    respect_limits()
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    respect_limits()
    assert torch.get_num_threads() == 2  # a choice made later stands
    threads._respect_limits.cache_clear()
    monkeypatch.setattr(threads, "usable_threads", lambda: 8)
    respect_limits()
    assert torch.get_num_threads() == 2


def test_performance_cores_of_a_mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(threads, "sysctl", {"hw.perflevel0.logicalcpu": 4}.get)
    assert usable_threads(tmp_path) == 4


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

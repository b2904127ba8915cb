"""The setting that is published with every figure: machine, versions, date and command."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretoken.core.threads import usable_threads


def cores() -> int:
    """Returns the number of cores to compute on: ``OMP_NUM_THREADS``, or all that this process may use."""
    return usable_threads()


def setting() -> dict[str, Any]:
    """Returns the facts that make a result repeatable."""
    import torch
    import transformers

    import foretoken

    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor(),
        "cores": cores(),
        **gpu,
        "memory_gib": round(memory("MemTotal") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "foretoken": foretoken.__version__,
        "command": command(sys.argv),
    }


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Runs ``count`` programs that compute all the time, within the ``with`` block."""
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def command(argv: list[str]) -> str:
    """Returns the command line as a reader would type it."""
    program = Path(argv[0])
    installed = program.stem in ("foretoken", "__main__", "main")
    return shlex.join([*(["foretoken"] if installed else ["python", argv[0]]), *argv[1:]])


def processor() -> str:
    """Returns the processor's name, or its architecture where the name is hidden."""
    lines = _lines(Path("/proc/cpuinfo"))
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def memory(what: str) -> int:
    """Returns bytes of ``MemTotal`` or ``MemAvailable`` (machine), or ``VmHWM`` (peak of this process); 0 if hidden."""
    file = Path("/proc/self/status" if what.startswith("Vm") else "/proc/meminfo")
    sizes = (line.split()[1] for line in _lines(file) if line.startswith(f"{what}:"))
    return int(next(sizes, "0")) * 1024


def resident_bytes(process: int) -> int:
    """Returns the resident memory of a process, with the files that it maps; 0 if it has ended."""
    try:
        pages = Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGESIZE")


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []

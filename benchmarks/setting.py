"""What every figure is published with: machine, versions, date and command."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def wide_console() -> Console:
    """A console that does not fold tables where output goes to a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def setting() -> dict[str, Any]:
    """Facts that make a row repeatable."""
    import torch
    import transformers

    import foretoken

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "foretoken": foretoken.__version__,
        "command": shlex.join(["python", *sys.argv]),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())

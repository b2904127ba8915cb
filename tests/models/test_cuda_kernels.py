"""Runs the tests of Triton's kernels: on the device where there is one, else by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow


def test_kernels_equal_torch() -> None:
    """The interpreter is chosen when Triton is imported, so it has a process of its own."""
    pytest.importorskip("triton", reason="Triton is on Linux alone")
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    file = Path(__file__).with_name("cuda_kernels.py")
    command = [sys.executable, "-m", "pytest", str(file), "-q", "-n", "0", "-p", "no:cacheprovider"]
    run = subprocess.run(command, env={**os.environ, **interpreted}, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]

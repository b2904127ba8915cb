"""The process from which each task's process is forked."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from foretoken.core.forking import ForkServer

SECONDS = 60.0  # of the program, unless it is ended


@pytest.mark.slow
def test_closing_does_not_wait_for_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still be importing, and has nothing to save."""
    (tmp_path / "sleeping_program.py").write_text(f"import time\ntime.sleep({SECONDS})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ForkServer("sleeping_program", lambda: None)
    server.fork()
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < SECONDS / 2 and server.pid is None

"""A server in a process of its own, on a free port of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import httpx

from foretoken.core.errors import ForetokenError

_PATIENCE = 600.0  # seconds in which a server must have loaded, and compiled where it does


@contextmanager
def server_process(
    command: Sequence[str], ready: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, int]]:
    """Runs a server within the ``with`` block. Yields its address and its process id.

    Args:
        command: The command without ``--host`` and ``--port``, which are added.
        ready: Path that answers 200 once the server can be used.
        environment: Environment variables besides those of this process.

    Raises:
        ForetokenError: The server does not start; with its last line.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words, variables = [*command, "--host", "127.0.0.1", "--port", str(port)], {**os.environ, **(environment or {})}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as said,
        subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=said, env=variables) as process,
    ):
        try:
            address, end = f"http://127.0.0.1:{port}", time.monotonic() + _PATIENCE
            while not _answers(f"{address}{ready}"):
                if process.poll() is not None or time.monotonic() > end:
                    said.seek(0)
                    line = said.read().strip().splitlines()[-1:] or ["it said nothing"]
                    raise ForetokenError(f"the server did not start: {line[0]}")
                time.sleep(0.1)
            yield address, process.pid
        finally:
            process.terminate()
            process.wait(120)


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=5.0).status_code == 200
    return False

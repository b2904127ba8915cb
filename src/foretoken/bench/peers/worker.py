"""The parent's side of a peer's process: started once, stopped while other systems are measured."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foretoken.bench.output import resident_bytes
from foretoken.bench.peers import registry
from foretoken.bench.peers.protocol import Answer, PeerRequest, Setup
from foretoken.core.errors import ForetokenError


class PeerError(ForetokenError):
    """A peer could not load or answer. The race continues without it."""


class PeerWorker:
    """Loads ``setup`` in a separate process, which is stopped except during requests.

    The whole process group is stopped (SIGSTOP), because spinning thread pools would disturb other measurements. The
    output of the process goes to the file ``log``. Raises PeerError.
    """

    def __init__(self, command: Sequence[str], setup: Setup, log: Path) -> None:
        self.setup, self._log = setup, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        try:
            self.version = str(self._exchange(asdict(setup))["ready"])
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Id of the process, and of its group."""
        return self._process.pid

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the process and its children, with the files that they map; 0 where it is hidden."""
        processes = Path("/proc").glob("[0-9]*")
        return sum(resident_bytes(int(process.name)) for process in processes if _group(process) == self.pid)

    def answer(self, request: PeerRequest) -> Answer:
        """Resumes the process, completes the request, stops it again."""
        return Answer(**self._exchange(asdict(request)))

    def complete(self, bodies: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """Returns the answers to requests of OpenAI's API, which are completed at once."""
        answers: list[dict[str, object]] = self._exchange({"bodies": list(map(dict, bodies))})["answers"]
        return answers

    def close(self) -> None:
        """Kills the process and its children. Idempotent."""
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # the process has ended, so unread data need not be flushed

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"{self._name} stopped: {self._last_words()} (all of it: {self._log})")
        self._signal(signal.SIGSTOP)
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerError(f"{self._name}: {' '.join(str(reply['error']).split())[:300]} (more: {self._log})")
        return reply

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return  # the process has ended; the next read raises

    @property
    def _name(self) -> str:
        return f"{self.setup.system} {self.setup.method}"

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else f"exit code {self._process.wait()}"


def start(setup: Setup, api: bool = False) -> PeerWorker:
    """Returns a process that has loaded ``setup``. api: Whether it answers as a server does. Raises PeerError."""
    known, kind = registry.PEERS | {registry.OURS.name: registry.OURS}, "api-" if api else ""
    log = registry.folder() / "logs" / f"{kind}{setup.system}-{setup.method}-{setup.depth}.log"
    return PeerWorker(known[setup.system].command(api), setup, log)


def _group(process: Path) -> int | None:
    """Returns the process group; None if the process has ended."""
    try:
        return int((process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[2])
    except OSError:
        return None

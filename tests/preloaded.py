"""A Python that has imported torch, Foretoken and its server already, for tests that start processes.

Its processes are forked from one that imported them, which takes a twentieth of a second; importing them takes two or
three. ``program`` writes a launcher that is called as Python is, with ``-c``, ``-m`` or a file. The launcher hands its
arguments, environment, working folder and open files to the process that forks, passes signals on to the child, and
ends as the child does. The child of a launcher that is killed is killed too.

It is for tests of what a process does. What it imports, how much memory it takes and that it starts at all is tested
with ``sys.executable``.
"""

import array
import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

MODULES = (
    *("torch", "transformers.modeling_utils", "uvicorn"),
    *("foretoken.llm", "foretoken.cli.main", "foretoken.serve.app", "foretoken.serve.server"),
)
_PYTHON = sys.executable
_USER = bytes(8)  # what a process of tests sends, in the place of the size of a request
_SEPARATE = 500  # the files of a request wait from this number on, while the child closes those below
_LAUNCHER = """#!{python} -IS
import array, json, os, signal, socket, sys

ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
files = []
for name in os.listdir("/proc/self/fd"):
    try:
        os.fstat(int(name))
    except OSError:
        continue  # the listing's own
    if int(name) != server.fileno():
        files.append(int(name))
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), files]).encode()
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
server.sendmsg([len(request).to_bytes(8, "big")], rights)
server.sendall(request)
child = int.from_bytes(server.recv(8), "big")
for number in ending:
    signal.signal(number, lambda number, _: os.kill(child, number))
status = int.from_bytes(server.recv(8), "big")
if os.WIFSIGNALED(status):
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
"""


@contextmanager
def program(folder: Path) -> Iterator[Path]:
    """Yields the path of the launcher; of Python itself on other systems.

    Args:
        folder: Shared by the processes of tests. The first of them starts the process that forks.
    """
    if not hasattr(os, "pidfd_open"):
        yield Path(sys.executable)
        return
    import fcntl  # Windows has none

    folder.mkdir(exist_ok=True)
    address, launcher = folder / "socket", folder / "python"
    with socket.socket(socket.AF_UNIX) as user:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                user.connect(str(address))
            except (FileNotFoundError, ConnectionRefusedError):  # not started yet, or ended
                _start(address, launcher)
                user.connect(str(address))
        user.sendall(_USER)
        yield launcher


def _start(address: Path, launcher: Path) -> None:
    """Starts the process that forks. It ends when the last process of tests that uses it has ended."""
    launcher.write_text(_LAUNCHER.format(python=sys.executable, address=str(address)), encoding="utf-8")
    launcher.chmod(0o755)
    address.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen(64)
        listening.set_inheritable(True)
        command = [sys.executable, __file__, str(listening.fileno()), str(launcher)]
        nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        os.posix_spawn(sys.executable, command, os.environ, file_actions=[nothing])


# in the process that forks, and in its children


def serve(listening: socket.socket) -> Callable[[], None] | None:
    """Forks for every request until no client is left. Returns the function to run in a child, None in this process."""
    selector, children, users = selectors.DefaultSelector(), dict[int, socket.socket](), list[socket.socket]()
    selector.register(listening, selectors.EVENT_READ, ("request", 0))
    while True:
        for key, _ in selector.select():
            what, pid = key.data
            if what == "user":  # is gone
                selector.unregister(key.fileobj)
                users.remove(key.fileobj)  # type: ignore[arg-type]
                if not users:
                    for child in children:
                        os.kill(child, signal.SIGKILL)
                    return None
            elif what == "request":
                connection, _ = listening.accept()
                with suppress(OSError, EOFError):
                    if (request := _received(connection)) is None:
                        users.append(connection)
                        selector.register(connection, selectors.EVENT_READ, ("user", 0))
                        continue
                    if not (pid := os.fork()):
                        for own in (selector, listening, connection, *children.values(), *users):
                            own.close()
                        _take(request)
                        return partial(_run, request.arguments)
                    request.close()
                    connection.sendall(pid.to_bytes(8, "big"))
                    children[pid] = connection
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, ("ended", pid))
                    selector.register(connection, selectors.EVENT_READ, ("abandoned", pid))
            elif what == "ended":
                selector.unregister(key.fileobj)
                os.close(key.fd)
                status, connection = os.waitpid(pid, 0)[1], children.pop(pid)
                with suppress(KeyError):
                    selector.unregister(connection)
                with suppress(OSError), connection:
                    connection.sendall(status.to_bytes(8, "big"))
            elif pid in children:  # its client is gone
                selector.unregister(key.fileobj)
                os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Request:
    """numbers: those that the open files have where the process is started."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    numbers: list[int]
    files: list[int]

    def close(self) -> None:
        for file in self.files:
            os.close(file)


def _received(connection: socket.socket) -> Request | None:
    """Returns a request, None from a process of tests that will make some."""
    size, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(4 * 64))
    files = array.array("i", b"".join(data for _, _, data in ancillary))
    if size == _USER:
        return None
    left, parts = int.from_bytes(size, "big"), list[bytes]()
    while left:
        parts.append(connection.recv(left))
        if not parts[-1]:
            raise EOFError
        left -= len(parts[-1])
    return Request(*json.loads(b"".join(parts)), list(files))


def _take(request: Request) -> None:
    """Makes this process one that was started there."""
    kept = [os.dup2(file, _SEPARATE + place) for place, file in enumerate(request.files)]
    os.closerange(0, _SEPARATE)
    for number, file in zip(request.numbers, kept, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        lines = 1 if name == "stderr" or "PYTHONUNBUFFERED" in os.environ else -1
        present = number in request.numbers
        setattr(sys, name, open(number, mode, lines, encoding="utf-8", closefd=False) if present else None)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(task: Callable[[], None]) -> NoReturn:
    """Runs the task and ends as Python does, but for taking apart all that was imported, which takes longest."""
    status: object = 0
    try:
        task()
    except SystemExit as ended:
        status = ended.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status if isinstance(status, int) else 1)


def _run(arguments: Sequence[str]) -> None:
    """Does what Python does with these arguments."""
    first, *rest = arguments
    if isolated := first in ("-u", "-P"):
        first, *rest = rest
    if first == "-c":
        sys.modules["__main__"] = main = ModuleType("__main__")
        sys.argv[:] = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # that it was imported before
        sys.argv[:] = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first.startswith("-"):  # another option: this Python does not start again
        os.execv(_PYTHON, [_PYTHON, *arguments])
    else:
        sys.argv[:] = [first, *rest]
        if not isolated:
            sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to the whole process group
    descriptor, sys.executable = int(sys.argv[1]), sys.argv[2]
    sys.path[0] = str(Path(__file__).parents[1])  # as for tests, and not their folder
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    if task := serve(socket.socket(fileno=descriptor)):
        _end(task)

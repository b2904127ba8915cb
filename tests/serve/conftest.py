"""The real server in a thread, on a small model in float32: the bundled draft, with a noisy copy of it to draft."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import httpx
import openai
import pytest
from tests.cli.conftest import Run, run  # noqa: F401  # a fixture, and its type

from foretoken import LLM, zoo
from foretoken.serve.app import create_app
from foretoken.serve.request_log import RequestTracer
from foretoken.serve.server import Server
from foretoken.serve.settings import ServerSettings, bind
from foretoken.serve.worker import Worker

PATIENCE = 120.0  # seconds that a test waits for what comes at once where nothing else runs
DIGIT: dict[str, Any] = {  # parameters of a function
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
NOISE = 0.15  # of the deviation of each weight


@pytest.fixture(scope="session", autouse=True)
def _patient_server() -> Iterator[None]:
    """The process of grammars imports for seconds of a core; on a busy machine that takes longer than requests wait."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("serve.worker.COMPILE_PATIENCE", "serve.worker.ORDER_PATIENCE", "engine.grammar_process._TIMEOUT"):
            patch.setattr(f"foretoken.{name}", PATIENCE)
        yield


@dataclass(frozen=True)
class Running:
    """A server that runs. ``url`` has no slash at its end."""

    patience: ClassVar[float] = PATIENCE
    pause: ClassVar[float] = 0.01  # seconds between looks

    url: str
    worker: Worker
    app: Any

    @property
    def client(self) -> openai.OpenAI:
        """OpenAI's own, without retries."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=self.patience)

    def post(self, body: Any, path: str = "completions", **options: Any) -> httpx.Response:
        """Sends a value, or JSON as it is in bytes or parts of them."""
        if isinstance(body, bytes | Iterator):
            options |= {"content": body, "headers": {"Content-Type": "application/json", **options.get("headers", {})}}
        else:
            options["json"] = body
        return httpx.post(f"{self.url}/v1/{path}", timeout=self.patience, **options)

    @contextmanager
    def streaming(self, body: dict[str, Any], **options: Any) -> Iterator[tuple[httpx.Response, Iterator[str]]]:
        """The stream of a completion that has begun, and its further lines."""
        options |= {"json": {**body, "stream": True}, "timeout": self.patience}
        with httpx.stream("POST", f"{self.url}/v1/completions", **options) as answer:
            assert answer.status_code == 200, answer.read()
            lines = answer.iter_lines()  # kept, since a generator that is dropped closes the connection
            next(lines)
            yield answer, lines

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for it."""
        wait_until(condition, self.patience, self.pause)

    def idle(self) -> bool:
        return not (self.worker.busy or self.worker.engine.busy)


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def wait_until(condition: Callable[[], bool], patience: float = PATIENCE, pause: float = 0.01) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(pause)


@contextmanager
def in_thread(server: Server) -> Iterator[str]:
    """Runs a server in a thread. -> its address, without a slash at its end, once it takes requests"""
    with bind("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
    assert not thread.is_alive()


@contextmanager
def running(
    llm: LLM,
    settings: ServerSettings | None = None,
    max_waiting: int = 256,
    tracer: RequestTracer | None = None,
    prestarted: bool = False,
) -> Iterator[Running]:
    """prestarted: the process for large bodies is started at once, as it always is outside of tests, and not by the
    first of them: its imports take a second of a core, and few tests send any."""
    worker = Worker(llm, max_waiting=max_waiting)
    app = create_app(worker, settings, tracer)
    if not prestarted and app.state.service.side_process is not None:
        app.state.service.side_process.start = lambda: None
    with in_thread(Server(app, [worker], drain_timeout=PATIENCE)) as url:
        yield Running(url, worker, app)


@contextmanager
def served(*options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """``foretoken serve`` as users start it, and its standard error."""
    command = [sys.executable, "-m", "foretoken", "serve", "--port", "0", "--dtype", "float32", *options]
    settings = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **environment}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=settings) as process:
        assert process.stderr is not None
        try:
            yield process, process.stderr
        finally:
            process.kill()


def chunks_of(lines: Iterable[str]) -> list[Any]:
    """The data of the events of a stream without its end mark, from its lines."""
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def events_of(stream: str) -> list[tuple[str, Any]]:
    """The names and the data of server-sent events."""
    found = []
    for part in filter(None, stream.split("\n\n")):
        name, data = part.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


@pytest.fixture(scope="session")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that is often right and often wrong about the bundled draft."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(zoo.path("draft"), tmp_path_factory.mktemp("served") / "noisy")
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for weight in weights.values():
        noise = torch.randn(weight.shape, generator=generator)
        weight.add_(noise * weight.float().std(correction=0) * NOISE)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _new(noisy: Path) -> LLM:
    # This number of tokens is drafted however busy the machine is: left to measurement it may be none.
    return LLM(
        zoo.path("draft"),
        noisy,
        dtype="float32",
        speculative_config={"num_speculative_tokens": 4},
        methods=("prediction", "ngram"),
        max_num_seqs=8,
        seed=1,
        isolate_failures=True,
    )


@pytest.fixture(scope="session")
def llm(noisy: Path) -> LLM:
    """The model that ``server`` serves; no other test may use it."""
    return _new(noisy)


@pytest.fixture(scope="session")
def spare(noisy: Path) -> LLM:
    """The same again, for other servers and for comparison; one user at a time."""
    return _new(noisy)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    with running(llm, ServerSettings(model_names=("stdlib", "other"), max_n=8)) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client as found:
        yield found

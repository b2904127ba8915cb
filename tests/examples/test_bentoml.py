"""The BentoML recipe as users start it: OpenAI's API by its own client, and the typed endpoint."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("bentoml") is None, reason="bentoml is not installed"),
    pytest.mark.slow,
]

SERVICE = Path(__file__).parents[2] / "examples" / "recipes" / "bentoml_service.py"
PATIENCE = 120.0  # seconds until two processes have imported everything
PROMPT = "def read_lines(path):"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A port that the service may listen on and that no other process is given."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture(scope="module")
def url(port: int, preloaded_launcher: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the service."""
    folder = tmp_path_factory.mktemp("bentoml")
    environment = os.environ | {"BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": str(folder)}
    command = [str(preloaded_launcher), "-m", "bentoml", "serve", f"{SERVICE.stem}:Foretoken"]
    command += ["--working-dir", str(SERVICE.parent), "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield _answering(f"http://127.0.0.1:{port}", process, folder / "log")
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            finally:
                _end(process.pid)


def _answering(url: str, process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + PATIENCE
    while True:
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return url
        except httpx.HTTPError:
            pass
        time.sleep(0.2)


def _end(group: int) -> None:
    """Processes that remain of the session that the test started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def test_openai_and_the_typed_endpoint_agree(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        done = client.completions.create(model="foretoken", prompt=PROMPT, max_tokens=24, temperature=0)
        pieces = list(
            client.completions.create(model="foretoken", prompt=PROMPT, max_tokens=24, temperature=0, stream=True)
        )
    text = done.choices[0].text
    assert text and "".join(piece.choices[0].text for piece in pieces if piece.choices) == text
    answer = httpx.post(f"{url}/generate", json={"prompt": PROMPT, "max_tokens": 24}, timeout=60).json()
    assert answer["text"] == text and answer["tokens"] <= 24 and answer["mean_acceptance_length"] >= 1


def test_the_typed_endpoint_refuses_invalid_requests(url: str) -> None:
    wrong = httpx.post(f"{url}/generate", json={"prompt": PROMPT, "temperature": -1}, timeout=60)
    assert wrong.status_code == 400 and "temperature" in wrong.text
    assert httpx.post(f"{url}/generate", json={"max_tokens": 4}, timeout=60).status_code == 400


def test_metrics_and_the_page_are_there(url: str) -> None:
    assert "foretoken:" in httpx.get(f"{url}/foretoken/metrics", timeout=60).text
    assert "<html" in httpx.get(f"{url}/", timeout=60).text

"""Faults while the server runs, which other requests do not notice."""

import asyncio
import json
import re
import signal
import socket
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from tests.serve.conftest import PATIENCE, Running, running, served

from foretoken import LLM, SamplingParams
from foretoken.core.distributions import NodeDistributions
from foretoken.core.errors import InvalidRequest
from foretoken.serve.errors import Overloaded, RequestFailed, ServerUnavailable
from foretoken.serve.worker import Worker

pytestmark = pytest.mark.slow

LONG = {"prompt": "x = ", "max_tokens": 600, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "def f(x):\n", "max_tokens": 16, "temperature": 1, "seed": 7}


@pytest.fixture
def text_alone(server: Running) -> str:
    server.until(server.idle)
    return server.post(SHORT).json()["choices"][0]["text"]


def test_client_gone_mid_stream(server: Running, text_alone: str) -> None:
    with server.streaming({**LONG, "max_tokens": 6000}):
        assert not server.idle()
        assert server.post(SHORT).json()["choices"][0]["text"] == text_alone
    server.until(server.idle)


def test_client_gone_before_the_answer(server: Running) -> None:
    endless = {**LONG, "max_tokens": 6000, "n": 8, "speculative_tokens": 0}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=endless, timeout=httpx.Timeout(PATIENCE, read=0.3))
    server.until(server.idle)
    assert 'finished_reason="abort"' in httpx.get(f"{server.url}/metrics").text


def test_slow_reader(server: Running, text_alone: str) -> None:
    """Its request ends and others are served while it does not read; what it reads at last is whole."""
    large = {"n": 8, "max_tokens": 250, "logprobs": 20, "return_steps": True, "speculative_tokens": 0}
    body = json.dumps({**LONG, **large, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        slow.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
        assert server.post(SHORT).json()["choices"][0]["text"] == text_alone
        server.until(server.idle)
        read = b""
        while part := slow.recv(1 << 16):
            read += part
    assert read.count(b'"finish_reason":"length","stop_reason"') == 8 and b"data: [DONE]" in read
    assert len(read) > 2**21, "more than waits in sockets"


class Broken(RuntimeError):
    """An error that a test causes."""


def test_one_sequence_fails_alone(server: Running, text_alone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A law that cannot be computed in the middle of a stream ends that stream with an error, and nothing else."""
    bad: dict[str, Any] = {"prompt": "x", "max_tokens": 50, "stream": True, "ignore_eos": True, "temperature": 0.9375}

    class Failing(NodeDistributions):
        """The distributions of a draft's nodes; those of ``bad`` raise after its first tokens."""

        def __init__(self, law: Any, logits: Any, history: Any, argmax: Any = None) -> None:
            super().__init__(law, logits, history, argmax)
            root = history(0)
            self.broken = law.temperature == bad["temperature"] and len(root.tokens) - root.prompt_length > 5

        def certain(self, row: int) -> int | None:
            if self.broken:
                raise Broken("planted")
            return super().certain(row)

        def chances(self, rows: Any, tokens: Any) -> Any:
            if self.broken:
                raise Broken("planted")
            return super().chances(rows, tokens)

        def verify_chain(self, ids: Any, q: Any, key: int) -> Any:
            if self.broken:
                raise Broken("planted")
            return super().verify_chain(ids, q, key)

        def __getitem__(self, row: int) -> Any:
            if self.broken:
                raise Broken("planted")
            return super().__getitem__(row)

    monkeypatch.setattr("foretoken.engine.verified.NodeDistributions", Failing)
    with server.streaming(LONG) as (_, lines):
        events = server.post(bad).text.strip().split("\n\n")
        assert len(events) > 1 and "data: [DONE]" not in events
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert error["type"] == "server_error" and "Broken" in error["message"] and "planted" not in error["message"]
        same = {"max_tokens": 50, "temperature": bad["temperature"], "extra_body": {"ignore_eos": True}}
        with pytest.raises(openai.APIError, match="engine failed"):
            list(server.client.completions.create(model="stdlib", prompt="x", stream=True, **same))
        assert server.post({**bad, "stream": False}).status_code == 500
        assert server.post(SHORT).json()["choices"][0]["text"] == text_alone
        assert next(line for line in lines if line)


def test_a_round_that_fails(server: Running, text_alone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes its requests with it; the next one is served as if nothing had been."""
    engine = server.worker.engine
    planted = threading.Event()
    propose = engine.proposer.propose

    def failing(contexts: Any, budgets: Any) -> Any:
        if planted.is_set() and contexts[0].generated > 5:
            planted.clear()
            raise Broken
        return propose(contexts, budgets)

    monkeypatch.setattr(engine.proposer, "propose", failing)
    planted.set()
    assert server.post(LONG).status_code == 500
    assert server.post(SHORT).json()["choices"][0]["text"] == text_alone
    server.until(server.idle)
    engine.check_integrity()
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_dead_engine_is_told(spare: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(spare) as dying:
        monkeypatch.setattr(dying.worker, "_note_begun", lambda *_: 1 / 0)
        assert dying.post(SHORT).status_code == 503
        assert httpx.get(f"{dying.url}/health").status_code == 503
        assert "started again" in dying.post(SHORT).json()["error"]["message"]
    spare.engine.clear()


def test_a_draining_server_finishes_its_requests_and_refuses_new_ones(spare: LLM) -> None:
    """Running ones finish, new ones are refused."""
    with running(spare) as ending, ending.streaming(LONG) as (_, lines):
        ending.worker.draining = True
        assert httpx.get(f"{ending.url}/health").status_code == 503
        refused = ending.post(SHORT)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert list(lines)[-2] == "data: [DONE]"


def test_a_worker_serves_cancels_and_refuses_without_a_server(spare: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight requests of one engine: some are closed before or after their first token, the others get their text."""
    wanted = spare.generate("x = ", SamplingParams(max_tokens=30, temperature=0))[0].outputs[0].text
    submitted, step = threading.Event(), spare.engine.step
    monkeypatch.setattr(spare.engine, "step", lambda: step() if submitted.wait(PATIENCE) else [])
    worker = Worker(spare, max_waiting=0)
    worker.start()

    async def use() -> None:
        params = SamplingParams(max_tokens=30, temperature=0)
        generations = [await worker.submit(["x = "], params) for _ in range(8)]
        with pytest.raises(Overloaded):
            await worker.submit(["x = "], params)
        generations[0].close()
        submitted.set()
        assert [piece async for piece in generations[0]] == []
        async for _ in generations[1]:
            generations[1].close()
        for generation in generations[2:]:
            assert "".join([piece.text async for piece in generation]) == wanted
        with pytest.raises(InvalidRequest):
            await worker.submit(["x", ""], params)
        left = await worker.submit(["x = "], SamplingParams(max_tokens=1000, ignore_eos=True))
        worker.abandon()
        with pytest.raises(ServerUnavailable):
            [piece async for piece in left]
        assert not worker.busy

    asyncio.run(use())
    worker.close()
    spare.engine.check_integrity()
    assert not spare.engine.busy and not spare.engine.finished


def test_worker_tells_failures(spare: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(spare)
    worker.start()
    monkeypatch.setattr(spare.engine, "add", lambda *_, **__: 1 / 0)

    async def use() -> None:
        with pytest.raises(RequestFailed, match="ZeroDivisionError"):
            [piece async for piece in await worker.submit(["x"], SamplingParams())]

    asyncio.run(use())
    worker.close()


def test_sigterm_mid_stream() -> None:
    """The stream goes on to its end, new requests get a 503, and the process ends well."""
    with served("--drain-timeout", "120") as (server, said):
        line = said.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line + said.read()
        url, body = found[0], {**LONG, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            end = time.monotonic() + PATIENCE
            while httpx.get(f"{url}/health").status_code != 503:
                assert time.monotonic() < end
            assert httpx.post(f"{url}/v1/completions", json=SHORT).status_code == 503
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert server.wait(PATIENCE) == 0

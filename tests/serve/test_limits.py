"""Limits of what clients send before the app sees them: headers, bodies, and the time they take. With raw sockets."""

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse

import httpx
import pytest
from tests.serve.conftest import PATIENCE, Running, running
from tests.serve.test_errors import OK, error_of

from foretoken import LLM
from foretoken.serve.errors import ApiError
from foretoken.serve.limits import MAX_HEADERS, Bodies, LimitsMiddleware
from foretoken.serve.server import HttpProtocol
from foretoken.serve.settings import ServerSettings

pytestmark = pytest.mark.slow

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps({**OK, "prompt": "é" * 10}).encode()


@pytest.fixture(scope="module")
def limited(spare: LLM) -> Iterator[Running]:
    with running(spare, ServerSettings(max_body=10_000, body_timeout=PATIENCE, max_concurrency=2)) as found:
        yield found


@contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE) as connection:
        yield connection


def answer_to(connection: socket.socket) -> tuple[int, str]:
    """The status and all that follows until the server closes; 0 where it closes without an answer."""
    read = b""
    try:
        while part := connection.recv(1 << 16):
            read += part
    except ConnectionResetError:
        pass
    found = re.match(rb"HTTP/1.1 ([0-9]{3}) ", read)
    return (int(found[1]) if found else 0), read.decode()


@pytest.mark.parametrize("line", ["Authorization: Bearer {}", "{}: x", "X-Long: {}"])
def test_an_endless_header_line_is_cut_off(limited: Running, line: str) -> None:
    """Without a key and long before all of it is sent."""
    sent, part = 0, b"a" * 2**16
    with connected(limited) as connection:
        connection.sendall((HEAD + line.partition("{}")[0]).encode())
        try:
            while sent < 2**26:
                connection.sendall(part)
                sent += len(part)
        except OSError:
            pass
        status, said = answer_to(connection)
    assert sent < 2**24, "the sockets' buffers hold some of it"
    assert status in (0, 431), said  # a reset may overtake the answer


def test_large_headers_are_refused_in_openais_shape(limited: Running) -> None:
    for headers in ({"X-Long": "a" * (MAX_HEADERS - 1000)}, {f"X-{i}": "a" * 100 for i in range(1000)}):
        answer = httpx.get(f"{limited.url}/health", headers=headers)
        if len(headers) == 1:
            assert answer.status_code == 200
        else:
            assert error_of(answer, 431)["code"] == "headers_too_large"


def test_bytes_that_are_no_http_are_refused_in_openais_shape(limited: Running) -> None:
    with connected(limited) as connection:
        connection.sendall(b"NONSENSE\r\n\r\n")
        status, said = answer_to(connection)
    assert status == 400 and "not an HTTP request" in json.loads(said.partition("\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize("beginning", [b"", b"GET / HT", HEAD.encode()])
def test_connections_without_a_whole_head_are_closed(limited, beginning, monkeypatch):
    monkeypatch.setattr(HttpProtocol, "head_seconds", 0.3)
    with connected(limited) as connection:
        connection.sendall(beginning)
        assert answer_to(connection) == (0, "")


def test_a_trickle_behind_an_answer_does_not_keep_the_connection(limited, monkeypatch):
    """The next request's head has a limit of time as the first one's has; a whole request in time is answered."""
    ask, complete, answered = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", HttpProtocol.on_response_complete, []
    monkeypatch.setattr(HttpProtocol, "on_response_complete", lambda self: answered.append(complete(self)))
    with connected(limited) as connection:
        for number, seconds in enumerate((PATIENCE, PATIENCE, 0.3), 1):
            monkeypatch.setattr(HttpProtocol, "head_seconds", seconds)  # from the end of the answer on
            connection.sendall(ask)
            with HTTPResponse(connection) as answer:  # its head and its body may come in two parts
                answer.begin()
                assert answer.status == 200 and answer.read()
            limited.until(lambda number=number: len(answered) == number)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            _trickle(connection, ask * 4)


def _trickle(connection: socket.socket, data: bytes) -> None:
    for byte in data:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def test_slow_bodies_end_with_a_408(limited: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = limited.app.middleware_stack
    while not isinstance(layer, LimitsMiddleware):
        layer = layer.app if hasattr(layer, "app") else layer._app
    monkeypatch.setattr(layer._bodies, "_seconds", 0.3)
    with connected(limited) as connection:
        connection.sendall(f"{HEAD}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY[:-1])
        status, said = answer_to(connection)
    assert status == 408 and '"body_timeout"' in said and "connection: close" in said.lower()


def test_unfinished_bodies_take_no_slot(limited: Running) -> None:
    """Two slots, eight that send slowly: everybody else is served, and so are they once their bodies are complete."""
    with ExitStack() as stack:
        slow = [stack.enter_context(connected(limited)) for _ in range(8)]
        for connection in slow:
            connection.sendall(f"{HEAD}Connection: close\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY[:9])
        time.sleep(0.1)
        assert limited.post(OK).status_code == 200
        slow[0].sendall(BODY[9:])
        assert answer_to(slow[0])[0] == 200


def test_a_client_that_leaves_within_its_body_is_forgotten(limited: Running) -> None:
    with connected(limited) as connection:
        connection.sendall(f"{HEAD}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY[:9])
    assert limited.post(OK).status_code == 200
    limited.until(limited.idle)


def test_memory_of_large_bodies_is_bounded_and_given_back() -> None:
    """Small bodies always find room."""
    limit = 2**18
    bodies = Bodies(limit, 10.0)

    async def receive_of(size: int, hold: asyncio.Event) -> bytes | None:
        parts = [size // 2, size - size // 2]

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": b"x" * parts.pop(), "more_body": bool(parts)}

        async with bodies.read(receive) as body:  # type: ignore[arg-type]
            await hold.wait()
            return body

    async def use() -> int:
        """Returns the number of 200 large bodies that are refused."""
        hold = asyncio.Event()
        large = [asyncio.create_task(receive_of(limit, hold)) for _ in range(200)]
        await asyncio.sleep(0)
        small = asyncio.create_task(receive_of(2**15, hold))
        await asyncio.sleep(0)
        hold.set()
        results = await asyncio.gather(*large, return_exceptions=True)
        refused = [result for result in results if isinstance(result, ApiError)]
        assert 100 < len(refused) < 140 and {error.status for error in refused} == {429}
        assert len(await small or b"") == 2**15
        assert await receive_of(limit, hold) == b"x" * limit
        return len(refused)

    assert asyncio.run(use()) == asyncio.run(use()) == asyncio.run(use())

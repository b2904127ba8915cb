"""Identifiers of requests, and unknown fields: named in headers, counted, refused by a strict server."""

import json
import logging
from collections.abc import Iterator

import httpx
import pytest
from tests.serve.conftest import Running, running
from tests.serve.test_errors import CHAT, OK

from foretoken import LLM
from foretoken.serve.request_state import unknown_fields_header
from foretoken.serve.settings import ServerSettings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preloaded_python")]

MESSAGE = {**CHAT, "max_tokens": 4}
RESPONSE = {"input": "x", "max_output_tokens": 4}


@pytest.fixture(scope="module")
def strict(spare: LLM) -> Iterator[Running]:
    with running(spare, ServerSettings(strict=True)) as found:
        yield found


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/nothing", "/metrics", "/v1/messages"])
def test_every_answer_has_an_identifier(server: Running, path: str) -> None:
    made = [httpx.get(server.url + path).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1] and made[0].startswith("req_")
    assert httpx.get(server.url + path, headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for unfit in ("a b", "x" * 129, ""):
        assert httpx.get(server.url + path, headers={"X-Request-Id": unfit}).headers["x-request-id"].startswith("req_")


def test_the_body_may_name_it(server: Running) -> None:
    got = server.post({**OK, "request_id": "abc"})
    assert got.headers["x-request-id"] == "abc" and got.json()["id"] == "cmpl-abc"
    got = server.post({**OK, "request_id": "abc"}, headers={"X-Request-Id": "outer"})
    assert got.headers["x-request-id"] == "outer" and got.json()["id"] == "cmpl-abc"
    assert server.post({**OK, "request_id": "a\nb"}).status_code == 400


def test_it_is_logged(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "foretoken"):
        server.post(OK, headers={"X-Request-Id": "find-me"})
        server.until(lambda: "find-me" in caplog.text)
    assert "POST /v1/completions 200" in caplog.text


@pytest.mark.parametrize(
    "path, body",
    [
        ("completions", OK),
        ("chat/completions", CHAT),
        ("responses", RESPONSE),
        ("messages", MESSAGE),
        ("messages/count_tokens", {"messages": CHAT["messages"]}),
    ],
)
def test_unknown_fields_are_named_in_a_header_or_refused(server, strict, path, body):
    sent = {**body, "zzz": 1, "num_ctx": {"a": 2}}
    for padding in (b"", b" " * 2**17):  # read here, and in the side process
        content = json.dumps(sent).encode() + padding
        got = server.post(content, path)
        assert got.status_code == 200 and got.headers["x-unknown-fields"] == "num_ctx, zzz"
        got = strict.post(content, path)
        assert got.status_code == 400 and "unknown field(s): num_ctx, zzz" in got.text
    counted = f'endpoint="/v1/{path}",model_name="stdlib"'
    assert f"foretoken:unknown_request_fields_total{{{counted}}}" in httpx.get(f"{server.url}/metrics").text
    assert "x-unknown-fields" not in server.post(body, path).headers


def test_many_unknown_fields(server: Running, strict: Running) -> None:
    body = {**OK, **{f"field{i}": 1 for i in range(60_000)}}
    got = server.post(body)
    assert got.status_code == 200 and got.headers["x-unknown-fields"].endswith("and 59990 more")
    got = strict.post(body)
    assert got.status_code == 400 and "known: model, " in got.text and len(got.content) < 3000


def test_unknown_fields_of_parts_and_of_streams(server: Running) -> None:
    got = server.post({**OK, "stream": True, "stream_options": {"include_usage": True, "chunk": 2}})
    assert got.status_code == 200 and got.headers["x-unknown-fields"] == "chunk"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "cache": 1}}
    got = server.post({**CHAT, "tools": [tool], "x": 1, "temperature": -1}, "chat/completions")
    assert got.status_code == 400 and got.headers["x-unknown-fields"] == "x, cache"  # named beside an error, too


def test_fields_that_would_change_the_text_are_refused_anyway(server: Running) -> None:
    assert server.post({**CHAT, "chat_template": "x"}, "chat/completions").status_code == 400
    got = server.post({**OK, "use_beam_search": True})
    assert got.status_code == 400 and "not served" in got.text
    assert server.post({**OK, "use_beam_search": False}).status_code == 200


def test_the_header_is_short_and_plain() -> None:
    assert unknown_fields_header(["a", "b", "a"]) == "a, b"
    assert unknown_fields_header(["é\n", "x" * 100]) == "\\xe9\\n, " + "x" * 60
    assert unknown_fields_header([f"f{n}" for n in range(12)]).endswith("f9, and 2 more")

"""Large bodies are read in a process of their own, and answered as if the server had read them itself."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.serve.conftest import Running, running

from foretoken import LLM
from foretoken.serve.errors import ApiError, Overloaded
from foretoken.serve.preparation import PreparedRequest
from foretoken.serve.schema import CompletionRequest
from foretoken.serve.side_process import LARGE_BODY, SideProcess, SideProcessLimits

pytestmark = pytest.mark.slow

OK = {"prompt": "def f(x):\n", "max_tokens": 8, "seed": 5}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 5}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
PADDING = b" " * LARGE_BODY  # JSON may be spaced in any way


def without_identifiers(answer: httpx.Response) -> Any:
    """The part that two answers to one request have in common."""
    body = answer.json()
    for name in ("id", "created", "metrics"):
        body.pop(name, None)
    for choice in body.get("choices", ()):
        for call in choice.get("message", {}).get("tool_calls", ()):
            call.pop("id")
    body.get("usage", {}).pop("prompt_tokens_details", None)  # the second one hits the prefix cache
    return body


@pytest.mark.parametrize(
    "path, fields",
    [
        ("completions", {}),
        ("completions", {"echo": True, "logprobs": 2}),
        ("completions", {"prompt": [1, 2, 3], "echo": True}),
        ("completions", {"prompt": ["a = ", "b = "], "n": 2}),
        ("completions", {"n": 1, "best_of": 2}),
        ("completions", {"bad_words": ["return", "x"], "max_tokens": 30}),
        (
            "completions",
            {"prediction": {"type": "content", "content": "    return x"}, "speculative_method": "prediction"},
        ),
        ("completions", {"guided_choice": ["one", "two"]}),
        ("completions", {"structured_outputs": {"regex": "[ab]{3}"}}),
        ("completions", {"logit_bias": {"10": 5.0}, "stop": ["\n"], "model": "other", "cache_salt": "a"}),
        ("completions", {"max_tokens": 0, "echo": True}),
        ("chat/completions", {"logprobs": True, "top_logprobs": 2}),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
        ("chat/completions", {"response_format": {"type": "json_object"}}),
        ("chat/completions", {"n": 2}),
    ],
)
@pytest.mark.usefixtures("preloaded_python")
def test_answers_are_those_of_small_bodies(server: Running, path: str, fields: dict[str, Any]) -> None:
    content = json.dumps({**(OK if path == "completions" else CHAT), **fields}).encode()
    small, large = server.post(content, path), server.post(content + PADDING, path)
    assert small.status_code == large.status_code == 200
    assert without_identifiers(small) == without_identifiers(large)


@pytest.mark.usefixtures("preloaded_python")
def test_streams_are_those_of_small_bodies(server: Running) -> None:
    content = json.dumps({**OK, "stream": True, "stream_options": {"include_usage": True}}).encode()
    texts = []
    for body in (content, content + PADDING):
        events = server.post(body, "completions").text.strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        texts.append("".join(choice["text"] for chunk in chunks for choice in chunk["choices"]))
        assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "content",
    [
        b"{]",
        b"[]",
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "x", "user": "\\udc00"}',
        b'{"prompt": "x", "seed": %s}' % (b"1" * 5000),
        b'{"prompt": "x", "guided_json": %s}' % (b"[" * 200 + b"]" * 200),
        *(
            json.dumps(body).encode()
            for body in (
                {},
                {"prompt": 3},
                {**OK, "suffix": "x"},
                {**OK, "temperature": "1"},
                {**OK, "model": "gpt"},
                {**OK, "n": 9},
                {**OK, "best_of": 1, "n": 2},
                {**OK, "best_of": 2, "stream": True},
                {**OK, "logprobs": 21},
                {**OK, "prompt": []},
                {**OK, "prompt": ""},
                {**OK, "prompt": [10**8]},
                {**OK, "min_tokens": 9},
                {**OK, "prompt": "x " * 9000},
                {**OK, "max_tokens": 9000},
                {**OK, "prompt": "x" * 10**6},
                {**OK, "prompt": [1] * 9000},
                {**OK, "prediction": {"type": "content", "content": "x" * 10**6}},
                {**OK, "prompt": ["x"] * 128, "n": 8},
                {**OK, "bad_words": [""]},
                {**OK, "bad_words": ["ab cd " * 600]},
                {**OK, "speculative_method": "medusa"},
                {**OK, "guided_regex": "a", "guided_choice": ["a"]},
                {**OK, "guided_regex": "("},
                {**OK, "stream_options": {}},
                {**OK, "logit_bias": {"99999999": 1}},
                {**OK, "stop_token_ids": [10**6]},
                {**CHAT, "messages": []},
                {**CHAT, "messages": [{"role": "user"}]},
                {**CHAT, "top_logprobs": 2},
                {**CHAT, "chat_template_kwargs": {"tokenize": False}},
                {**CHAT, "tool_choice": "required"},
                {**CHAT, "max_tokens": 9000},
                {**CHAT, "messages": [{"role": "user", "content": "x" * 10**6}]},
            )
        ),
    ],
)
@pytest.mark.usefixtures("preloaded_python")
def test_errors_are_those_of_small_bodies(server: Running, content: bytes) -> None:
    """Some of these bodies are large without the padding. Their errors are in ``test_errors``."""
    path = "chat/completions" if b"messages" in content else "completions"
    small, large = server.post(content, path), server.post(content + PADDING, path)
    assert small.status_code == large.status_code >= 400
    assert small.json() == large.json()


@pytest.fixture
def side_process(server: Running) -> Iterator[SideProcess]:
    """One of its own, with the server's model."""
    made = SideProcess(server.app.state.service.preparer)
    yield made
    made.close()


def prepared(side_process: SideProcess, **fields: Any) -> PreparedRequest[Any] | None:
    body = json.dumps({**OK, **fields}).encode()
    return asyncio.run(side_process.prepare(CompletionRequest, body))


@pytest.mark.usefixtures("preloaded_python")
def test_only_what_answering_needs_comes_back(side_process: SideProcess) -> None:
    words = [f"x{i}" for i in range(1000)]
    request = prepared(side_process, prompt="x" * 100, bad_words=words, user="a" * 1000)
    assert request is not None and request.bad_words is not None and len(request.bad_words) >= len(words)
    assert request.params.bad_words is None and request.body.bad_words is None and request.body.user is None
    assert request.prompts[0].text == "" and request.params.seed == 5


@pytest.mark.usefixtures("preloaded_python")
def test_a_server_starts_it_before_the_first_large_body(spare: LLM) -> None:
    with running(spare, prestarted=True) as server:
        server.until(lambda: server.app.state.service.side_process.process.pid is not None)


def test_a_process_that_died_is_started_again(side_process: SideProcess) -> None:
    assert prepared(side_process) is not None
    process = side_process.process.pid
    assert process is not None
    os.kill(process, signal.SIGKILL)
    assert prepared(side_process) is not None
    assert side_process.process.pid != process


@pytest.mark.usefixtures("preloaded_python")
def test_time_has_a_limit(server: Running) -> None:
    limited = SideProcess(server.app.state.service.preparer, SideProcessLimits(cpu_seconds=0.02))
    with pytest.raises(ApiError, match=r"the body takes more than 0.02 s or 1024 MiB to read") as caught:
        prepared(limited, bad_words=[f"word {i}" for i in range(50_000)])
    assert caught.value.status == 400
    limited.close()


@pytest.mark.usefixtures("preloaded_python")
def test_memory_has_a_limit(server: Running) -> None:
    limited = SideProcess(server.app.state.service.preparer, SideProcessLimits(memory_bytes=2**25))
    with pytest.raises(ApiError):
        prepared(limited, prompt=[1] * 10**7)
    limited.close()


@pytest.mark.usefixtures("preloaded_python")
def test_waiting_bodies_are_bounded(side_process: SideProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.serve.side_process._MAX_WAITING", 2)

    async def use() -> list[Any]:
        body = json.dumps(OK).encode()
        asked = [side_process.prepare(CompletionRequest, body) for _ in range(3)]
        return await asyncio.gather(*asked, return_exceptions=True)

    kinds = [type(result) for result in asyncio.run(use())]
    assert kinds == [PreparedRequest, PreparedRequest, Overloaded]


def test_without_a_process_the_server_reads_the_body(server: Running) -> None:
    preparer = server.app.state.service.preparer
    unpicklable = replace(preparer, tokenizer=replace(preparer.tokenizer, tokenizer=lambda text: text))
    side_process = SideProcess(unpicklable)
    assert prepared(side_process) is None and prepared(side_process) is None
    side_process.close()

"""Requests that are refused, with errors in OpenAI's shape."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from tests.serve.conftest import Running, running

from foretoken import LLM
from foretoken.core.errors import InvalidRequest
from foretoken.serve.app import create_app
from foretoken.serve.settings import ServerSettings
from foretoken.serve.worker import Worker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preloaded_python")]

OK = {"prompt": "x = ", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, whole."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize(
    "body, param, words",
    [
        ({"prompt": 3}, "prompt", "valid string"),
        ({}, "prompt", "required"),
        ({**OK, "suffix": "x"}, "suffix", "no tokens for filling in"),
        ({**OK, "temperature": -1}, "temperature", "greater than or equal to 0"),
        ({**OK, "temperature": "1"}, "temperature", "valid number"),
        ({**OK, "n": 9}, "n", "at most 8"),
        ({**OK, "n": True}, "n", "valid integer"),
        ({**OK, "best_of": 1, "n": 2}, "best_of", "at least n"),
        ({**OK, "best_of": 2, "stream": True}, "best_of", "streamed"),
        ({**OK, "logprobs": 21}, "logprobs", "at most 20"),
        ({**OK, "logit_bias": {"a": 1}}, "logit_bias", "'a' is not a token id"),
        (
            {**OK, "logit_bias": {"1": 101}},
            "logit_bias",
            "'1' is not a token id (pattern ^[0-9]{1,9}$) with a number from",
        ),
        ({**OK, "logit_bias": {"99999999": 1}}, "logit_bias", "vocabulary"),
        ({**OK, "prompt": []}, "prompt", "the prompt is empty, and this model has no token for the beginning"),
        ({**OK, "prompt": ""}, "prompt", "the prompt is empty, and this model has no token for the beginning"),
        ({**OK, "prompt": ["x", ""]}, "prompt", "the prompt is empty"),
        ({**OK, "prompt": [[5], []]}, "prompt", "the prompt is empty"),
        ({**OK, "prompt": [10**8]}, "prompt", "expected"),
        ({**OK, "prompt": "\ud800"}, None, "surrogate"),
        ({**OK, "min_tokens": 3}, "min_tokens", "exceeds max_tokens"),
        ({**OK, "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({**OK, "speculative_method": "medusa"}, "speculative_method", "loaded: draft_model, prediction, ngram"),
        ({**OK, "guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "two things"),
        ({**OK, "structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({**OK, "guided_regex": "("}, "guided_regex", "guided_regex cannot be followed"),
        ({**OK, "top_k": 2**32 + 1}, "top_k", "less than or equal to 2147483647"),
        ({**OK, "top_k": -2}, "top_k", "greater than or equal to -1"),
        ({**OK, "top_k": 10**400}, "top_k", "less than or equal to 2147483647"),
        ({**OK, "seed": 2**63}, "seed", "less than or equal to 9223372036854775807"),
        ({**OK, "seed": -(2**63) - 1}, "seed", "greater than or equal to -9223372036854775808"),
        ({**OK, "seed": 1.5}, "seed", "valid integer"),
        ({**OK, "n": 2**32 + 1}, "n", "less than or equal to"),
        ({**OK, "best_of": 2**64 + 1}, "best_of", "less than or equal to"),
        ({**OK, "min_tokens": 2**32 + 1}, "min_tokens", "less than or equal to 2147483647"),
        ({**OK, "max_tokens": 2**32 + 1}, "max_tokens", "less than or equal to 2147483647"),
        ({**OK, "logprobs": 2**32 + 1}, "logprobs", "less than or equal to 2147483647"),
        ({**OK, "priority": 2**63}, "priority", "less than or equal to 9223372036854775807"),
        ({**OK, "speculative_tokens": 4097}, "speculative_tokens", "less than or equal to 4096"),
        ({**OK, "stop_token_ids": [2**32 + 1]}, "stop_token_ids.0", "less than or equal to 2147483647"),
        ({**OK, "stop_token_ids": [10**6]}, "stop_token_ids", "vocabulary"),
        ({**OK, "logit_bias": {str(2**32 + 1): 1}}, "logit_bias", "pattern"),
        ({**OK, "logit_bias": {"5": float("nan")}}, "logit_bias", "number from -100 to 100"),
        ({**OK, "logit_bias": {"5": 10**400}}, "logit_bias", "number"),
        ({**OK, "temperature": float("inf")}, "temperature", "finite number"),
        ({**OK, "temperature": 10**400}, "temperature", "number"),
        ({**OK, "prompt": [2**32 + 1]}, "prompt.0", "less than or equal to 2147483647"),
        ({**OK, "prompt": "x " * 9000}, "prompt", "context length is 8192"),
        ({**OK, "max_tokens": 9000}, "prompt", "9000 more"),
        ({**OK, "prompt": "x" * 10**6}, "prompt", "1000000 characters; the model's context length is 8192 tokens"),
        ({**OK, "prompt": [1] * 9000}, "prompt", "9000 tokens; the model's context length is 8192 tokens"),
        (
            {**OK, "prediction": {"type": "content", "content": "x" * 10**6}},
            "prediction",
            "context length is 8192 tokens",
        ),
        (
            {**OK, "prompt": ["x"] * 128, "n": 8},
            "prompt",
            "128 prompts with n=8 are 1024 sequences, and this server holds",
        ),
        ({**OK, "prompt": ["x"] * 50, "best_of": 6}, "prompt", "300 sequences, and this server holds at most 264"),
    ],
)
def test_completions_refused(server: Running, body: Any, param: str | None, words: str) -> None:
    error = error_of(server.post(json.dumps(body).encode()), 400)
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert words in error["message"]
    assert (error["code"] == "context_length_exceeded") == ("context" in words or "more" in words)


HUGE = b'{"prompt": "x", "seed": 1%s}' % (b"0" * 5000)


@pytest.mark.parametrize(
    "body, param, words",
    [
        ({**CHAT, "messages": []}, "messages", "at least 1 item"),
        ({**CHAT, "messages": [{"role": "user"}]}, "messages.0.content", "content is missing"),
        ({**CHAT, "messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "'system', 'developer'"),
        (
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.type",
            "a part of type 'image_url' was given; only parts of type 'text'",
        ),
        (
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
            "Field required",
        ),
        (
            {**CHAT, "prediction": {"type": "content", "content": [{"type": "input_audio"}]}},
            "prediction.content.0.type",
            "'input_audio'",
        ),
        ({**CHAT, "metadata": {"a": "b", "c": 1}}, "metadata", "'c' is not a string with a string"),
        ({**CHAT, "messages": [{"role": "user", "content": "x" * 10**6}]}, "messages", "context length is 8192 tokens"),
        ({**CHAT, "audio": {}}, "audio", "only text"),
        ({**CHAT, "modalities": ["text", "audio"]}, "modalities.1", "'text'"),
        ({**CHAT, "web_search_options": {}}, "web_search_options", "does not search"),
        ({**CHAT, "functions": []}, "functions", "replaced by tools"),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({**CHAT, "max_tokens": 0}, "max_tokens", "max_tokens"),
        ({**CHAT, "response_format": {"type": "xml"}}, "response_format.type", "expected tags"),
        ({**CHAT, "chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "tokenize"),
    ],
)
def test_chat_refused(server: Running, body: Any, param: str | None, words: str) -> None:
    error = error_of(server.post(body, "chat/completions"), 400)
    assert error["param"] == param and words in error["message"]


def test_null_is_left_out(server: Running) -> None:
    nulls = {"temperature": None, "stop": None, "audio": None}
    assert server.post(CHAT | nulls, "chat/completions").status_code == 200


@pytest.mark.parametrize("content", [b"{", b"[]", b"1", b"\xff", b"", b'{"prompt": NaN}', b"[" * 100_000, HUGE])
def test_bodies_that_are_none(server: Running, content: bytes) -> None:
    assert error_of(server.post(content), 400)


DEEP, WIDE = b'{"prompt": "x", "guided_json": %s}', b'{"prompt": "x", "guided_json": {"a": [%s1]}}'


@pytest.mark.parametrize(
    "content, words",
    [
        (b'{"prompt": "\xff"}', "not UTF-8 (byte 0xff at position 12: invalid start byte); send JSON in UTF-8"),
        (b'{"prompt": "\xc3', "not UTF-8 (byte 0xc3 at position 12: unexpected end of data)"),
        ('{"prompt": "x"}'.encode("utf-16"), "not UTF-8"),
        (DEEP % (b"[" * 200 + b"]" * 200), "nests arrays and objects 201 deep; this server reads at most 128"),
        (DEEP % (b'{"a":' * 5000 + b"1" + b"}" * 5000), "nests arrays and objects 5001 deep"),
        (b"[" * 100_000, "nests arrays and objects 100000 deep"),
        (WIDE % (b"[]," * 140_000), "140006 arrays, objects and members of objects; this server reads at most 131072"),
        (b'{"prompt": "x", "seed": %s}' % (b"1" * 5000), "cannot be read: Exceeds the limit"),
        (b'{"prompt": "x", "user": "\\udc00"}', "half of a surrogate pair; send whole characters"),
        (b'{"prompt": "x"', "not JSON (Expecting ',' delimiter at character 14)"),
    ],
)
def test_bodies_that_cannot_be_read(server: Running, content: bytes, words: str) -> None:
    for path in ("completions", "chat/completions"):
        error = error_of(server.post(content, path), 400)
        assert words in error["message"]


def test_brackets_and_escapes_in_text_are_text(server: Running) -> None:
    """Text that looks deep and wide within a string, and characters beyond 16 bits as pairs of escapes."""
    text = ('[{"\\' * 400 + "🙂") * 3
    assert server.post({**OK, "prompt": text, "max_tokens": 1}).status_code == 200
    large = {**OK, "user": '[{:"\\' * 50_000 + "🙂"}
    assert server.post(large).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {**OK, "prompt": [1, "a"] * 300_000},
        {**OK, "bad_words": [1] * 600_000},
        {**OK, "stop_token_ids": ["a"] * 600_000},
        {**OK, "logit_bias": {f"x{i}": "y" for i in range(60_000)}},
        {**CHAT, "messages": [{}] * 60_000},
    ],
    ids=["prompt", "bad_words", "stop_token_ids", "logit_bias", "messages"],
)
def test_many_wrong_items_cost_no_more_than_one(server: Running, body: dict[str, Any]) -> None:
    """A complaint about each would take seconds of the event loop, and an answer as long as the request."""
    path = "chat/completions" if "messages" in body else "completions"
    before = time.process_time()  # of this process, in which the server runs: other programs cost it nothing
    answer = server.post(body, path)
    assert error_of(answer, 400) and len(answer.content) < 3000
    assert time.process_time() - before < 5.0


def test_body_of_another_kind(server: Running) -> None:
    answer = server.post(json.dumps(OK).encode(), headers={"Content-Type": "text/plain"})
    assert "application/json" in error_of(answer, 400)["message"]


def test_the_model_has_a_name(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt", prompt="x")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    assert client.completions.create(model="other", prompt="x", max_tokens=1).model == "other"
    assert server.post(OK).json()["model"] == "stdlib"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_models_are_listed_with_their_limits_and_methods(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["stdlib", "other"]
    extra = client.models.retrieve("stdlib").model_extra
    assert extra["max_model_len"] == 8192 and extra["chat"] is False
    drafter = extra["speculation"].pop("drafter")
    assert drafter.startswith("drafter: ") and drafter.endswith(", as configured (method draft_model)")
    assert extra["speculation"] == {"default": "draft_model", "methods": ["draft_model", "prediction", "ngram"]}


def test_unknown_paths_and_methods_are_refused_in_openais_shape(server: Running) -> None:
    assert error_of(httpx.get(f"{server.url}/v1/nothing"), 404)
    assert "GET /v1/completions" in error_of(httpx.get(f"{server.url}/v1/completions"), 405)["message"]


def test_health_version_metrics_and_playground_are_served(server: Running) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert set(httpx.get(f"{server.url}/version").json()) == {"version"}
    metrics = httpx.get(f"{server.url}/metrics")
    assert metrics.headers["content-type"].startswith("text/plain") and "foretoken:spec_decode" in metrics.text
    assert httpx.get(f"{server.url}/").headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("path", ["/../app.py", "/app.py", "/.", "//etc/passwd"])
def test_no_other_file_is_served(server: Running, path: str) -> None:
    response = httpx.get(f"{server.url}{path}")
    assert response.status_code in (404, 200)
    assert "create_app" not in response.text


LIMITED = ServerSettings(
    model_names=("stdlib",),
    api_keys=("secret", "größe"),
    origins=("https://page.example",),
    max_body=10_000,
    max_concurrency=2,
    chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
)
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def limited(spare: LLM) -> Iterator[Running]:
    """With keys and tight limits."""
    with running(spare, LIMITED, max_waiting=0) as found:
        yield found


def test_requests_without_a_valid_key_are_refused(limited: Running) -> None:
    for given in (None, "Bearer wrong", "secret", "Basic secret"):
        headers = {} if given is None else {"Authorization": given}
        for path in ("completions", "models"):
            answer = httpx.request("GET" if path == "models" else "POST", f"{limited.url}/v1/{path}", headers=headers)
            assert error_of(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{limited.url}/metrics").status_code == 401
    assert httpx.get(f"{limited.url}/health").status_code == httpx.get(f"{limited.url}/").status_code == 200
    assert limited.post(OK, headers=KEY).status_code == 200
    assert limited.post(OK, headers={"Authorization": "Bearer größe".encode()}).status_code == 200


def test_broken_templates_are_refused_at_the_start(spare: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"chat_template is not valid Jinja \(line 1"):
        create_app(Worker(spare), ServerSettings(chat_template="{% for m in messages %}"))


def test_a_broken_template_of_the_model_is_no_fault_of_the_messages(spare, monkeypatch):
    monkeypatch.setattr(spare.tokenizer.full, "chat_template", "{% for m in messages %}")
    with running(spare) as server:
        error = error_of(server.post(CHAT, "chat/completions"), 400)
        assert error["message"].startswith("the chat template of this model is not valid Jinja (line 1")
        assert error["message"].endswith("use /v1/completions, or start the server with --chat-template")
        assert server.post(OK).status_code == 200


def test_own_template_without_tools(limited: Running) -> None:
    assert limited.post(CHAT, "chat/completions", headers=KEY).json()["usage"]["prompt_tokens"] == 1
    tools = [{"type": "function", "function": {"name": "f"}}]
    error = error_of(limited.post({**CHAT, "tools": tools}, "chat/completions", headers=KEY), 400)
    assert "template does not mention them" in error["message"]


def test_large_bodies(limited: Running) -> None:
    large = json.dumps({**OK, "prompt": "x" * 10_000}).encode()
    answers = [
        limited.post(content, headers=KEY)
        for content in (large, iter([large[:5000], large[5000:]]), b"x" * 10_000_000, iter([b"x" * 50_000] * 200))
    ]
    assert [error_of(answer, 413)["code"] for answer in answers] == ["body_too_large"] * 4


def test_only_allowed_origins_get_cors_headers(limited: Running) -> None:
    ask = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{limited.url}/v1/completions", headers=ask)
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    answer = limited.post(OK, headers=KEY | {"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_no_origins_by_default(server: Running) -> None:
    answer = server.post(OK, headers={"Origin": "https://page.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_a_full_queue_refuses_with_a_time_to_retry(limited: Running) -> None:
    """Eight share a pass and none may wait: one beside eight is asked to come again, nine in one can never fit."""
    with limited.streaming({**LONG, "n": 8}, headers=KEY):
        answer = limited.post(OK, headers=KEY)
        assert error_of(answer, 429)["code"] == "rate_limit_exceeded" and answer.headers["retry-after"] == "1"
        with pytest.raises(openai.RateLimitError):
            openai.OpenAI(base_url=f"{limited.url}/v1", api_key="secret", max_retries=0).completions.create(
                model="stdlib", prompt="x"
            )
    error = error_of(limited.post({**OK, "n": 9}, headers=KEY), 400)
    assert error["param"] == "n" and "holds at most 8 (--max-num-seqs and --max-waiting" in error["message"]
    limited.until(limited.idle)


LONG = {"prompt": "x = ", "max_tokens": 8000, "ignore_eos": True, "speculative_tokens": 0}


def test_a_request_beyond_its_time_ends_with_an_error(limited: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    service = limited.app.state.service
    monkeypatch.setattr(service, "settings", replace(service.settings, timeout=0.5))
    assert error_of(limited.post(LONG, headers=KEY), 504)["code"] == "timeout"
    events = limited.post({**LONG, "stream": True}, headers=KEY).text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "timeout"
    limited.until(limited.idle)


def test_requests_beyond_the_allowed_number_are_refused(limited: Running) -> None:
    with limited.streaming(LONG, headers=KEY), limited.streaming(LONG, headers=KEY):
        assert error_of(limited.post(OK, headers=KEY), 429)
    limited.until(limited.idle)
    assert limited.post(OK, headers=KEY).status_code == 200

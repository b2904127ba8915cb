"""Schemathesis on our OpenAPI: whatever is sent, answers are as described, and wrong types are refused."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from tests.serve.conftest import Running, running

from foretoken import LLM
from foretoken.serve.settings import ServerSettings

OPERATIONS = (
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/health", "GET"),
    ("/metrics", "GET"),
    ("/version", "GET"),
    ("/ping", "GET"),
    ("/v1/speculation", "GET"),
    ("/v1/speculation", "POST"),
    ("/v1/speculation", "PATCH"),
    ("/ready", "GET"),
    ("/health/ready", "GET"),
    ("/health/live", "GET"),
    ("/v1/responses", "POST"),
    ("/v1/responses/{response_id}", "GET"),
    ("/v1/responses/{response_id}", "DELETE"),
    ("/v1/responses/{response_id}/cancel", "POST"),
    ("/v1/responses/{response_id}/input_items", "GET"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/v1/load_lora_adapter", "POST"),
    ("/v1/unload_lora_adapter", "POST"),
    ("/v1/save_draft", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
)


@pytest.fixture(scope="module")
def strict(spare: LLM) -> Iterator[Running]:
    """The description has the fields that are known; this server refuses all others."""
    with running(spare, ServerSettings(strict=True, stored_responses=10)) as found:
        yield found


@pytest.fixture(scope="module")
def described(strict: Running) -> Any:
    import schemathesis  # a second of every process that collects tests

    return schemathesis.openapi.from_url(f"{strict.url}/openapi.json")


CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)


LENGTHS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}


def short(path: str, body: Any) -> Any:
    """Texts of any length would be well, but not fast."""
    if isinstance(body, dict) and path in LENGTHS:
        for name in LENGTHS[path]:
            if isinstance(body.get(name), int) and body[name] > 4:
                body[name] = 4
        if path != "/v1/messages":  # where it has to be given
            body.setdefault(LENGTHS[path][0], 4)
    return body


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("path, method", OPERATIONS)
@pytest.mark.slow
def test_every_answer_is_one_that_the_schema_describes(described: Any, path: str, method: str, mode: str) -> None:
    from schemathesis import GenerationMode, checks

    if mode == "negative" and (method != "POST" or "{" in path):
        return  # there is nothing to get wrong
    wanted = [getattr(checks, name) for name in CHECKS]

    @given(case=described[path][method].as_strategy(generation_mode=GenerationMode(mode)))
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    def conforms(case: Any) -> None:
        case.body = short(path, case.body)
        case.call_and_validate(checks=wanted, timeout=30)

    conforms()


def test_every_operation_is_described(server: Running) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {(path, method.upper()) for path in paths for method in paths[path]} == set(OPERATIONS)

"""Schemathesis on our OpenAPI: whatever is sent, answers are as described, and wrong types are refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import checks

from tests.serve.conftest import Running


@pytest.fixture(scope="module")
def described(server: Running) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("described")

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


@schema.parametrize()
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_described(case: Any) -> None:
    if isinstance(case.body, dict):
        for name in ("max_tokens", "max_completion_tokens"):  # texts of any length would be well, but not fast
            if isinstance(case.body.get(name), int) and case.body[name] > 4:
                case.body[name] = 4
        case.body.setdefault("max_tokens", 4)
    case.call_and_validate(checks=CHECKS, timeout=30)


def test_what_is_described(server: Running) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert set(paths) == {
        "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}", "/health", "/metrics", "/version",
    }  # fmt: skip

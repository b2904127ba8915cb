"""Errors in OpenAI's format, {"error": {"message", "type", "param", "code"}}, and under /v1/messages in Anthropic's."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Scope

from foretoken.core.errors import ContextLengthExceeded, ForetokenError, InvalidRequest
from foretoken.serve.request_state import state_of

_log = logging.getLogger(__name__)

INVALID, CONTEXT_LENGTH = "invalid_request_error", "context_length_exceeded"
_LONGEST = 2000  # characters of a message, which may quote the request
RETRY_SECONDS = 1  # value of Retry-After; the queue moves with every finished request

_ANTHROPIC = "/v1/messages"  # beginning of its paths
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Overloaded(ForetokenError):
    """The queue is full."""


class ServerUnavailable(ForetokenError):
    """The server accepts no requests because it is shutting down or its engine has died."""


class RequestFailed(ForetokenError):
    """The engine could not finish a request."""


@dataclass(eq=False)
class ApiError(ForetokenError):
    """An error response. If ``type`` is None, it follows from the status."""

    status: int
    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """Returns OpenAI's error object."""
        kind = self.type or (INVALID if self.status < 500 else "server_error")
        return {"error": {"message": self.shown, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self, identifier: str | None) -> dict[str, Any]:
        """Returns Anthropic's error object. identifier: of the request."""
        kind = _ANTHROPIC_TYPES.get(self.status, INVALID if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.shown}, "request_id": identifier}

    @property
    def shown(self) -> str:
        """The message, at a length that can be sent."""
        return self.message if len(self.message) <= _LONGEST else f"{self.message[:_LONGEST]}..."

    def response(self, scope: Scope) -> JSONResponse:
        """Returns the answer in the format of the API that was asked."""
        anthropic = is_anthropic(scope["path"])
        body = self.anthropic_body(state_of(scope).id or None) if anthropic else self.body()
        return JSONResponse(body, self.status, headers=dict(self.headers))


def is_anthropic(path: str) -> bool:
    """Returns whether a path belongs to Anthropic's API."""
    return path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/")


class RefusedBody(HTTPException):
    """Wraps an ApiError that is raised while a body is read, because FastAPI lets only HTTPException through there."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(400, str(reason))
        self.reason = reason


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def not_served(model: str) -> ApiError:
    """Returns a 404 for the name of a model that is not served."""
    message = f"the model {model!r} is not served here; GET /v1/models lists those that are"
    return ApiError(404, message, param="model", code="model_not_found")


def too_many_requests(
    message: str, retry_seconds: int = RETRY_SECONDS, headers: Mapping[str, str] | None = None
) -> ApiError:
    headers = {"Retry-After": str(retry_seconds), **(headers or {})}
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", headers=headers)


def invalid_key(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def headers_too_large(limit: int) -> ApiError:
    message = f"the request's headers are larger than the {limit} bytes that this server takes"
    return ApiError(431, message, code="headers_too_large")


def as_api_error(error: Exception) -> ApiError:
    """Returns the error answer to an exception. An unexpected one is logged, and its text is not sent."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        code = CONTEXT_LENGTH if isinstance(error, ContextLengthExceeded) else None
        return invalid(str(error), error.param, code)
    if isinstance(error, Overloaded):
        return too_many_requests(str(error))
    if isinstance(error, ServerUnavailable):
        return ApiError(503, str(error), code="unavailable", headers={"Retry-After": str(RETRY_SECONDS)})
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than this server allows; ask for fewer tokens", code="timeout")
    if isinstance(error, RequestFailed):
        return ApiError(500, str(error))
    _log.error("a request failed unexpectedly", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says more")

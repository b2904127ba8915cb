"""The log's line of each request, as a text or, with ``--log-format json``, as an object."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import Any

from starlette.types import Message, Scope, Send

from foretoken.serve.access.granted import access_of
from foretoken.serve.request_ids import request_id
from foretoken.serve.summary import summary_of

_log = logging.getLogger(__name__)

_FIELDS = "foretoken"  # attribute of a log record: fields of its object


class RequestLog:
    """Records the status of one answer, and logs it with what became of its request."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._status: int | None = None
        self._began = time.monotonic()

    async def send(self, message: Message) -> None:
        """Sends a message of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        await self._send(message)

    def log(self, level: int) -> None:
        """Logs the request once it is over."""
        if not _log.isEnabledFor(level):
            return
        scope, seconds = self._scope, time.monotonic() - self._began
        path = scope["path"].encode("unicode_escape").decode()  # one line, whatever was sent
        status = "gone" if self._status is None else self._status
        words = "%s %s %s %.2f s %s"
        values = (scope["method"], path, status, seconds, request_id(scope))
        _log.log(level, words, *values, extra={_FIELDS: self._fields(seconds)})

    def _fields(self, seconds: float) -> dict[str, Any]:
        scope, summary = self._scope, summary_of(self._scope)
        fields: dict[str, Any] = {
            "request_id": request_id(scope),
            "method": scope["method"],
            "path": scope["path"],
            "status": self._status,
            "seconds": round(seconds, 6),
            "key": access_of(scope).name,
            "trace_id": scope.get("state", {}).get("trace_id"),
        }
        if summary is not None:
            fields |= {
                "model": summary.model,
                "finish_reason": summary.finish_reason,
                "prompt_tokens": summary.prompt_tokens,
                "cached_tokens": summary.cached_tokens,
                "completion_tokens": summary.completion_tokens,
                "queue_seconds": _rounded(summary.queue_seconds),
                "first_token_seconds": _rounded(summary.first_token_seconds),
                "speculative_method": summary.method,
                "mean_acceptance_length": round(summary.mean_acceptance_length, 4),
                "draft_acceptance_rate": round(summary.draft_acceptance_rate, 4),
            }
        return {name: value for name, value in fields.items() if value is not None}


class JsonFormatter(logging.Formatter):
    """Writes each record as an object of one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, _FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)

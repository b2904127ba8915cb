"""The log line and the OpenTelemetry trace of each request, with the semantic conventions of generative AI.

Imports OpenTelemetry only when a tracer is made.
"""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from foretoken.core.errors import InvalidRequest
from foretoken.serve.request_state import RequestSummary, state_of
from foretoken.serve.settings import packages_of_extra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

_log = logging.getLogger(__name__)

_FIELDS = "foretoken"  # attribute of a log record: fields of its object

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
_NANOSECONDS = 1e9
_TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_SUMMARY_FIELDS = ("model", "finish_reason", *_TOKENS, "queue_seconds", "first_token_seconds")
_RATES = ("mean_acceptance_length", "draft_acceptance_rate")


def log_request(scope: Scope, seconds: float, level: int) -> None:
    """Logs a request that is over, with its outcome."""
    if not _log.isEnabledFor(level):
        return
    path = scope["path"].encode("unicode_escape").decode()  # one line, whatever was sent
    state = state_of(scope)
    words = "%s %s %s %.2f s %s"
    values = (scope["method"], path, "gone" if state.status is None else state.status, seconds, state.id)
    _log.log(level, words, *values, extra={_FIELDS: _fields(scope, seconds)})


def _fields(scope: Scope, seconds: float) -> dict[str, Any]:
    """Returns the fields of a log line. Those of None are omitted."""
    state = state_of(scope)
    summary = state.summary
    fields: dict[str, Any] = {
        "request_id": state.id or None,
        "method": scope["method"],
        "path": scope["path"],
        "status": state.status,
        "seconds": seconds,
        "key": state.access.name,
        "trace_id": state.trace_id,
    }
    if summary is not None:
        fields |= {name: getattr(summary, name) for name in _SUMMARY_FIELDS}
        fields["speculative_method"] = summary.method
        fields |= {rate: round(summary.speculation[rate], 4) for rate in _RATES}
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in fields.items()
        if value is not None
    }


class JsonFormatter(logging.Formatter):
    """Writes each record as an object of one line."""

    def format(self, record: logging.LogRecord) -> str:
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


class RequestTracer:
    """Writes one span for each request that generates, with a span of each of its phases.

    processor: Receives the spans. ``to_endpoint`` makes one that sends them.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # shutdown_on_exit would wait for an endpoint that does not answer; the server shuts it down itself
        self._provider = TracerProvider(resource=Resource.create({"service.name": "foretoken"}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("foretoken")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_endpoint(cls, endpoint: str) -> RequestTracer:
        """Returns a tracer that sends spans to an OTLP collector over HTTP, such as http://localhost:4318/v1/traces.

        Raises:
            InvalidRequest: The endpoint is not an HTTP address.
            ForetokenError: OpenTelemetry is not installed.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidRequest(
                "--otlp-traces-endpoint must be an HTTP address such as http://localhost:4318/v1/traces, got "
                f"{endpoint!r}"
            )
        with packages_of_extra("otel", "traces need"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))

    def start(self, scope: Scope) -> Span:
        """Returns the span of a request. It continues the trace of the header ``traceparent``."""
        from opentelemetry.trace import SpanKind

        names = ("traceparent", "tracestate")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        parent = self._propagator.extract({name: headers[name] for name in names if name in headers})
        span = self._tracer.start_span(_OPERATIONS[scope["path"]], parent, SpanKind.SERVER)
        context = span.get_span_context()
        state_of(scope).trace_id = f"{context.trace_id:032x}"
        return span

    def end(self, span: Span, scope: Scope) -> None:
        from opentelemetry.trace import Status, StatusCode

        operation, state = _OPERATIONS[scope["path"]], state_of(scope)
        status, summary = state.status, state.summary
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "foretoken",
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "http.response.status_code": status,
            "foretoken.request_id": state.id,
            "foretoken.key": state.access.name,
        }
        if summary is not None:
            span.update_name(f"{operation} {summary.model}")
            attributes |= _attributes(summary)
            self._phases(span, summary)
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if status is None or status >= 500:
            span.set_attribute("error.type", "cancelled" if status is None else str(status))
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def close(self) -> None:
        """Sends the remaining spans."""
        self._provider.shutdown()

    def _phases(self, span: Span, summary: RequestSummary) -> None:
        from opentelemetry.trace import set_span_in_context

        now = time.time_ns()
        arrived = now - int(summary.seconds * _NANOSECONDS)
        parent = set_span_in_context(span)
        queue, first = summary.queue_seconds, summary.first_token_seconds
        phases = (("queue", 0.0, queue), ("prefill", queue, first), ("decode", first, summary.seconds))
        for name, start, end in phases:
            if start is not None and end is not None:
                times = [arrived + int(seconds * _NANOSECONDS) for seconds in (start, max(start, end))]
                self._tracer.start_span(name, parent, start_time=times[0]).end(times[1])


class TracingMiddleware:
    """ASGI middleware that traces requests that generate."""

    def __init__(self, app: ASGIApp, tracer: RequestTracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _OPERATIONS:
            await self._app(scope, receive, send)
            return
        span = self._tracer.start(scope)
        try:
            await self._app(scope, receive, send)
        finally:
            self._tracer.end(span, scope)


def _attributes(summary: RequestSummary) -> dict[str, Any]:
    """Returns the attributes of a request that generated."""
    return {
        "gen_ai.request.model": summary.model,
        "gen_ai.response.model": summary.model,
        "gen_ai.response.id": summary.id,
        "gen_ai.response.finish_reasons": None if summary.finish_reason is None else [summary.finish_reason],
        "gen_ai.usage.input_tokens": summary.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": summary.cached_tokens,
        "gen_ai.usage.output_tokens": summary.completion_tokens,
        "gen_ai.latency.time_to_first_token": summary.first_token_seconds,  # this and the next two are vLLM's
        "gen_ai.latency.time_in_queue": summary.queue_seconds,
        "gen_ai.latency.e2e": summary.seconds,
        "foretoken.speculation.method": summary.method,
        "foretoken.speculation.num_drafts": summary.speculation["num_spec_steps"],
        "foretoken.speculation.num_draft_tokens": summary.speculation["num_draft_tokens"],
        "foretoken.speculation.num_accepted_tokens": summary.speculation["num_accepted_draft_tokens"],
        "foretoken.speculation.mean_acceptance_length": summary.speculation["mean_acceptance_length"],
    }

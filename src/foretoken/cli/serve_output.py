"""Standard error of ``foretoken serve``: its address, warnings and log."""

from __future__ import annotations

import ipaddress
import logging
import socket
import sys
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.markup import escape

from foretoken.cli.grouped import option
from foretoken.cli.theme import ColorMode, console
from foretoken.core.errors import InvalidRequest
from foretoken.serve.settings import ServerSettings

if TYPE_CHECKING:
    from foretoken.serve.request_log import RequestTracer

LEVELS = ("debug", "info", "warning", "error")
TEXT, JSON = FORMATS = ("text", "json")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Logs and traces of requests."""

    log_level: str = option("info", f"{', '.join(LEVELS)}.")
    log_format: str = option(TEXT, f"{' or '.join(FORMATS)}.")
    otlp_traces_endpoint: str | None = option(
        None, "OpenTelemetry collector that traces are sent to. [none]", metavar="URL"
    )

    def check(self) -> None:
        """Raises InvalidRequest for unknown values."""
        for name, value, known in (
            ("--log-level", self.log_level, LEVELS),
            ("--log-format", self.log_format, FORMATS),
        ):
            if value not in known:
                raise InvalidRequest(f"{name} must be one of {', '.join(known)}, got {value!r}")

    def tracing(self) -> AbstractContextManager[RequestTracer | None]:
        """Returns a context with what sends traces, None without a collector. Raises ForetokenError."""
        if self.otlp_traces_endpoint is None:
            return nullcontext()
        from foretoken.serve.request_log import RequestTracer

        return closing(RequestTracer.to_endpoint(self.otlp_traces_endpoint))


def start_log(level: str, log_format: str) -> None:
    """Logs our messages, and uvicorn's warnings, to standard error."""
    from rich.logging import RichHandler

    from foretoken.serve.request_log import JsonFormatter

    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if log_format == JSON:
        handler.setFormatter(JsonFormatter())
    elif sys.stderr.isatty():
        handler = RichHandler(console=console(ColorMode.AUTO, stderr=True), show_path=False, log_time_format="%X")
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:  # a file: RichHandler would fold its lines
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-8s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("foretoken").setLevel(level.upper())


def announce(settings: ServerSettings, listening: socket.socket, tls: bool, log_format: str) -> None:
    """Tells where the server is, and warns if it is open to everybody."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"{'https' if tls else 'http'}://{shown}:{port}"
    keys = bool(settings.api_keys or settings.key_file)
    warning = (
        ""
        if keys or is_loopback(host)
        else "anyone who reaches this machine can use the model; --api-key asks for a key"
    )
    if log_format == JSON:
        _log.info("%s at %s/v1", settings.model_names[0], url)
        if warning:
            _log.warning(warning)
        return
    out = console(ColorMode.AUTO, stderr=True)
    out.print(f"{escape(settings.model_names[0])} at [bold]{escape(url)}/v1[/bold]", soft_wrap=True)
    out.print(f"playground at [bold]{escape(url)}/[/bold]; Ctrl-C ends", soft_wrap=True)
    if warning:
        out.print(f"warning: {warning}", style="yellow", soft_wrap=True)


def is_loopback(host: str) -> bool:
    """Returns whether an address is reached from this machine alone."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback

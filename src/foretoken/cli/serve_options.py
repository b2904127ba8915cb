"""Options of ``foretoken serve``, one dataclass for each topic, and its messages on standard error."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from foretoken.cli.grouped import option
from foretoken.cli.options import MaxModelLen, RuntimeOptions, TensorParallel, WeightFormat
from foretoken.cli.theme import ColorMode, console
from foretoken.core.checks import parse_size, shown
from foretoken.core.errors import InvalidRequest
from foretoken.serve.settings import ServerSettings, TlsFiles, is_loopback, tls_files

if TYPE_CHECKING:
    from foretoken.serve.request_log import RequestTracer


LORA_MODULES = "--lora-modules"
METHODS = "prediction,ngram,suffix"  # take no memory until a request asks for them


@dataclass(frozen=True, kw_only=True)
class OfferOptions:
    """Further models and methods."""

    model_config: Path | None = option(None, "JSON file that lists several models to serve, each with its own options.")
    methods: str = option(METHODS, "More methods that requests may choose, separated by commas; empty for none.")

    @property
    def names(self) -> tuple[str, ...]:
        """The methods that requests may choose beside the default."""
        return tuple(filter(None, map(str.strip, self.methods.split(","))))


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """API keys, browsers, host names and TLS."""

    api_key: list[str] | None = option(None, "A key that clients need; may be repeated.", envvar="FORETOKEN_API_KEY")
    allow_origin: list[str] | None = option(None, "Origin whose pages may use the API; may be repeated.")
    allowed_host: list[str] | None = option(
        None, "Host name that clients may use, such as a proxy's; may be repeated. [loopback's names]"
    )
    ssl_certfile: Path | None = option(None, "TLS certificate chain, in PEM. [no TLS]")
    ssl_keyfile: Path | None = option(None, "Its private key. [in the certificate's file]")
    ssl_ca_certs: Path | None = option(None, "Certificates that sign those of clients.")
    ssl_cert_reqs: int = option(0, "Certificates of clients: 0 none, 1 optional, 2 required.", min=0, max=2)

    def check(self) -> None:
        """Raises InvalidRequest for an empty key."""
        if not all(self.api_key or ()):
            raise InvalidRequest("--api-key must not be empty; leave it out to serve without keys")

    def tls(self) -> TlsFiles | None:
        """Returns the certificates, None without TLS. Raises InvalidRequest."""
        return tls_files(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs, self.ssl_cert_reqs)


@dataclass(frozen=True, kw_only=True)
class NameOptions:
    """Names of the model and of its adapters, and its chat template."""

    served_model_name: list[str] | None = option(None, "What clients call the model; may be repeated. [--model]")
    lora_modules: list[str] | None = option(
        None, "LoRA adapter that requests choose as their model; may be repeated.", metavar="NAME=PATH"
    )
    chat_template: Path | None = option(None, "A Jinja template in place of the tokenizer's own.")

    def names(self, model: str | None) -> tuple[str, ...]:
        return tuple(self.served_model_name or [model or "foretoken"])

    def adapters(self, model: str | None) -> dict[str, str]:
        """Returns the paths of the LoRA adapters by name. Raises InvalidRequest."""
        loras = adapters(self.lora_modules or ())
        if clash := loras.keys() & {*self.names(model)}:
            raise InvalidRequest(f"--lora-modules names {min(clash)!r}, which is a name of the model; choose another")
        return loras


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Limits of the engine, of requests and of stored responses."""

    max_num_seqs: int = option(16, "Sequences in one forward pass; more wait.", min=1)
    max_waiting: int = option(256, "Sequences that may wait; further requests get status 429.", min=0)
    max_model_len: MaxModelLen = None
    kv_cache_memory_bytes: str | None = option(
        None, "Memory of the KV cache, such as 2GiB. [no limit]", metavar="BYTES"
    )
    max_num_batched_tokens: int | None = option(
        None, "Prompt tokens in one step. [limits the latency of others]", min=1
    )
    max_body: str = option("4MiB", "Largest body of a request.", metavar="BYTES")
    response_store: str | None = option(
        None,
        "Responses of /v1/responses to keep in memory: a number of them, or a size such as 256MiB. [none]",
        metavar="N|BYTES",
    )
    drain_timeout: float = option(
        30.0, "Seconds that running requests have to finish when the server shuts down.", min=0
    )

    def engine(self) -> dict[str, Any]:
        """Returns arguments of ``LLM``. Raises InvalidRequest."""
        memory = self.kv_cache_memory_bytes
        return {
            "max_num_seqs": self.max_num_seqs,
            "max_model_len": self.max_model_len,
            "kv_cache_memory_bytes": None if memory is None else size_in_bytes("--kv-cache-memory-bytes", memory),
            "max_num_batched_tokens": self.max_num_batched_tokens or "auto",
        }


@dataclass(frozen=True, kw_only=True)
class ServerRuntimeOptions(RuntimeOptions):
    """Number formats, devices and random numbers of the models."""

    weight_format: WeightFormat = "raw"
    backend: str = option("auto", "auto, native or hf.")
    tensor_parallel_size: TensorParallel = 1
    seed: int | None = option(None, "For requests without a seed of their own. [a random one]")
    adapt: str | None = option(
        None, "Share of idle time in which the draft model or head learns from requests, such as 10%. [none]"
    )

    def engine(self) -> dict[str, Any]:
        """Returns arguments of ``LLM``."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return vars(self) | {"seed": seed, "adapt": self.adapt or False}


def size_in_bytes(option: str, text: str) -> int:
    """Returns a size such as 2GiB, 512MB or 1000000 in bytes. Units are powers of 1024. Raises InvalidRequest."""
    size = parse_size(text)
    if not size:
        raise InvalidRequest(f"{option} must be a size such as 2GiB or 512MiB, got {text!r}")
    return size


def response_store(text: str | None) -> dict[str, Any]:
    """Returns the settings for --response-store: a number without a unit counts responses. Raises InvalidRequest."""
    if text is None:
        return {}
    if not text.strip().isdigit():
        return {"stored_bytes": size_in_bytes("--response-store", text)}
    if int(text) < 1:
        raise InvalidRequest("--response-store must be at least 1; leave it out to keep none")
    return {"stored_responses": int(text)}


def adapters(given: Sequence[str]) -> dict[str, str]:
    """Returns the paths of adapters by name.

    Args:
        given: Texts of the form NAME=PATH, or as in vLLM JSON objects with "name" and "path".

    Raises:
        InvalidRequest: A text is of neither form, or a name is given twice.
    """
    listed: dict[str, str] = {}
    for text in given:
        name, path = _adapter_in_json(text) if text.startswith("{") else text.partition("=")[::2]
        if not name or not path:
            raise InvalidRequest(f"{LORA_MODULES} takes NAME=PATH, got {shown(text)}")
        if name in listed:
            raise InvalidRequest(f"{LORA_MODULES} names two adapters {name!r}; give each its own name")
        listed[name] = path
    return listed


def is_adapter(text: str) -> bool:
    """Returns whether an argument has the form of an adapter: NAME=PATH or a JSON object."""
    return text.startswith("{") or (not text.startswith("-") and "=" in text)


def checked_adapters(value: Any) -> Mapping[str, str]:
    """Returns the adapters of a model in a configuration file. Raises InvalidRequest."""
    if isinstance(value, dict) and all(name and isinstance(path, str) and path for name, path in value.items()):
        return value
    raise InvalidRequest(f"lora_modules must be an object of paths by name, got {shown(value)}")


def _adapter_in_json(text: str) -> tuple[str, str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "", ""
    name, path = (value.get(key) for key in ("name", "path"))
    return (name, path) if isinstance(name, str) and isinstance(path, str) else ("", "")


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
        for name, value, known in (("--log-level", self.log_level, LEVELS), ("--log-format", self.log_format, FORMATS)):
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

"""Options of ``foretoken serve``, one dataclass for each topic."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.options import MaxModelLen, RuntimeOptions, TensorParallel, WeightFormat
from foretoken.core.checks import parse_size, shown
from foretoken.core.errors import InvalidRequest
from foretoken.serve.listening import TlsFiles, tls_files

LORA_MODULES = "--lora-modules"
METHODS = "prediction,ngram,suffix"  # take no memory until a request asks for them


@dataclass(frozen=True, kw_only=True)
class OfferOptions:
    """Further models and methods."""

    model_config: Annotated[
        Path | None, typer.Option(help="JSON file that lists several models to serve, each with its own options.")
    ] = None
    methods: Annotated[
        str, typer.Option(help="More methods that requests may choose, separated by commas; empty for none.")
    ] = METHODS

    @property
    def names(self) -> tuple[str, ...]:
        """The methods that requests may choose beside the default."""
        return tuple(filter(None, map(str.strip, self.methods.split(","))))


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """API keys, browsers, host names and TLS."""

    api_key: Annotated[
        list[str] | None, typer.Option(envvar="FORETOKEN_API_KEY", help="A key that clients need; may be repeated.")
    ] = None

    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may use the API; may be repeated.")
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name that clients may use, such as a proxy's; may be repeated. [loopback's names]"),
    ] = None
    ssl_certfile: Annotated[Path | None, typer.Option(help="TLS certificate chain, in PEM. [no TLS]")] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its private key. [in the certificate's file]")] = None
    ssl_ca_certs: Annotated[Path | None, typer.Option(help="Certificates that sign those of clients.")] = None
    ssl_cert_reqs: Annotated[
        int, typer.Option(min=0, max=2, help="Certificates of clients: 0 none, 1 optional, 2 required.")
    ] = 0

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

    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be repeated. [--model]")
    ] = None
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="LoRA adapter that requests choose as their model; may be repeated."),
    ] = None
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja template in place of the tokenizer's own.")] = None

    def names(self, model: str | None) -> tuple[str, ...]:
        """Returns the names of the model."""
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

    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences in one forward pass; more wait.")] = 16
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Sequences that may wait; further requests get status 429.")
    ] = 256
    max_model_len: MaxModelLen = None
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Memory of the KV cache, such as 2GiB. [no limit]")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens in one step. [limits the latency of others]")
    ] = None
    max_body: Annotated[str, typer.Option(metavar="BYTES", help="Largest body of a request.")] = "4MiB"
    response_store: Annotated[
        str | None,
        typer.Option(
            metavar="N|BYTES",
            help="Responses of /v1/responses to keep in memory: a number of them, or a size such as 256MiB. [none]",
        ),
    ] = None
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests have to finish when the server shuts down.")
    ] = 30.0

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
    backend: Annotated[str, typer.Option(help="auto, native or hf.")] = "auto"
    tensor_parallel_size: TensorParallel = 1
    seed: Annotated[int | None, typer.Option(help="For requests without a seed of their own. [a random one]")] = None

    def engine(self) -> dict[str, Any]:
        """Returns arguments of ``LLM``."""
        return vars(self) | {"seed": secrets.randbits(63) if self.seed is None else self.seed}


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

"""Options of ``foretoken serve``, one dataclass for each topic."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.lora import adapters
from foretoken.cli.options import MaxModelLen, RuntimeOptions, TensorParallel, WeightFormat
from foretoken.core.checks import parse_size
from foretoken.core.errors import InvalidRequest
from foretoken.engine.chat_template import read_template
from foretoken.serve.key_file import read_keys
from foretoken.serve.listening import TlsFiles, tls_files
from foretoken.serve.parsers.formats import check_parsers

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
    """API keys and their rights."""

    api_key: Annotated[
        list[str] | None, typer.Option(envvar="FORETOKEN_API_KEY", help="A key that clients need; may be repeated.")
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of API keys with scopes and limits; see foretoken keys.")
    ] = None
    allow_admin: Annotated[
        bool,
        typer.Option(
            help="Let clients without a key of the scope admin switch speculation. [on loopback without keys]"
        ),
    ] = False
    share_cache_across_keys: Annotated[
        bool, typer.Option(help="Let different keys share cached prompts and drafts from each other's outputs.")
    ] = False

    def check(self) -> None:
        """Raises InvalidRequest for an empty key."""
        if not all(self.api_key or ()):
            raise InvalidRequest("--api-key must not be empty; leave it out to serve without keys")

    @property
    def keyed(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_key or self.api_key_file)

    def settings(self) -> dict[str, Any]:
        """Returns fields of ``ServerSettings``. Raises InvalidRequest for a bad file of keys."""
        if self.api_key_file is not None:
            read_keys(self.api_key_file)
        return {
            "api_keys": tuple(self.api_key or ()),
            "key_file": self.api_key_file,
            "share_cache_across_keys": self.share_cache_across_keys,
        }


@dataclass(frozen=True, kw_only=True)
class ChatFormatOptions:
    """Names of the model, and the formats of its conversations."""

    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be repeated. [--model]")
    ] = None
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="LoRA adapter that requests choose as their model; may be repeated."),
    ] = None
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja template in place of the tokenizer's own.")] = None
    tool_call_parser: Annotated[
        str | None, typer.Option(help="How the model writes function calls. [what the chat template shows]")
    ] = None
    reasoning_parser: Annotated[
        str | None, typer.Option(help="How the model writes reasoning; none if it does not. [what the template shows]")
    ] = None

    def names(self, model: str | None) -> tuple[str, ...]:
        """Returns the names of the model."""
        return tuple(self.served_model_name or [model or "foretoken"])

    def adapters(self, model: str | None) -> dict[str, str]:
        """Returns the paths of the LoRA adapters by name. Raises InvalidRequest."""
        loras = adapters(self.lora_modules or ())
        if clash := loras.keys() & {*self.names(model)}:
            raise InvalidRequest(f"--lora-modules names {min(clash)!r}, which is a name of the model; choose another")
        return loras

    def settings(self) -> dict[str, Any]:
        """Returns fields of ``ServerSettings``. Raises InvalidRequest."""
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        return {
            "chat_template": read_template(self.chat_template),
            "tool_call_parser": self.tool_call_parser,
            "reasoning_parser": self.reasoning_parser,
        }


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Browsers, host names and TLS."""

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

    def tls(self) -> TlsFiles | None:
        """Returns the certificates, None without TLS. Raises InvalidRequest."""
        return tls_files(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs, self.ssl_cert_reqs)


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Limits of the engine and of requests."""

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
    body_timeout: Annotated[float, typer.Option(min=0, help="Seconds in which a request's body has to arrive.")] = 60.0
    request_timeout: Annotated[float, typer.Option(min=0, help="Seconds that a request may take.")] = 600.0
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests have to finish when the server shuts down.")
    ] = 30.0

    def engine(self) -> dict[str, Any]:
        """Returns arguments of ``LLM``. Raises InvalidRequest."""
        return {
            "max_num_seqs": self.max_num_seqs,
            "max_model_len": self.max_model_len,
            "kv_cache_memory_bytes": size_in_bytes("--kv-cache-memory-bytes", self.kv_cache_memory_bytes),
            "max_num_batched_tokens": self.max_num_batched_tokens or "auto",
        }

    def settings(self) -> dict[str, Any]:
        """Returns fields of ``ServerSettings``. Raises InvalidRequest."""
        return {
            "max_body": size_in_bytes("--max-body", self.max_body),
            "body_timeout": self.body_timeout,
            "timeout": self.request_timeout,
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


@dataclass(frozen=True, kw_only=True)
class ResponseOptions:
    """Storage of responses, and strictness."""

    response_store: Annotated[
        str | None,
        typer.Option(
            metavar="N|BYTES",
            help="Responses of /v1/responses to keep in memory: a number of them, or a size such as 256MiB. [none]",
        ),
    ] = None
    strict: Annotated[
        bool, typer.Option(help="Refuse unknown fields of requests, which are ignored with a warning header otherwise.")
    ] = False

    def settings(self) -> dict[str, Any]:
        """Returns fields of ``ServerSettings``. Raises InvalidRequest."""
        return {"strict": self.strict, **response_store(self.response_store)}


def size_in_bytes(option: str, text: str | None) -> int | None:
    """Returns a size such as 2GiB, 512MB or 1000000 in bytes. Units are powers of 1024. Raises InvalidRequest."""
    if text is None:
        return None
    size = parse_size(text)
    if not size:
        raise InvalidRequest(f"{option} must be a size such as 2GiB or 512MiB, got {text!r}")
    return size


def response_store(text: str | None) -> dict[str, int | None]:
    """Returns the settings for --response-store: a number without a unit counts responses. Raises InvalidRequest."""
    if text is None or not text.strip().isdigit():
        return {"stored_bytes": size_in_bytes("--response-store", text)}
    if int(text) < 1:
        raise InvalidRequest("--response-store must be at least 1; leave it out to keep none")
    return {"stored_responses": int(text)}

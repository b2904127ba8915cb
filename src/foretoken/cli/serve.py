"""``foretoken serve``: the APIs of OpenAI and Anthropic, and the playground."""

from __future__ import annotations

import secrets
import socket
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.generate import speculative
from foretoken.cli.lora import adapters
from foretoken.cli.options import (
    Device,
    DraftModel,
    Dtype,
    KVCacheDtype,
    MaxModelLen,
    Quantization,
    Speculation,
    Target,
    TensorParallel,
    WeightFormat,
    following,
    load,
)
from foretoken.cli.serve_models import ModelEntry, read_models, serve_models
from foretoken.cli.serve_output import FORMATS, LEVELS, TEXT, announce, check_log, is_loopback, start_log
from foretoken.cli.serve_replicas import scale, serve_replicas
from foretoken.cli.theme import ColorMode
from foretoken.core.checks import parse_size
from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.serve.access.records import read_keys
from foretoken.serve.hosts import allowed_hosts
from foretoken.serve.listening import bind
from foretoken.serve.parsers.formats import check_parsers
from foretoken.serve.tls import tls_files

if TYPE_CHECKING:
    from foretoken.llm import LLM
    from foretoken.serve.limits import ServerSettings
    from foretoken.serve.tracing import RequestTracer

METHODS = "prediction,ngram,suffix"  # take no memory until a request asks for them


def serve(
    model: Target = None,
    draft_model: DraftModel = None,
    speculative_config: Speculation = None,
    model_config: Annotated[
        Path | None, typer.Option(help="JSON file that lists several models to serve, each with its own options.")
    ] = None,
    methods: Annotated[
        str, typer.Option(help="More methods that requests may choose, separated by commas; empty for none.")
    ] = METHODS,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="FORETOKEN_API_KEY", help="A key that clients need; may be repeated.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of API keys with scopes and limits; see foretoken keys.")
    ] = None,
    allow_admin: Annotated[
        bool,
        typer.Option(
            help="Let clients without a key of the scope admin switch speculation. [on loopback without keys]"
        ),
    ] = False,
    share_cache_across_keys: Annotated[
        bool, typer.Option(help="Let different keys share cached prompts and drafts from each other's outputs.")
    ] = False,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be repeated. [--model]")
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="LoRA adapter that requests choose as their model; may be repeated."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja template in place of the tokenizer's own.")
    ] = None,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="How the model writes function calls. [what the chat template shows]")
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="How the model writes reasoning; none if it does not. [what the template shows]")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may use the API; may be repeated.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name that clients may use, such as a proxy's; may be repeated. [loopback's names]"),
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="TLS certificate chain, in PEM. [no TLS]")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its private key. [in the certificate's file]")] = None,
    ssl_ca_certs: Annotated[Path | None, typer.Option(help="Certificates that sign those of clients.")] = None,
    ssl_cert_reqs: Annotated[
        int, typer.Option(min=0, max=2, help="Certificates of clients: 0 none, 1 optional, 2 required.")
    ] = 0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences in one forward pass; more wait.")] = 16,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Sequences that may wait; further requests get status 429.")
    ] = 256,
    max_model_len: MaxModelLen = None,
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Memory of the KV cache, such as 2GiB. [no limit]")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens in one step. [limits the latency of others]")
    ] = None,
    max_body: Annotated[str, typer.Option(metavar="BYTES", help="Largest body of a request.")] = "4MiB",
    body_timeout: Annotated[float, typer.Option(min=0, help="Seconds in which a request's body has to arrive.")] = 60.0,
    request_timeout: Annotated[float, typer.Option(min=0, help="Seconds that a request may take.")] = 600.0,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests have to finish when the server shuts down.")
    ] = 30.0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    quantization: Quantization = None,
    weight_format: WeightFormat = "raw",
    kv_cache_dtype: KVCacheDtype = "auto",
    backend: Annotated[str, typer.Option(help="auto, native or hf.")] = "auto",
    tensor_parallel_size: TensorParallel = 1,
    seed: Annotated[int | None, typer.Option(help="For requests without a seed of their own. [a random one]")] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Engines behind this address, on Ray Serve. [one, in this process]")
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Start up to this many under load. [--replicas]")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Ray cluster for replicas, such as auto or HOST:6379. [one of its own]")
    ] = None,
    replica_cpus: Annotated[float | None, typer.Option(help="Cores of each replica. [a fair share]")] = None,
    replica_gpus: Annotated[float | None, typer.Option(min=0, help="GPUs of each replica. [none]")] = None,
    response_store: Annotated[
        str | None,
        typer.Option(
            metavar="N|BYTES",
            help="Responses of /v1/responses to keep in memory: a number of them, or a size such as 256MiB. [none]",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Refuse unknown fields of requests, which are ignored with a warning header otherwise.")
    ] = False,
    log_level: Annotated[str, typer.Option(help=f"{', '.join(LEVELS)}.")] = "info",
    log_format: Annotated[str, typer.Option(help=f"{' or '.join(FORMATS)}.")] = TEXT,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="OpenTelemetry collector that traces are sent to. [none]")
    ] = None,
) -> None:
    """Serve the model over the APIs of OpenAI and Anthropic, with a playground at /."""
    check_log(log_level, log_format)
    if not all(api_key or ()):
        raise InvalidRequest("--api-key must not be empty; leave it out to serve without keys")
    replica_scale = scale(replicas, max_replicas, ray_address, replica_cpus, replica_gpus)
    if replica_scale is not None and tensor_parallel_size > 1:
        raise InvalidRequest("--replicas and --tensor-parallel-size cannot be combined; choose one")
    if replica_scale is not None and response_store is not None:
        raise InvalidRequest("--replicas and --response-store cannot be combined: responses are kept by one process")
    loras = adapters(lora_modules or ())
    entries = _entries(
        model_config, model or draft_model or served_model_name or loras, replica_scale, tensor_parallel_size
    )
    check_parsers(tool_call_parser, reasoning_parser)
    if clash := loras.keys() & {*(served_model_name or [model or "foretoken"])}:
        raise InvalidRequest(f"--lora-modules names {min(clash)!r}, which is a name of the model; choose another")
    keyed = bool(api_key or api_key_file)
    if api_key_file is not None:
        read_keys(api_key_file)  # a bad file is refused before the model is loaded
    tls = tls_files(ssl_certfile, ssl_keyfile, ssl_ca_certs, ssl_cert_reqs)
    config = speculative(speculative_config)
    options = {
        "speculative_config": config,
        "methods": _others(methods, config),
        "dtype": dtype,
        "device": device,
        "quantization": quantization,
        "weight_format": weight_format,
        "kv_cache_dtype": kv_cache_dtype,
        "backend": backend,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "kv_cache_memory_bytes": size_in_bytes("--kv-cache-memory-bytes", kv_cache_memory_bytes),
        "enable_prefix_caching": True,
        "max_num_batched_tokens": max_num_batched_tokens or "auto",
        "tensor_parallel_size": tensor_parallel_size,
        "seed": secrets.randbits(63) if seed is None else seed,
        "isolate_failures": True,
        "lora": loras,
    }
    served: dict[str, Any] = {
        "model_names": tuple(served_model_name or [model or "foretoken"]),
        "lora_modules": loras,
        "api_keys": tuple(api_key or ()),
        "key_file": api_key_file,
        "share_cache_across_keys": share_cache_across_keys,
        "chat_template": _text(chat_template) if chat_template is not None else None,
        "tool_call_parser": tool_call_parser,
        "reasoning_parser": reasoning_parser,
        "origins": tuple(allow_origin or ()),
        "max_body": size_in_bytes("--max-body", max_body),
        "body_timeout": body_timeout,
        "timeout": request_timeout,
        "strict": strict,
        **_response_store(response_store),
    }
    if following(tensor_parallel_size):
        load(model, draft_model, ColorMode.AUTO, **options)  # returns when the first process ends
    with bind(host, port) as listening:
        bound = listening.getsockname()[0]
        hosts = allowed_hosts(host, bound, keyed, allowed_host or ())
        admin = allow_admin or (not keyed and is_loopback(bound))
        settings = _settings(**served, hosts=hosts, allow_admin=admin)
        start_log(log_level, log_format)
        tracer = _tracer(otlp_traces_endpoint)
        started = partial(announce, settings, listening, tls is not None, log_format)
        server_options = {"drain_timeout": drain_timeout, "announce": started, "tls": tls}
        try:
            if replica_scale is not None:
                engine = {"model": model, "draft_model": draft_model, "options": options, "max_waiting": max_waiting}
                verbose = log_level == "debug"
                serve_replicas(engine, replica_scale, settings, listening, tracer, verbose, server_options)
                return
            if entries:
                names = tuple(name for entry in entries for name in entry.names)
                settings = replace(settings, model_names=names)
                server_options["announce"] = partial(announce, settings, listening, tls is not None, log_format)
                serve_models(entries, options, settings, max_waiting, listening, tracer, server_options)
                return
            with closing(load(model, draft_model, ColorMode.AUTO, **options)) as llm:
                _serve(llm, settings, listening, max_waiting, tracer, server_options)
        finally:
            if tracer is not None:
                tracer.close()


def _serve(
    llm: LLM,
    settings: ServerSettings,
    listening: socket.socket,
    max_waiting: int,
    tracer: RequestTracer | None,
    server_options: dict[str, Any],
) -> None:
    from foretoken.serve.app import create_app
    from foretoken.serve.run import Server
    from foretoken.serve.worker import Worker

    worker = Worker(llm, max_waiting=max_waiting)
    app = create_app(worker, settings, tracer)
    Server(app, worker, **server_options).run(sockets=[listening])
    if worker.dead is not None:
        raise ForetokenError(f"the engine stopped working: {worker.dead}")


def _entries(file: Path | None, other: Any, replica_scale: Any, tensor_parallel_size: int) -> list[ModelEntry]:
    """Returns the models of --model-config, none without it. Raises InvalidRequest."""
    if file is None:
        return []
    if other:
        raise InvalidRequest(
            "--model-config names the models; leave out --model, --draft-model, --served-model-name and --lora-modules"
        )
    if replica_scale is not None or tensor_parallel_size > 1:
        raise InvalidRequest("--model-config cannot be combined with --replicas or --tensor-parallel-size")
    return read_models(file)


def _tracer(endpoint: str | None) -> RequestTracer | None:
    """Returns what sends traces to an endpoint. Raises ForetokenError."""
    if endpoint is None:
        return None
    from foretoken.serve.tracing import RequestTracer

    return RequestTracer.to_endpoint(endpoint)


def _settings(**given: Any) -> ServerSettings:
    """Returns the settings. Raises ForetokenError if the server's packages are missing."""
    try:
        from foretoken.serve.limits import ServerSettings
    except ImportError as error:
        raise ForetokenError(
            f"the server needs packages that are not installed ({error.name}); pip install 'foretoken[serve]'"
        ) from error
    return ServerSettings(**given)


def _others(methods: str, config: dict[str, Any] | None) -> tuple[str, ...]:
    """Returns the methods that requests may choose beside the default."""
    usual = (config or {}).get("method")
    return tuple(name for name in filter(None, map(str.strip, methods.split(","))) if name != usual)


def size_in_bytes(option: str, text: str | None) -> int | None:
    """Returns a size such as 2GiB, 512MB or 1000000 in bytes. Units are powers of 1024. Raises InvalidRequest."""
    if text is None:
        return None
    size = parse_size(text)
    if not size:
        raise InvalidRequest(f"{option} must be a size such as 2GiB or 512MiB, got {text!r}")
    return size


def _response_store(text: str | None) -> dict[str, int | None]:
    """Returns the settings for --response-store: a number without a unit counts responses. Raises InvalidRequest."""
    if text is None or not text.strip().isdigit():
        return {"stored_bytes": size_in_bytes("--response-store", text)}
    if int(text) < 1:
        raise InvalidRequest("--response-store must be at least 1; leave it out to keep none")
    return {"stored_responses": int(text)}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the chat template {file}: {error}; expected a text file in UTF-8") from error

"""``foretoken serve``: the APIs of OpenAI and Anthropic, and the playground."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import PositionalModelOptions, following, load
from foretoken.cli.serve_engines import ModelEntry, models_app, read_models, replicas_app
from foretoken.cli.serve_options import (
    AccessOptions,
    LimitOptions,
    LogOptions,
    NameOptions,
    OfferOptions,
    ServerRuntimeOptions,
    announce,
    response_store,
    size_in_bytes,
    start_log,
)
from foretoken.cli.theme import ColorMode
from foretoken.core.errors import InvalidRequest
from foretoken.engine.prompts import read_template
from foretoken.serve.key_file import read_keys
from foretoken.serve.parsers.formats import check_parsers
from foretoken.serve.replicas import ReplicaScale
from foretoken.serve.settings import AppOptions, ServerSettings, allowed_hosts, bind, is_loopback, packages_of_extra

if TYPE_CHECKING:
    from fastapi import FastAPI

    from foretoken.serve.request_log import RequestTracer
    from foretoken.serve.server import Servable


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """All options of the command."""

    models: PositionalModelOptions
    offer: OfferOptions
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is all of them.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", min=0, max=65535)
    access: AccessOptions
    names: NameOptions
    limits: LimitOptions
    runtime: ServerRuntimeOptions
    replicas: ReplicaScale
    server: AppOptions
    log: LogOptions

    def check(self) -> None:
        """Raises InvalidRequest for options that contradict each other."""
        self.log.check()
        self.access.check()
        divided, models, named = self.runtime.tensor_parallel_size > 1, self.models, self.names
        if self.replicas.replicas is not None:
            if divided:
                raise InvalidRequest("--replicas and --tensor-parallel-size cannot be combined; choose one")
            if self.limits.response_store is not None:
                raise InvalidRequest(
                    "--replicas and --response-store cannot be combined: responses are kept by one process"
                )
        if self.offer.model_config is None:
            return
        if models.model or models.draft_model or named.served_model_name or named.lora_modules:
            raise InvalidRequest(
                "--model-config names the models; omit --model, --draft-model, --served-model-name and --lora-modules"
            )
        if divided or self.replicas.replicas is not None:
            raise InvalidRequest("--model-config cannot be combined with --replicas or --tensor-parallel-size")

    def engine(self) -> dict[str, Any]:
        """Returns the arguments of ``LLM`` beside the models. Raises InvalidRequest."""
        return {
            "speculative_config": self.models.config,
            "methods": self.offer.names,
            "enable_prefix_caching": True,
            "isolate_failures": True,
            "lora": self.names.adapters(self.models.model),
            **self.runtime.engine(),
            **self.limits.engine(),
        }

    def settings(self) -> ServerSettings:
        """Returns the settings apart from those that depend on the address. Raises InvalidRequest."""
        names, server = self.names, self.server
        check_parsers(server.tool_call_parser, server.reasoning_parser)
        if server.key_file is not None:
            read_keys(server.key_file)
        return ServerSettings(
            **vars(server),
            model_names=names.names(self.models.model),
            lora_modules=names.adapters(self.models.model),
            chat_template=read_template(names.chat_template),
            api_keys=tuple(self.access.api_key or ()),
            origins=tuple(self.access.allow_origin or ()),
            max_body=size_in_bytes("--max-body", self.limits.max_body),
            **response_store(self.limits.response_store),
        )


@grouped
def serve(options: ServeOptions) -> None:
    """Serve the model over the APIs of OpenAI and Anthropic, with a playground at /."""
    options.check()
    models, access, log = options.models, options.access, options.log
    entries = [] if options.offer.model_config is None else read_models(options.offer.model_config)
    settings, tls, engine = options.settings(), access.tls(), options.engine()
    if entries:
        settings = replace(settings, model_names=tuple(name for entry in entries for name in entry.names))
    if following(options.runtime.tensor_parallel_size):
        load(models.model, models.draft_model, ColorMode.AUTO, **engine)  # returns when the first process ends
    with bind(options.host, options.port) as listening:
        bound = listening.getsockname()[0]
        with packages_of_extra("serve", "the server needs"):
            import fastapi  # noqa: F401  # the app needs it, whose other imports would delay the errors before it starts

            import foretoken.serve.limits  # noqa: F401
        keyed = bool(settings.api_keys or settings.key_file)
        settings = replace(
            settings,
            hosts=allowed_hosts(options.host, bound, keyed, access.allowed_host or ()),
            allow_admin=settings.allow_admin or (not keyed and is_loopback(bound)),
        )
        start_log(log.log_level, log.log_format)
        with log.tracing() as tracer, _opened(options, engine, entries, settings, tracer) as (app, workers):
            from foretoken.serve.server import Server

            announced = partial(announce, settings, listening, tls is not None, log.log_format)
            Server(app, workers, options.limits.drain_timeout, announced, tls).run(sockets=[listening])
    gc.freeze()  # the interpreter's last garbage collection would search all modules, which takes seconds


def _opened(
    options: ServeOptions,
    engine: dict[str, Any],
    entries: list[ModelEntry],
    settings: ServerSettings,
    tracer: RequestTracer | None,
) -> AbstractContextManager[tuple[FastAPI, Sequence[Servable]]]:
    """Returns a context with the app and what answers its requests."""
    models, limits = options.models, options.limits
    if options.replicas.replicas is None:
        alone = ModelEntry(models.model, models.draft_model, tuple(settings.model_names))
        return models_app(entries or [alone], engine, settings, limits.max_waiting, tracer)
    replica = {
        "model": models.model,
        "draft_model": models.draft_model,
        "options": engine,
        "max_waiting": limits.max_waiting,
    }
    return replicas_app(
        replica, options.replicas, settings, tracer, options.log.log_level == "debug", limits.drain_timeout
    )

"""Engines that ``foretoken serve`` answers with: several models (``--model-config``), or replicas on Ray Serve."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.options import load
from foretoken.cli.serve_options import LimitOptions, ServerRuntimeOptions, checked_adapters, size_in_bytes
from foretoken.cli.theme import ColorMode, console, waiting
from foretoken.core.checks import check_keys, integer, shown
from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.engine.prompts import read_template
from foretoken.serve.parsers.formats import check_parsers
from foretoken.serve.replicas import ReplicaScale, keep_to_itself
from foretoken.serve.settings import ServerSettings, packages_of_extra

if TYPE_CHECKING:
    from fastapi import FastAPI

    from foretoken.serve.request_log import RequestTracer
    from foretoken.serve.server import Servable


_log = logging.getLogger(__name__)

_ENGINE = (
    *("speculative_config", "methods"),
    *(option.name for option in fields(ServerRuntimeOptions) if option.name != "tensor_parallel_size"),
    *LimitOptions().engine(),
)
_SETTINGS = ("chat_template", "tool_call_parser", "reasoning_parser")
_KEYS = ("model", "draft_model", "served_model_name", "max_waiting", "lora_modules", *_ENGINE, *_SETTINGS)


@dataclass(frozen=True)
class ModelEntry:
    """One served model."""

    model: str | None  # see ``LLM``
    draft_model: str | None  # see ``LLM``
    names: tuple[str, ...]  # what clients call it
    max_waiting: int | None = None  # see ``Worker``; None takes the option's
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of ``LLM`` that differ from the options
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings that differ from the options


def read_models(file: Path) -> list[ModelEntry]:
    """Returns the models of a file. Raises InvalidRequest."""
    try:
        document = json.loads(file.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"cannot read --model-config {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"--model-config {file} is not JSON in UTF-8: {error}") from error
    if not isinstance(document, list) or not document:
        raise InvalidRequest(f"--model-config {file} must be a list of at least one object, each with a model")
    entries = []
    for number, given in enumerate(document, 1):
        try:
            entries.append(_entry(given, file.parent))
        except InvalidRequest as error:
            raise InvalidRequest(f"model {number} of {file}: {error}") from error
    names = [name for entry in entries for name in (*entry.names, *entry.options.get("lora", ()))]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidRequest(f"{file} names two models {twice[0]!r}; give each its own served_model_name")
    return entries


@contextmanager
def models_app(
    entries: list[ModelEntry],
    options: dict[str, Any],
    settings: ServerSettings,
    max_waiting: int,
    tracer: RequestTracer | None,
) -> Iterator[tuple[FastAPI, Sequence[Servable]]]:
    """Loads all models, and yields their app and workers. Raises ForetokenError if an engine stopped working."""
    if len(entries) > 1:
        tell_memory(entries)
    with ExitStack() as stack:
        every = [{**options, **entry.options} for entry in entries]
        llms = [
            stack.enter_context(closing(load(entry.model, entry.draft_model, ColorMode.AUTO, **own)))
            for entry, own in zip(entries, every, strict=True)
        ]
        from foretoken.serve.app import create_model_group
        from foretoken.serve.worker import Worker

        limits = (max_waiting if entry.max_waiting is None else entry.max_waiting for entry in entries)
        workers = [Worker(llm, max_waiting=limit) for llm, limit in zip(llms, limits, strict=True)]
        each = [
            replace(settings, model_names=entry.names, lora_modules=own["lora"], **entry.settings)
            for entry, own in zip(entries, every, strict=True)
        ]
        yield create_model_group(workers, each, settings, tracer), workers
        for worker in workers:
            if worker.dead is not None:
                raise ForetokenError(f"an engine stopped working: {worker.dead}")


def tell_memory(entries: list[ModelEntry]) -> None:
    """Logs the size of all weights beside the free memory, before any is read."""
    import torch

    from foretoken.core.devices import FreeMemory
    from foretoken.models.formats.checkpoint import resolve

    sizes = {}
    for entry in entries:
        folders = [resolve(name) for name in (entry.model, entry.draft_model) if name not in (None, "auto")]
        sizes[entry.names[0]] = sum(_weights(folder) for folder in folders)
    listed = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in sizes.items())
    memory = FreeMemory(torch.device("cpu"))()
    free = "" if memory is None else f"; {memory.free / 2**30:.1f} GiB of memory are free"
    _log.info("weights as stored: %s, %.1f GiB together%s", listed, sum(sizes.values()) / 2**30, free)


def _weights(path: Path) -> int:
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def _entry(given: Any, folder: Path) -> ModelEntry:
    if not isinstance(given, dict):
        raise InvalidRequest(f"it must be an object, got {shown(given)}")
    check_keys("it", given, _KEYS)
    for name in ("model", "draft_model", "tool_call_parser", "reasoning_parser", "chat_template"):
        if not isinstance(given.get(name, ""), str):
            raise InvalidRequest(f"{name} must be a text, got {shown(given[name])}")
    if not given.get("model"):
        raise InvalidRequest("it has no model")
    names = given.get("served_model_name", given["model"])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidRequest(f"served_model_name must be a name or a list of names, got {shown(names)}")
    integer("max_waiting", given.get("max_waiting"), 0, optional=True)
    check_parsers(given.get("tool_call_parser"), given.get("reasoning_parser"))
    options = {name: given[name] for name in _ENGINE if name in given}
    if isinstance(size := options.get("kv_cache_memory_bytes"), str):
        options["kv_cache_memory_bytes"] = size_in_bytes("kv_cache_memory_bytes", size)
    if "lora_modules" in given:
        options["lora"] = checked_adapters(given["lora_modules"])
    settings = {name: given[name] for name in _SETTINGS if name in given}
    if "chat_template" in settings:
        settings["chat_template"] = read_template(folder / settings["chat_template"])
    return ModelEntry(
        given["model"], given.get("draft_model"), tuple(names), given.get("max_waiting"), options, settings
    )


@contextmanager
def replicas_app(
    engine: dict[str, Any],
    scale: ReplicaScale,
    settings: ServerSettings,
    tracer: RequestTracer | None,
    verbose: bool,
    drain_timeout: float,
) -> Iterator[tuple[FastAPI, Sequence[Servable]]]:
    """Starts replicas, yields the app and its one worker in front of them, and ends them.

    engine: Arguments of ``ReplicaConfig``.
    """
    if scale.address is None:
        keep_to_itself()
    with packages_of_extra("ray", "replicas need"):
        from foretoken.serve.replicas import deploy
    from foretoken.serve.replicas.front import Front, create_front
    from foretoken.serve.replicas.replica import ReplicaConfig

    config = ReplicaConfig(**engine, settings=settings, created=int(time.time()))
    spinner = waiting(console(ColorMode.AUTO, stderr=True), f"starting {scale.minimum} replicas", silent=True)
    with deploy.replicas(config, scale, drain_timeout, spinner, verbose) as answering:
        settings = replace(settings, max_concurrency=scale.maximum * config.max_requests)
        front = Front(answering, settings)
        yield create_front(front, settings, tracer), [front]

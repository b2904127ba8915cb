"""State that the routes of one app share, and the path of a request from a route into the engine."""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from foretoken.core.errors import InvalidRequest
from foretoken.serve.administration import ServedAdapters, SpeculationControl
from foretoken.serve.answer_types import ServedModel
from foretoken.serve.chat_schema import StoredContent
from foretoken.serve.errors import ApiError, ServerUnavailable, not_served
from foretoken.serve.generation import Generation
from foretoken.serve.json_body import read_object
from foretoken.serve.metrics import Metrics
from foretoken.serve.preparation import PreparedRequest, RequestPreparer, StoredContentNeeded, as_sent
from foretoken.serve.request_state import state_of
from foretoken.serve.response_store import ResponseStore
from foretoken.serve.schema import Body, Sampling
from foretoken.serve.settings import ServerSettings
from foretoken.serve.side_process import LARGE_BODY, SideProcess
from foretoken.serve.stream import AnswerWriter, respond
from foretoken.serve.token_text import TokenText
from foretoken.serve.worker import Worker

B = TypeVar("B", bound=Body)


class Service:
    """State that the routes of one app share."""

    def __init__(self, worker: Worker, settings: ServerSettings) -> None:
        self.worker, self.settings = worker, settings
        self.metrics = Metrics(settings.model_names[0], lambda: worker.engine.usage, worker.method_of)
        self.speculation = SpeculationControl(worker, self.metrics, settings.model_names[0])
        self.adapters = ServedAdapters(worker, settings.model_names, dict(settings.lora_modules))
        self.token_text = TokenText(worker.llm.tokenizer)
        self.responses = ResponseStore(settings.stored_responses, settings.stored_bytes)
        self.created = int(time.time())
        self.preparer = RequestPreparer(
            tokenizer=worker.llm.requests.prompt_tokenizer,
            settings=settings,
            max_model_len=worker.llm.target.max_length,
            capacity=worker.capacity,
        )
        self.side_process = SideProcess(self.preparer) if os.name == "posix" else None
        worker.listeners.append(self.metrics.on_steps)

    def start(self) -> None:
        """Starts the worker, and the side process before the first large body, which would wait for it."""
        self.worker.start()
        if self.side_process is not None:
            self.side_process.start()

    def close(self) -> None:
        self.worker.abandon()
        self.worker.close()
        if self.side_process is not None:
            self.side_process.close()

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that requests may give as their model: first the model's, then its adapters'."""
        return (*self.settings.model_names, *self.adapters.paths)

    def serves(self, name: str) -> bool:
        """Returns whether requests may give this name as their model."""
        return name in self.served_names

    def served_name(self, model: str | None) -> str:
        """Returns the model's name in the answer. Raises a 404 ApiError for a model that is not served."""
        if model is not None and model not in self.served_names:
            raise not_served(model)
        return model or self.settings.model_names[0]

    def model(self, name: str) -> ServedModel:
        """Returns the entry of /v1/models. Raises ApiError."""
        llm = self.worker.llm
        return {
            "id": self.served_name(name),
            "object": "model",
            "created": self.created,
            "owned_by": "foretoken",
            "root": self.adapters.paths.get(name, llm.model),
            "parent": self.settings.model_names[0] if name in self.adapters.paths else None,
            "max_model_len": self.preparer.max_model_len,
            "chat": self.preparer.marks_turns,
            "speculation": {"default": llm.methods[0], "methods": list(llm.methods), "drafter": llm.drafter},
        }

    def names(self, request: Request) -> list[str]:
        """Returns the names of the model that the request's key may use."""
        access = state_of(request.scope).access
        return [name for name in self.served_names if access.may_use(name)]

    def check_allowed(self, name: str | None, request: Request) -> None:
        """Raises a 404 ApiError if the request's key may not use the model of this name; None is the first one."""
        name = name or self.settings.model_names[0]
        names = self.names(request)
        if name in self.served_names and name not in names:
            allowed = ", ".join(names) or "none of those that are served here"
            message = f"this key may not use the model {name!r}; it may use: {allowed}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def read_large(self, kind: type[Body], body: bytes, request: Request) -> PreparedRequest[Any] | None:
        """Prepares a large body in the side process; None if there is none. Raises ApiError or Overloaded."""
        if self.side_process is None:
            return None
        try:
            return await self.side_process.prepare(kind, body)
        except StoredContentNeeded as needed:
            earlier = self.responses.find(needed.references, state_of(request.scope).key)
            return await self.side_process.prepare(kind, body, earlier)

    async def prepare(self, body: B, request: Request) -> PreparedRequest[B]:
        """Returns the prepared request, with the salt that holds for its client. Raises ApiError or InvalidRequest."""
        name = getattr(body, "model", None)
        self.served_name(name)
        lora = name if name in self.adapters.paths else None  # while the name is known to be served
        self.check_allowed(name, request)
        ready: PreparedRequest[B] | None = getattr(request.state, "prepared", None)
        if ready is None:
            ready = await self._prepare(body, request)
        state = state_of(request.scope)
        state.unknown_fields += ready.unknown
        if state.unknown_fields:
            self.metrics.on_unknown_fields(request.url.path, len(set(state.unknown_fields)))
        if (identifier := getattr(body, "request_id", None)) is not None and not state.id_given:
            state.id = identifier
        salt = state.effective_salt(getattr(body, "cache_salt", None))
        if getattr(body, "cache_prompt", None) is False:
            salt = secrets.token_hex(16)  # a new scope, in which nothing is cached yet
        return replace(ready, params=replace(ready.params, cache_salt=salt, lora=lora))

    async def generate(
        self, prefix: str, body: Sampling, make_writer: Callable[[PreparedRequest[Any]], AnswerWriter], request: Request
    ) -> Response:
        """Answers a request that generates. prefix: beginning of the answer's identifier."""
        prepared = await self.prepare(body, request)
        generation = await self._begin(prefix, prepared, request)
        return await respond(prepared.body.streams, generation, make_writer(prepared), request.receive)

    async def _prepare(self, body: B, request: Request) -> PreparedRequest[B]:
        content = await request.body()
        earlier: StoredContent | None = None
        if references := getattr(body, "references", lambda: None)():
            earlier = self.responses.find(references, state_of(request.scope).key)
            if earlier.size > LARGE_BODY and self.side_process is not None:
                ready = await self.side_process.prepare(type(body), content, earlier)
                if ready is not None:
                    return replace(ready, unknown=())  # they were noted when this process read the body
        prepare = partial(self.preparer.prepare, body, earlier)
        return await self.worker.run_in_thread(prepare, len(content) + (earlier.size if earlier else 0))

    async def _begin(self, prefix: str, prepared: PreparedRequest[Any], request: Request) -> Generation:
        """Queues a request. Raises InvalidRequest, Overloaded or ServerUnavailable."""
        params, body = prepared.params, prepared.body
        if params.logprobs is not None or params.prompt_logprobs is not None or params.explain:
            await self.worker.run_in_thread(lambda: self.token_text.pieces)
        try:
            generation = await self.worker.submit(
                [prompt.ids for prompt in prepared.prompts],
                params,
                prepared.bad_words,
                priority=body.priority,
                identifier=f"{prefix}{body.request_id or uuid4().hex}",
                model=self.served_name(body.model),
                timeout=self.settings.timeout,
                metrics=self.metrics,
                names=prepared.names,
            )
        except InvalidRequest as error:
            raise as_sent(error, prepared.names) from error
        generation.shown = prepared.max_tokens > 0
        state_of(request.scope).reporter = generation.summary
        return generation


class Services:
    """The services of all models behind one address. The first is that of requests that name no model."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services, self.first = tuple(services), services[0]
        for service in services:
            service.adapters.changing, service.responses = self.first.adapters.changing, self.first.responses
            service.adapters.name_in_use += [other.serves for other in services if other is not service]

    def __iter__(self) -> Iterator[Service]:
        return iter(self._services)

    def of(self, name: Any) -> Service:
        """Returns the service of a model; the first for a value that is no name. Raises a 404 ApiError if none is."""
        if not isinstance(name, str):
            return self.first
        if (service := self.serving(name)) is None:
            raise not_served(name)
        return service

    def serving(self, name: str) -> Service | None:
        """Returns the service of a name; None if it is not served."""
        return next((service for service in self if service.serves(name)), None)

    async def of_body(self, body: bytes) -> Service:
        """Returns the service of a body that was not parsed yet. Raises a 404 ApiError."""
        return self.of((await read_object(body)).get("model")) if len(self._services) > 1 else self.first

    def check_alive(self) -> None:
        """Raises ServerUnavailable if an engine does not run."""
        if not all(service.worker.alive for service in self):
            raise ServerUnavailable("the engine is not running")

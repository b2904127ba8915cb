"""The FastAPI app: routes, and how requests get from them into the engine."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from foretoken import __version__
from foretoken.core.errors import ForetokenError
from foretoken.serve.chat import ChatWriter
from foretoken.serve.chat_schema import ChatRequest
from foretoken.serve.completions import CompletionWriter
from foretoken.serve.errors import RefusedBody, ServerUnavailable, add_handlers
from foretoken.serve.generation import Generation
from foretoken.serve.intake import Intake, PreparedRequest
from foretoken.serve.json_body import read
from foretoken.serve.limits import LimitsMiddleware, ServerSettings, effective_salt
from foretoken.serve.metrics import Metrics
from foretoken.serve.responses import ChatCompletion, Completion, Error, Health, ModelList, ServedModel, Version
from foretoken.serve.schema import CompletionRequest, Generate
from foretoken.serve.side_process import LARGE_BODY, SideProcess
from foretoken.serve.stream import respond
from foretoken.serve.token_text import TokenText
from foretoken.serve.worker import Worker

PLAYGROUND = Path(__file__).parent / "playground"

_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_STREAM: dict[str, Any] = {"text/event-stream": {}}

B = TypeVar("B", bound=Generate)


def playground() -> dict[str, Path]:
    """Returns the files of the playground by their URL paths."""
    files = {f"/{file.name}": file for file in sorted(PLAYGROUND.glob("*")) if file.is_file() and file.suffix != ".py"}
    if "/index.html" in files:
        files["/"] = files["/index.html"]
    return files


def open_paths() -> frozenset[str]:
    """Returns the paths that need no API key."""
    return frozenset({"/health", *playground()})


def create_app(worker: Worker, settings: ServerSettings | None = None) -> FastAPI:
    """Returns the app of a worker. Its lifespan starts and closes the worker."""
    settings = settings or ServerSettings()
    service = Service(worker, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        if service.side_process is not None:
            service.side_process.start()  # before the first large body, which would wait for it
        yield
        worker.abandon()
        worker.close()
        if service.side_process is not None:
            service.side_process.close()

    app = FastAPI(
        title="Foretoken",
        summary="OpenAI's API with exact speculative decoding",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    add_handlers(app)
    guarded = [Security(HTTPBearer(auto_error=False))] if settings.api_keys else []
    app.include_router(_generating(service), prefix="/v1", dependencies=guarded)
    app.include_router(_listing(service), dependencies=guarded)
    for path, file in playground().items():
        app.add_route(path, _page(file), methods=["GET"], include_in_schema=False)
    app.add_middleware(LimitsMiddleware, settings=settings, open_paths=open_paths())
    if settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


class Service:
    """The state that the routes of one app share."""

    def __init__(self, worker: Worker, settings: ServerSettings) -> None:
        self.worker, self.settings = worker, settings
        self.metrics = Metrics(settings.model_names[0], lambda: worker.engine.usage, worker.method_of)
        self.token_text = TokenText(worker.llm.tokenizer)
        self.created = int(time.time())
        self.intake = Intake(
            tokenizer=worker.llm.requests.prompt_tokenizer,
            settings=settings,
            max_model_len=worker.llm.target.max_length,
            capacity=worker.capacity,
        )
        self.side_process = SideProcess(self.intake) if os.name == "posix" else None
        worker.listeners.append(self.metrics.on_steps)

    def model(self, name: str) -> ServedModel:
        """Returns the entry of /v1/models. Raises ApiError."""
        llm = self.worker.llm
        return {
            "id": self.intake.served_name(name),
            "object": "model",
            "created": self.created,
            "owned_by": "foretoken",
            "max_model_len": self.intake.max_model_len,
            "speculation": {"default": llm.methods[0], "methods": list(llm.methods)},
        }

    async def prepared(self, body: B, request: Request) -> PreparedRequest[B]:
        """Returns the prepared request, with the salt that holds for its client. Raises ApiError or InvalidRequest."""
        ready: PreparedRequest[B] | None = getattr(request.state, "prepared", None)
        if ready is None:
            prepare = partial(self.intake.prepared, body)
            ready = await self.worker.run_in_thread(prepare, len(await request.body()))
        salt = effective_salt(request.scope, body.cache_salt)
        return replace(ready, params=replace(ready.params, cache_salt=salt))

    async def begin(self, kind: str, prepared: PreparedRequest[Any]) -> Generation:
        """Queues a request. kind: beginning of its identifier. Raises InvalidRequest, Overloaded, ServerUnavailable."""
        params, body = prepared.params, prepared.body
        if params.logprobs is not None or params.prompt_logprobs is not None or params.explain:
            await self.worker.run_in_thread(self.token_text.load)
        generation = await self.worker.submit(
            [prompt.ids for prompt in prepared.prompts],
            params,
            prepared.bad_words,
            priority=body.priority,
            kind=kind,
            model=self.intake.served_name(body.model),
            timeout=self.settings.timeout,
            metrics=self.metrics,
        )
        generation.shown = prepared.max_tokens > 0
        return generation


def _errors(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": Error} for code in codes}


def _generating(service: Service) -> APIRouter:
    router = APIRouter(route_class=_BodyRoute, responses=_errors(400, 401, 403, 404, 408, 413, 429, 431, 500, 503, 504))

    @router.post("/completions", responses={200: {"model": Completion, "content": _STREAM}}, response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        prepared = await service.prepared(body, request)
        generation = await service.begin("cmpl", prepared)
        writer = CompletionWriter(prepared, service.token_text)
        return await respond(prepared.body, generation, writer, service.token_text, request.receive)

    @router.post(
        "/chat/completions", responses={200: {"model": ChatCompletion, "content": _STREAM}}, response_model=None
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Write the next message of a conversation."""
        prepared = await service.prepared(body, request)
        generation = await service.begin("chatcmpl", prepared)
        writer = ChatWriter(prepared, service.token_text)
        return await respond(prepared.body, generation, writer, service.token_text, request.receive)

    return router


class _BodyRoute(APIRoute):
    """A route whose body is read by ``parse``, or, if it is large, by the side process."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI's custom request classes."""
        handle = super().get_route_handler()
        assert self.body_field is not None
        kind: Any = self.body_field.field_info.annotation

        async def handler(request: Request) -> Response:
            return await handle(_BodyRequest(kind, request))

        return handler


class _BodyRequest(Request):
    def __init__(self, kind: type[Generate], request: Request) -> None:
        super().__init__(request.scope, request.receive)
        self._kind = kind

    async def json(self) -> Any:
        body, side_process = await self.body(), self.app.state.service.side_process
        try:
            if side_process is not None and len(body) > LARGE_BODY:
                prepared = await side_process.prepared(self._kind, body)
                if prepared is not None:
                    self.state.prepared = prepared
                    return prepared.body
            return await read(body)
        except ForetokenError as error:
            raise RefusedBody(error) from error


def _listing(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models", responses=_errors(401, 403))
    async def models() -> ModelList:
        """List the served models and their methods of speculation."""
        return {"object": "list", "data": [service.model(name) for name in service.settings.model_names]}

    @router.get("/v1/models/{name:path}", responses=_errors(401, 403, 404))
    async def model(name: str) -> ServedModel:
        """Describe one served model."""
        return service.model(name)

    @router.get("/health", responses=_errors(403, 503))
    async def health() -> Health:
        """Tell whether requests are accepted."""
        if not service.worker.alive:
            raise ServerUnavailable("the engine is not running")
        if service.worker.draining:
            raise ServerUnavailable("the server is shutting down")
        return {"status": "ok"}

    @router.get(
        "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, **_errors(401, 403)}
    )
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        body, kind = service.metrics.render()
        return Response(body, headers={"Content-Type": kind})

    @router.get("/version", responses=_errors(401, 403))
    async def version() -> Version:
        """Return the version of the server."""
        return {"version": __version__}

    return router


def _page(file: Path) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        return FileResponse(file, headers=_PAGE_HEADERS)

    return page

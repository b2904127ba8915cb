"""The FastAPI apps of one model, and of several behind one address: routes, middlewares and error handlers."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from foretoken import __version__
from foretoken.core.errors import ForetokenError
from foretoken.engine.prompts import check_template
from foretoken.serve.errors import ApiError, RefusedBody, ServerUnavailable, as_api_error, not_served
from foretoken.serve.json_body import read_object, validation_error
from foretoken.serve.keyring import RATE_HEADERS, SPECULATION, UNLOAD_LORA, KeyRing
from foretoken.serve.limits import LimitsMiddleware, replayed
from foretoken.serve.metrics import MergedMetrics
from foretoken.serve.request_log import RequestTracer, TracingMiddleware
from foretoken.serve.request_state import RequestIdMiddleware, state_of
from foretoken.serve.routes import (
    administration_routes,
    completion_routes,
    health_routes,
    listing_routes,
    message_routes,
    stored_routes,
)
from foretoken.serve.service import Service
from foretoken.serve.settings import ServerSettings
from foretoken.serve.worker import Worker

LIVE = "/health/live"
HEALTH_PATHS = ("/health", "/ping", "/ready", "/health/ready", LIVE)
PLAYGROUND = Path(__file__).parent / "playground"

_METHODS = {"/ping": ["GET", "POST"], SPECULATION: ["GET", "PATCH", "POST"]}  # of paths that take more than GET
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def playground() -> dict[str, Path]:
    """Returns the files of the playground by their URL paths."""
    files = {f"/{file.name}": file for file in sorted(PLAYGROUND.glob("*")) if file.is_file() and file.suffix != ".py"}
    if "/index.html" in files:
        files["/"] = files["/index.html"]
    return files


Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(
    worker: Worker, settings: ServerSettings | None = None, tracer: RequestTracer | None = None, guarded: bool = True
) -> FastAPI:
    """Returns the app of a worker. Its lifespan starts and closes the worker.

    Raises InvalidRequest if the key file of the settings cannot be read, or their chat template is not valid Jinja.

    guarded: Whether the app checks keys and limits; not so behind an app that has.
    """
    settings = settings or ServerSettings()
    if settings.chat_template is not None:
        check_template(settings.chat_template, "chat_template")
    service = Service(worker, settings)
    summary = "The APIs of OpenAI and Anthropic with exact speculative decoding"
    app, keys = _bare_app(settings, lifespan=lambda app: _running(worker, service), summary=summary)
    app.state.service = service
    dependencies = [Security(HTTPBearer(auto_error=False))] if keys.asks else []
    makers = (completion_routes, stored_routes, message_routes, listing_routes, health_routes, administration_routes)
    for routes in makers:
        app.include_router(routes(service), dependencies=dependencies)
    for path, file in playground().items():
        app.add_route(path, _page(file), methods=["GET"], include_in_schema=False)
    if guarded:
        _add_middlewares(app, settings, keys, tracer)
    return app


@asynccontextmanager
async def _running(worker: Worker, service: Service) -> AsyncIterator[None]:
    worker.start()
    if service.side_process is not None:
        service.side_process.start()  # before the first large body, which would wait for it
    yield
    worker.abandon()
    worker.close()
    if service.side_process is not None:
        service.side_process.close()


def create_gateway(
    settings: ServerSettings,
    tracer: RequestTracer | None,
    routes: Mapping[str, Endpoint],
    forward: ASGIApp,
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    """Returns an app in front of other apps, which checks keys, rates, bodies and concurrency.

    Raises InvalidRequest if the key file of the settings cannot be read.

    routes: Endpoints of the paths that it answers itself. forward: Answers all other HTTP requests.
    """
    app, keys = _bare_app(settings, lifespan=lifespan, openapi_url=None)
    for path, endpoint in routes.items():
        app.add_route(path, endpoint, methods=_METHODS.get(path, ["GET"]))

    async def forwarding(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await forward(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    app.router.default = forwarding
    _add_middlewares(app, settings, keys, tracer)
    return app


def _bare_app(settings: ServerSettings, **options: Any) -> tuple[FastAPI, KeyRing]:
    """Returns an app without routes, which answers errors in the format of the API that was asked, and its keys."""
    app = FastAPI(title="Foretoken", version=__version__, docs_url=None, redoc_url=None, **options)
    app.state.keys = keys = KeyRing(settings.api_keys, settings.key_file, settings.allow_admin)
    for kind in (ForetokenError, TimeoutError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _error_answer)
    return app, keys


def _add_middlewares(app: FastAPI, settings: ServerSettings, keys: KeyRing, tracer: RequestTracer | None) -> None:
    """Adds the checks before every request, traces, CORS, and identifiers of requests, the first of them innermost."""
    open_paths = frozenset({*HEALTH_PATHS, *playground()})  # need no API key
    app.add_middleware(LimitsMiddleware, settings=settings, open_paths=open_paths, keys=keys)
    if tracer is not None:
        app.add_middleware(TracingMiddleware, tracer=tracer)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-Unknown-Fields", "Retry-After", *RATE_HEADERS],
        )
    app.add_middleware(RequestIdMiddleware)


async def _error_answer(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestValidationError):
        return validation_error(error.errors(), error.body).response(request.scope)
    if not isinstance(error, HTTPException):
        return as_api_error(error).response(request.scope)
    if isinstance(error, RefusedBody):
        return as_api_error(error.reason).response(request.scope)
    where = f"{request.method} {request.url.path}"
    words = {404: f"there is no {request.url.path} here", 405: f"{where} is not possible with this method"}
    message = words.get(error.status_code, str(error.detail))
    code = "body_too_large" if error.status_code == 413 else None
    return ApiError(error.status_code, message, code=code, headers=error.headers or {}).response(request.scope)


def _page(file: Path) -> Endpoint:
    async def page(request: Request) -> Response:
        return FileResponse(file, headers=_PAGE_HEADERS)

    return page


_MODELS, _RESPONSES = "/v1/models", "/v1/responses/"


def create_model_group(
    workers: Sequence[Worker],
    model_settings: Sequence[ServerSettings],
    settings: ServerSettings,
    tracer: RequestTracer | None = None,
) -> FastAPI:
    """Returns the app of several models. The first is that of requests that name none.

    ``model_settings`` has the settings of each worker's model, ``settings`` the server's, with the names of all models.
    Raises InvalidRequest if the key file of the settings cannot be read.
    """
    apps = [
        create_app(worker, app_settings, guarded=False)
        for worker, app_settings in zip(workers, model_settings, strict=True)
    ]
    dispatch = _Dispatch(apps)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for inner in apps:
                await stack.enter_async_context(inner.router.lifespan_context(inner))
            yield

    async def health(request: Request) -> Response:
        if not all(worker.alive for worker in workers):
            raise ServerUnavailable("an engine is not running")
        if any(worker.draining for worker in workers) and request.url.path != LIVE:
            raise ServerUnavailable("the server is shutting down")
        return JSONResponse({"status": "ok"})

    routes = {**dict.fromkeys(HEALTH_PATHS, health), _MODELS: dispatch.models, "/metrics": dispatch.metrics}
    return create_gateway(settings, tracer, routes, dispatch, lifespan)


class _Dispatch:
    """Passes each request to the app of its model."""

    def __init__(self, apps: Sequence[FastAPI]) -> None:
        self._apps = tuple(apps)
        self._services: list[Service] = [app.state.service for app in apps]
        services = self._services
        for service in services:
            service.adapters.changing = services[0].adapters.changing
            service.adapters.name_in_use += [other.serves for other in services if other is not service]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()  # the middleware has read it, within its limits
        app = await self._app(scope, body)
        await app({**scope, "app": app}, replayed(body, receive), send)

    async def models(self, request: Request) -> Response:
        """Lists the models that the request's key may use."""
        listed = [service.model(name) for service in self._services for name in service.names(request)]
        return JSONResponse({"object": "list", "data": listed})

    async def metrics(self, request: Request) -> Response:
        """Returns metrics for Prometheus, which are labelled by model."""
        return MergedMetrics(service.metrics.collect() for service in self._services).render()

    async def _app(self, scope: Scope, body: bytes) -> FastAPI:
        """Returns the app of a request. Raises a 404 ApiError if none serves its model."""
        path, name = scope["path"], None
        if path.startswith(_RESPONSES):
            return self._storing(path.removeprefix(_RESPONSES).partition("/")[0], scope)
        if path.startswith(f"{_MODELS}/"):
            name = path.removeprefix(f"{_MODELS}/")
        elif scope["method"] == "GET":
            name = next(iter(parse_qs(scope["query_string"].decode("latin-1")).get("model", ())), None)
        elif body:
            name = (await read_object(body)).get("lora_name" if path == UNLOAD_LORA else "model")
        if not isinstance(name, str):
            return self._apps[0]
        for app, service in zip(self._apps, self._services, strict=True):
            if service.serves(name):
                return app
        raise not_served(name)

    def _storing(self, identifier: str, scope: Scope) -> FastAPI:
        """Returns the app that stores a response; the first if none does."""
        for app, service in zip(self._apps, self._services, strict=True):
            try:
                service.responses.get(identifier, state_of(scope).key)
            except ApiError:
                continue
            return app
        return self._apps[0]

"""The FastAPI app of one model or several: routes, middlewares and error handlers."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from foretoken import __version__
from foretoken.core.errors import ForetokenError
from foretoken.engine.prompts import check_template
from foretoken.serve.errors import ApiError, RefusedBody, as_api_error
from foretoken.serve.json_body import validation_error
from foretoken.serve.keyring import RATE_HEADERS, SPECULATION, KeyRing
from foretoken.serve.limits import LimitsMiddleware
from foretoken.serve.request_log import RequestTracer, TracingMiddleware
from foretoken.serve.request_state import RequestIdMiddleware
from foretoken.serve.routes import (
    administration_routes,
    completion_routes,
    health_routes,
    listing_routes,
    message_routes,
    stored_routes,
)
from foretoken.serve.service import Service, Services
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


def create_app(worker: Worker, settings: ServerSettings | None = None, tracer: RequestTracer | None = None) -> FastAPI:
    """Returns the app of one model, see ``create_model_group``."""
    settings = settings or ServerSettings()
    return create_model_group([worker], [settings], settings, tracer)


def create_model_group(
    workers: Sequence[Worker],
    model_settings: Sequence[ServerSettings],
    settings: ServerSettings,
    tracer: RequestTracer | None = None,
) -> FastAPI:
    """Returns the app of one or several models. Its lifespan starts and closes their workers.

    ``model_settings`` has the settings of each worker's model, ``settings`` the server's, with the names of all models.
    Raises InvalidRequest if the key file of the settings cannot be read, or a chat template is not valid Jinja.
    """
    for each in model_settings:
        if each.chat_template is not None:
            check_template(each.chat_template, "chat_template")
    services = Services(list(map(Service, workers, model_settings)))
    summary = "The APIs of OpenAI and Anthropic with exact speculative decoding"
    app, keys = _bare_app(settings, lifespan=lambda app: _running(services), summary=summary)
    app.state.services, app.state.service = services, services.first
    dependencies = [Security(HTTPBearer(auto_error=False))] if keys.asks else []
    makers = (completion_routes, stored_routes, message_routes, listing_routes, health_routes, administration_routes)
    for routes in makers:
        app.include_router(routes(services), dependencies=dependencies)
    for path, file in playground().items():
        app.add_route(path, _page(file), methods=["GET"], include_in_schema=False)
    _add_middlewares(app, settings, keys, tracer)
    return app


@asynccontextmanager
async def _running(services: Services) -> AsyncIterator[None]:
    for service in services:
        service.start()
    yield
    for service in services:
        service.close()


def create_gateway(
    settings: ServerSettings, tracer: RequestTracer | None, routes: Mapping[str, Endpoint], forward: ASGIApp
) -> FastAPI:
    """Returns an app in front of other apps, which checks keys, rates, bodies and concurrency.

    Raises InvalidRequest if the key file of the settings cannot be read.

    routes: Endpoints of the paths that it answers itself. forward: Answers all other HTTP requests.
    """
    app, keys = _bare_app(settings, openapi_url=None)
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

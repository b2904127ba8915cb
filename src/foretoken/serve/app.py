"""The FastAPI app: routes and middlewares."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from foretoken import __version__
from foretoken.engine.chat_template import check_template
from foretoken.serve.access.keyring import KeyRing
from foretoken.serve.access.rates import RATE_HEADERS
from foretoken.serve.error_handlers import add_handlers
from foretoken.serve.limits import LimitsMiddleware, ServerSettings
from foretoken.serve.request_ids import RequestIdMiddleware
from foretoken.serve.routes.adapters import adapter_routes
from foretoken.serve.routes.anthropic import message_routes
from foretoken.serve.routes.listing import listing_routes
from foretoken.serve.routes.openai import completion_routes, stored_routes
from foretoken.serve.routes.speculation import speculation_routes
from foretoken.serve.routes.tokens import token_routes
from foretoken.serve.service import Service
from foretoken.serve.tracing import RequestTracer, TracingMiddleware
from foretoken.serve.worker import Worker

PLAYGROUND = Path(__file__).parent / "playground"

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


def open_paths() -> frozenset[str]:
    """Returns the paths that need no API key."""
    return frozenset({"/health", "/ping", "/ready", "/health/ready", "/health/live", *playground()})


def create_app(
    worker: Worker,
    settings: ServerSettings | None = None,
    tracer: RequestTracer | None = None,
    guarded: bool = True,
) -> FastAPI:
    """Returns the app of a worker. Its lifespan starts and closes the worker.

    Args:
        worker: Runs the engine.
        settings: The server's settings.
        tracer: Traces requests.
        guarded: Whether the app checks keys and limits; not so behind an app that has.

    Raises:
        InvalidRequest: The key file of the settings cannot be read, or their chat template is not valid Jinja.
    """
    settings = settings or ServerSettings()
    if settings.chat_template is not None:
        check_template(settings.chat_template, "chat_template")
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
        summary="The APIs of OpenAI and Anthropic with exact speculative decoding",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.state.keys = keys = key_ring(settings)
    add_handlers(app)
    dependencies = [Security(HTTPBearer(auto_error=False))] if keys.asks else []
    for routes in (completion_routes, stored_routes, message_routes, speculation_routes):
        app.include_router(routes(service), prefix="/v1", dependencies=dependencies)
    for routes in (token_routes, listing_routes, adapter_routes):
        app.include_router(routes(service), dependencies=dependencies)
    for path, file in playground().items():
        app.add_route(path, _page(file), methods=["GET"], include_in_schema=False)
    if guarded:
        add_middlewares(app, settings, keys, tracer)
    return app


def key_ring(settings: ServerSettings) -> KeyRing:
    """Returns the keys of a server. Raises InvalidRequest if its key file cannot be read."""
    return KeyRing(settings.api_keys, settings.key_file, settings.allow_admin)


def add_middlewares(app: FastAPI, settings: ServerSettings, keys: KeyRing, tracer: RequestTracer | None = None) -> None:
    """Adds the checks before every request, traces, CORS, and identifiers of requests, the first of them innermost."""
    app.add_middleware(LimitsMiddleware, settings=settings, open_paths=open_paths(), keys=keys)
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


def _page(file: Path) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        return FileResponse(file, headers=_PAGE_HEADERS)

    return page

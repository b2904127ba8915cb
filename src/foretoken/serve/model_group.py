"""Several models behind one address. Each has its engine and its app; requests name their model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import parse_qs

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from foretoken.serve.app import HEALTH_PATHS, LIVE, create_app, create_gateway
from foretoken.serve.errors import ApiError, ServerUnavailable, not_served
from foretoken.serve.json_body import read_object
from foretoken.serve.keyring import UNLOAD_LORA
from foretoken.serve.limits import replayed
from foretoken.serve.metrics import MergedMetrics
from foretoken.serve.request_log import RequestTracer
from foretoken.serve.request_state import state_of
from foretoken.serve.service import Service
from foretoken.serve.settings import ServerSettings
from foretoken.serve.worker import Worker

_MODELS, _RESPONSES = "/v1/models", "/v1/responses/"


def create_model_group(
    workers: Sequence[Worker],
    model_settings: Sequence[ServerSettings],
    settings: ServerSettings,
    tracer: RequestTracer | None = None,
) -> FastAPI:
    """Returns the app of several models. The first is that of requests that name none.

    ``model_settings`` has the settings of each worker's model, ``settings`` the server's, with the names of all models.

    Raises:
        InvalidRequest: The key file of the settings cannot be read.
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

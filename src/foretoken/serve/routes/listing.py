"""Routes that describe the server: models, health, metrics, version."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foretoken import __version__
from foretoken.serve.answers import Health, ModelList, ServedModel, Version
from foretoken.serve.errors import ApiError, ServerUnavailable
from foretoken.serve.routes.bodies import errors
from foretoken.serve.service import Service


def listing_routes(service: Service) -> APIRouter:
    """Returns the routes."""
    router = APIRouter()

    @router.get("/v1/models", responses=errors(401, 403))
    async def models(request: Request) -> ModelList:
        """List the served models and their methods of speculation."""
        return {"object": "list", "data": [service.model(name) for name in service.names(request)]}

    @router.get("/v1/models/{name:path}", responses=errors(401, 403, 404))
    async def model(name: str, request: Request) -> ServedModel:
        """Describe one served model."""
        service.check_allowed(name, request)
        return service.model(name)

    @router.get("/health", responses=errors(403, 503))
    @router.get("/ping", responses=errors(403, 503))
    @router.post("/ping", include_in_schema=False)
    async def health() -> Health:
        """Tell whether requests are accepted."""
        if not service.worker.alive:
            raise ServerUnavailable("the engine is not running")
        if service.worker.draining:
            raise ServerUnavailable("the server is shutting down")
        return {"status": "ok"}

    @router.get("/ready", responses=errors(403, 503))
    @router.get("/health/ready", responses=errors(403, 503))
    async def ready() -> Health:
        """Tell whether a load balancer should send requests: the model is loaded and the server is not ending."""
        return await health()

    @router.get("/health/live", responses=errors(403, 503))
    async def live() -> Health:
        """Tell whether the engine runs. It does while the server drains: restarting it would lose requests."""
        if not service.worker.alive:
            raise ServerUnavailable("the engine is not running")
        return {"status": "ok"}

    @router.get(
        "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, **errors(401, 403)}
    )
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        body, kind = service.metrics.render()
        return Response(body, headers={"Content-Type": kind})

    @router.get("/version", responses=errors(401, 403))
    async def version() -> Version:
        """Return the version of the server."""
        return {"version": __version__}

    @router.post("/v1/embeddings", include_in_schema=False)
    async def embeddings(request: Request) -> None:
        """Refuse: a model that generates is no embedding model."""
        raise ApiError(
            404,
            "/v1/embeddings is not served: the model here generates text, and its hidden states are no embeddings that "
            "compare texts; serve an embedding model elsewhere",
            code="not_served",
        )

    return router

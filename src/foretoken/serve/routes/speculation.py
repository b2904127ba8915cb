"""Routes of ``/v1/speculation``."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from foretoken.serve.access.granted import access_of
from foretoken.serve.routes.bodies import errors
from foretoken.serve.service import Service
from foretoken.serve.speculation_state import SpeculationChange, SpeculationState


def speculation_routes(service: Service) -> APIRouter:
    """Returns the routes."""
    router = APIRouter()

    @router.get("/speculation", responses=errors(401, 403, 503))
    async def state() -> SpeculationState:
        """Tell what is known about speculation: acceptance, costs, draft lengths, and why it pauses."""
        return await service.speculation.state()

    @router.patch("/speculation", responses=errors(400, 401, 403, 404, 503))
    @router.post("/speculation", responses=errors(400, 401, 403, 404, 503))
    async def change(body: SpeculationChange, request: Request) -> SpeculationState:
        """Switch speculation off or on, or change its method or its largest draft, without changing any text."""
        service.served_name(body.model)
        return await service.speculation.change(body, access_of(request.scope).name)

    return router

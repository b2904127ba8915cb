"""Routes that load and unload LoRA adapters, as in vLLM."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from foretoken.serve.access.granted import LOAD_LORA, UNLOAD_LORA, access_of
from foretoken.serve.adapters import AdapterToLoad, AdapterToUnload
from foretoken.serve.answers import DeletedModel, ServedModel
from foretoken.serve.routes.bodies import errors
from foretoken.serve.service import Service


def adapter_routes(service: Service) -> APIRouter:
    """Returns the routes."""
    router = APIRouter(responses=errors(400, 401, 403, 404, 503))

    @router.post(LOAD_LORA)
    async def load(body: AdapterToLoad, request: Request) -> ServedModel:
        """Load a LoRA adapter, which requests choose by its name as their model from then on."""
        service.served_name(body.model)
        await service.adapters.load(body, access_of(request.scope).name)
        return service.model(body.lora_name)

    @router.post(UNLOAD_LORA)
    async def unload(body: AdapterToUnload, request: Request) -> DeletedModel:
        """Unload a LoRA adapter. Requests that use it are finished with it."""
        await service.adapters.unload(body, access_of(request.scope).name)
        return {"id": body.lora_name, "object": "model", "deleted": True}

    return router

"""Routes of OpenAI's API: completions, chat completions and responses."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from foretoken.serve.answers import ChatCompletion, Completion, DeletedResponse, ItemList, ResponseObject
from foretoken.serve.chat import ChatWriter
from foretoken.serve.chat_schema import ChatRequest, Earlier
from foretoken.serve.chunks import ChunkWriter
from foretoken.serve.completions import CompletionWriter
from foretoken.serve.errors import ApiError, invalid
from foretoken.serve.limits import key_of
from foretoken.serve.responses.fields import input_items
from foretoken.serve.responses.schema import ResponsesRequest
from foretoken.serve.responses.store import StoredResponse
from foretoken.serve.responses.writer import ResponseWriter
from foretoken.serve.routes.bodies import STREAM, body_router, errors
from foretoken.serve.schema import CompletionRequest
from foretoken.serve.service import Service


def completion_routes(service: Service) -> APIRouter:
    """Returns the routes of completions, chat completions, and the creation of responses."""
    router = body_router()

    @router.post("/completions", responses={200: {"model": Completion, "content": STREAM}}, response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""

        def writer(prepared: Any) -> ChunkWriter:
            return ChunkWriter(prepared.body, CompletionWriter(prepared, service.token_text), service.token_text)

        return await service.generate("cmpl-", await service.prepared(body, request), writer, request)

    @router.post(
        "/chat/completions", responses={200: {"model": ChatCompletion, "content": STREAM}}, response_model=None
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Write the next message of a conversation."""

        def writer(prepared: Any) -> ChunkWriter:
            choices = ChatWriter(prepared, service.token_text)
            return ChunkWriter(prepared.body, choices, service.token_text)

        return await service.generate("chatcmpl-", await service.prepared(body, request), writer, request)

    @router.post("/responses", responses={200: {"model": ResponseObject, "content": STREAM}}, response_model=None)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Write the response to an input."""
        owner = key_of(request.scope)
        stores = service.responses.enabled and body.store is not False

        def store(response: ResponseObject) -> None:
            if stores:
                earlier = service.responses.find(body.references(), owner) if body.references() else Earlier()
                stored = StoredResponse.of(response, input_items(body, earlier), owner)
                service.responses.add(response["id"], stored)

        def writer(prepared: Any) -> ResponseWriter:
            return ResponseWriter(prepared, service.token_text, store, stores)

        return await service.generate("resp_", await service.prepared(body, request), writer, request)

    return router


def stored_routes(service: Service) -> APIRouter:
    """Returns the routes of stored responses."""
    router = APIRouter(prefix="/responses/{response_id}", responses=errors(400, 401, 403, 404, 422))

    @router.get("", responses={200: {"model": ResponseObject}}, response_model=None)
    async def retrieve(response_id: str, request: Request, stream: bool = False) -> Response:
        """Return a stored response."""
        if stream:
            raise invalid("only background responses are streamed again, and they are not served; leave out stream")
        stored = service.responses.get(response_id, key_of(request.scope))
        return Response(stored.response, media_type="application/json")

    @router.delete("")
    async def delete(response_id: str, request: Request) -> DeletedResponse:
        """Forget a stored response."""
        service.responses.delete(response_id, key_of(request.scope))
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/cancel", responses=errors(400))
    async def cancel(response_id: str, request: Request) -> ResponseObject:
        """Refuse to cancel: only background responses can be, and they are not served."""
        service.responses.get(response_id, key_of(request.scope))
        raise ApiError(
            400, "only background responses can be cancelled, and they are not served; close the connection instead"
        )

    @router.get("/input_items")
    async def items(
        response_id: str,
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> ItemList:
        """List the input items of a stored response."""
        listed = json.loads(service.responses.get(response_id, key_of(request.scope)).inputs)
        return _page(listed[::-1] if order == "desc" else listed, after, limit)

    return router


def _page(items: list[dict[str, Any]], after: str | None, limit: int) -> ItemList:
    """Returns at most ``limit`` of the items that follow the one with the id ``after``."""
    if after is not None:
        identifiers = [item["id"] for item in items]
        if after not in identifiers:
            raise invalid(f"after names no input item of this response: {after!r}", param="after")
        items = items[identifiers.index(after) + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }

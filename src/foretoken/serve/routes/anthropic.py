"""Routes of Anthropic's API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foretoken.serve.answers import AnthropicError, AnthropicMessage, TokenCount
from foretoken.serve.messages.schema import CountTokensRequest, MessagesRequest
from foretoken.serve.messages.writer import MessageWriter
from foretoken.serve.request_ids import request_id
from foretoken.serve.routes.bodies import STREAM, body_router
from foretoken.serve.service import Service


def message_routes(service: Service) -> APIRouter:
    """Returns the routes of messages."""
    router = body_router(AnthropicError)

    @router.post("/messages", responses={200: {"model": AnthropicMessage, "content": STREAM}}, response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Write the next message of a conversation, in Anthropic's format."""

        def writer(prepared: Any) -> MessageWriter:
            return MessageWriter(prepared, request_id(request.scope))

        return await service.generate("msg_", await service.prepared(body, request), writer, request)

    @router.post("/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> TokenCount:
        """Count the tokens of a conversation."""
        prepared = await service.prepared(body, request)
        return {"input_tokens": len(prepared.prompts[0].ids)}

    return router

"""Reads the bodies of requests: small ones here, large ones in the side process."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from foretoken.core.errors import ForetokenError
from foretoken.serve.answers import Error
from foretoken.serve.errors import RefusedBody
from foretoken.serve.json_body import read
from foretoken.serve.schema import Body
from foretoken.serve.side_process import LARGE_BODY
from foretoken.serve.unknown_fields import collect

STREAM: dict[str, Any] = {"text/event-stream": {}}


def errors(*codes: int) -> dict[int | str, dict[str, Any]]:
    """Returns the description of error answers."""
    return {code: {"model": Error} for code in codes}


def body_router(model: Any = Error) -> APIRouter:
    """Returns a router of routes with bodies. model: type of their errors."""
    codes = (400, 401, 403, 404, 408, 413, 429, 431, 500, 503, 504)
    return APIRouter(route_class=BodyRoute, responses={code: {"model": model} for code in codes})


class BodyRoute(APIRoute):
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
    def __init__(self, kind: type[Body], request: Request) -> None:
        super().__init__(request.scope, request.receive)
        self._kind = kind

    async def json(self) -> Any:
        body, service = await self.body(), self.app.state.service
        try:
            if len(body) > LARGE_BODY:
                prepared = await service.read_large(self._kind, body, self)
                if prepared is not None:
                    self.state.prepared = prepared
                    return prepared.body
            value = await read(body)
        except ForetokenError as error:
            raise RefusedBody(error) from error
        names: list[str] = self.scope["state"].setdefault("unknown_fields", [])
        collect(None if service.settings.strict else names)  # FastAPI validates in this task
        return value

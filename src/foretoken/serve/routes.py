"""All routes of the app."""

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from foretoken import __version__
from foretoken.core.errors import ForetokenError
from foretoken.serve.administration import (
    AdapterToLoad,
    AdapterToUnload,
    DraftToSave,
    SavedDraft,
    SpeculationChange,
    SpeculationState,
)
from foretoken.serve.answer_types import (
    AnthropicError,
    AnthropicMessage,
    ChatCompletion,
    Completion,
    DeletedModel,
    DeletedResponse,
    Detokenized,
    Error,
    Health,
    ItemList,
    ModelList,
    ResponseObject,
    ServedModel,
    TokenCount,
    Tokenized,
    Version,
)
from foretoken.serve.block_writers import MessageWriter, ResponseWriter
from foretoken.serve.chat_schema import ChatRequest, DetokenizeRequest, StoredContent, TokenizeRequest
from foretoken.serve.completions_writer import ChatWriter, CompletionWriter
from foretoken.serve.errors import ApiError, RefusedBody, ServerUnavailable, invalid
from foretoken.serve.json_body import read_json
from foretoken.serve.keyring import LOAD_LORA, SAVE_DRAFT, SPECULATION, UNLOAD_LORA
from foretoken.serve.messages_schema import CountTokensRequest, MessagesRequest
from foretoken.serve.metrics import MergedMetrics
from foretoken.serve.request_state import collect_unknown_fields, state_of
from foretoken.serve.response_store import StoredResponse
from foretoken.serve.responses_schema import ResponsesRequest, input_items
from foretoken.serve.schema import Body, CompletionRequest
from foretoken.serve.service import Services
from foretoken.serve.side_process import LARGE_BODY

STREAM: dict[str, Any] = {"text/event-stream": {}}


def error_responses(*codes: int, model: type = Error) -> dict[int | str, dict[str, Any]]:
    """Returns the description of error answers. One route builds their schema; FastAPI would do so for each code."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {code: {"content": content} for code in codes}


def body_router(model: type = Error) -> APIRouter:
    """Returns a router of routes with bodies. model: type of their errors."""
    codes = (400, 401, 403, 404, 408, 413, 429, 431, 500, 503, 504)
    return APIRouter(route_class=BodyRoute, responses=error_responses(*codes, model=model))


class BodyRoute(APIRoute):
    """A route whose body is read by ``parse_json``, or, if it is large, by the side process."""

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
        body, services = await self.body(), self.app.state.services
        try:
            if len(body) > LARGE_BODY:
                prepared = await (await services.of_body(body)).read_large(self._kind, body, self)
                if prepared is not None:
                    self.state.prepared = prepared
                    return prepared.body
            value = await read_json(body)
            service = services.of(value.get("model") if isinstance(value, dict) else None)
        except ForetokenError as error:
            raise RefusedBody(error) from error
        names = state_of(self.scope).unknown_fields
        collect_unknown_fields(None if service.settings.strict else names)  # FastAPI validates in this task
        return value


def completion_routes(services: Services) -> APIRouter:
    """Returns the routes of completions, chat completions, tokens, and the creation of responses."""
    router = body_router()

    @router.post("/v1/completions", responses={200: {"model": Completion, "content": STREAM}}, response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        service = services.of(body.model)
        return await service.generate("cmpl-", body, lambda p: CompletionWriter(p, service.token_text), request)

    @router.post(
        "/v1/chat/completions", responses={200: {"model": ChatCompletion, "content": STREAM}}, response_model=None
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Write the next message of a conversation."""
        service = services.of(body.model)
        return await service.generate("chatcmpl-", body, lambda p: ChatWriter(p, service.token_text), request)

    @router.post("/v1/responses", responses={200: {"model": ResponseObject, "content": STREAM}}, response_model=None)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Write the response to an input."""
        service, owner = services.of(body.model), state_of(request.scope).key
        stores = service.responses.enabled and body.store is not False

        def store(response: ResponseObject) -> None:
            if stores:
                earlier = service.responses.find(body.references(), owner) if body.references() else StoredContent()
                stored = StoredResponse.of(response, input_items(body, earlier), owner)
                service.responses.add(response["id"], stored)

        def writer(prepared: Any) -> ResponseWriter:
            return ResponseWriter(prepared, service.token_text, store, stores)

        return await service.generate("resp_", body, writer, request)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Tokenized:
        """Return the tokens of a prompt, or of a conversation through the chat template."""
        service = services.of(body.model)
        ids = (await service.prepare(body, request)).prompts[0].ids
        names = service.worker.llm.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": service.preparer.max_model_len,
            "tokens": ids,
            "token_strs": None if names is None else list(names),
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Detokenized:
        """Return the text of tokens."""
        return {"prompt": (await services.of(body.model).prepare(body, request)).prompts[0].text}

    return router


def stored_routes(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v1/responses/{response_id}", responses=error_responses(400, 401, 403, 404, 422))
    responses = services.first.responses  # of all models

    @router.get("", responses={200: {"model": ResponseObject}}, response_model=None)
    async def retrieve(response_id: str, request: Request, stream: bool = False) -> Response:
        """Return a stored response."""
        if stream:
            raise invalid("only background responses are streamed again, and they are not served; omit stream")
        stored = responses.get(response_id, state_of(request.scope).key)
        return Response(stored.response, media_type="application/json")

    @router.delete("")
    async def delete(response_id: str, request: Request) -> DeletedResponse:
        """Forget a stored response."""
        responses.delete(response_id, state_of(request.scope).key)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/cancel", responses=error_responses(400))
    async def cancel(response_id: str, request: Request) -> ResponseObject:
        """Refuse to cancel: only background responses can be, and they are not served."""
        responses.get(response_id, state_of(request.scope).key)
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
        listed = json.loads(responses.get(response_id, state_of(request.scope).key).inputs)
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


def message_routes(services: Services) -> APIRouter:
    router = body_router(AnthropicError)

    @router.post(
        "/v1/messages",
        responses={200: {"model": AnthropicMessage, "content": STREAM}, 400: {"model": AnthropicError}},
        response_model=None,
    )
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Write the next message of a conversation, in Anthropic's format."""
        identifier = state_of(request.scope).id
        return await services.of(body.model).generate("msg_", body, lambda p: MessageWriter(p, identifier), request)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> TokenCount:
        """Count the tokens of a conversation."""
        prepared = await services.of(body.model).prepare(body, request)
        return {"input_tokens": len(prepared.prompts[0].ids)}

    return router


def administration_routes(services: Services) -> APIRouter:
    """Returns the routes that change a running server, and of the state of speculation."""
    router, change_errors = APIRouter(), error_responses(400, 401, 403, 404, 503)

    @router.post(LOAD_LORA, responses=change_errors)
    async def load(body: AdapterToLoad, request: Request) -> ServedModel:
        """Load a LoRA adapter, which requests choose by its name as their model from then on."""
        service = services.of(body.model)
        await service.adapters.load(body, state_of(request.scope).access.name)
        return service.model(body.lora_name)

    @router.post(UNLOAD_LORA, responses=change_errors)
    async def unload(body: AdapterToUnload, request: Request) -> DeletedModel:
        """Unload a LoRA adapter. Requests that use it are finished with it."""
        service = services.serving(body.lora_name) or services.first
        await service.adapters.unload(body, state_of(request.scope).access.name)
        return {"id": body.lora_name, "object": "model", "deleted": True}

    @router.post(SAVE_DRAFT, responses=change_errors)
    async def save_draft(body: DraftToSave, request: Request) -> SavedDraft:
        """Save the draft model or head that learned while serving."""
        return await services.of(body.model).speculation.save_draft(body, state_of(request.scope).access.name)

    @router.get(SPECULATION, responses=error_responses(401, 403, 404, 503))
    async def state(model: str | None = None) -> SpeculationState:
        """Tell what is known about speculation: acceptance, costs, draft lengths, and why it pauses."""
        return await services.of(model).speculation.state()

    @router.patch(SPECULATION, responses=change_errors)
    @router.post(SPECULATION, responses=change_errors)
    async def change(body: SpeculationChange, request: Request) -> SpeculationState:
        """Switch speculation off or on, or change its method or its largest draft, without changing any text."""
        return await services.of(body.model).speculation.change(body, state_of(request.scope).access.name)

    return router


def listing_routes(services: Services) -> APIRouter:
    """Returns the routes of models, metrics and the version."""
    router = APIRouter()

    @router.get("/v1/models", responses=error_responses(401, 403))
    async def models(request: Request) -> ModelList:
        """List the served models and their methods of speculation."""
        return {
            "object": "list",
            "data": [service.model(name) for service in services for name in service.names(request)],
        }

    @router.get("/v1/models/{name:path}", responses=error_responses(401, 403, 404))
    async def model(name: str, request: Request) -> ServedModel:
        """Describe one served model."""
        service = services.of(name)
        service.check_allowed(name, request)
        return service.model(name)

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}, **error_responses(401, 403)},
    )
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        return MergedMetrics(service.metrics.collect() for service in services).render()

    @router.get("/version", responses={401: {"model": Error}, **error_responses(403)})
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


def health_routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.get("/health", responses=error_responses(403, 503))
    @router.get("/ping", responses=error_responses(403, 503))
    @router.post("/ping", include_in_schema=False)
    async def health() -> Health:
        """Tell whether requests are accepted."""
        services.check_alive()
        if any(service.worker.draining for service in services):
            raise ServerUnavailable("the server is shutting down")
        return {"status": "ok"}

    @router.get("/ready", responses=error_responses(403, 503))
    @router.get("/health/ready", responses=error_responses(403, 503))
    async def ready() -> Health:
        """Tell whether a load balancer should send requests: the model is loaded and the server is not ending."""
        return await health()

    @router.get("/health/live", responses=error_responses(403, 503))
    async def live() -> Health:
        """Tell whether the engine runs. It does while the server drains: restarting it would lose requests."""
        services.check_alive()
        return {"status": "ok"}

    return router

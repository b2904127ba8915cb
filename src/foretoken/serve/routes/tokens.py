"""Routes of vLLM's tokenizer API."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from foretoken.serve.answers import Detokenized, Tokenized
from foretoken.serve.routes.bodies import body_router
from foretoken.serve.service import Service
from foretoken.serve.token_schema import DetokenizeRequest, TokenizeRequest


def token_routes(service: Service) -> APIRouter:
    """Returns the routes."""
    router = body_router()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Tokenized:
        """Return the tokens of a prompt, or of a conversation through the chat template."""
        ids = (await service.prepared(body, request)).prompts[0].ids
        names = service.worker.llm.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": service.intake.max_model_len,
            "tokens": ids,
            "token_strs": None if names is None else list(names),
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Detokenized:
        """Return the text of tokens."""
        return {"prompt": (await service.prepared(body, request)).prompts[0].text}

    return router

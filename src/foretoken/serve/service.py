"""What the endpoints share: how a request is prepared and enters the engine."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from foretoken.serve.generation import Generation
from foretoken.serve.intake import Intake, PreparedRequest
from foretoken.serve.limits import ServerSettings, effective_salt
from foretoken.serve.metrics import Metrics
from foretoken.serve.responses import ServedModel
from foretoken.serve.schema import Generate
from foretoken.serve.side_process import SideProcess
from foretoken.serve.token_text import TokenText
from foretoken.serve.worker import Worker

B = TypeVar("B", bound=Generate)


class Service:
    """One worker behind one app."""

    def __init__(self, worker: Worker, settings: ServerSettings) -> None:
        self.worker, self.settings = worker, settings
        self.metrics = Metrics(settings.model_names[0], lambda: worker.engine.usage, worker.method_of)
        self.spelling = TokenText(worker.llm.tokenizer)
        self.created = int(time.time())
        self.intake = Intake(
            tokenizer=worker.llm.requests.prompt_tokenizer,
            settings=settings,
            max_model_len=worker.llm.target.max_length,
            capacity=worker.capacity,
        )
        self.side_process = SideProcess(self.intake) if os.name == "posix" else None
        worker.listeners.append(self.metrics.on_steps)

    def model(self, name: str) -> ServedModel:
        """What /v1/models says of it."""
        llm = self.worker.llm
        return {
            "id": self.intake.served_name(name),
            "object": "model",
            "created": self.created,
            "owned_by": "foretoken",
            "max_model_len": self.intake.max_model_len,
            "speculation": {"default": llm.methods[0], "methods": list(llm.methods)},
        }

    async def prepared(self, body: B, request: Request) -> PreparedRequest[B]:
        """Returns the prepared request, with the salt that holds for its client. Raises ApiError or InvalidRequest."""
        ready: PreparedRequest[B] | None = getattr(request.state, "prepared", None)
        if ready is None:
            prepare = partial(self.intake.prepared, body)
            ready = await self.worker.run_in_thread(prepare, len(await request.body()))
        salt = effective_salt(request.scope, body.cache_salt)
        return replace(ready, params=replace(ready.params, cache_salt=salt))

    async def begin(self, kind: str, prepared: PreparedRequest[Any]) -> Generation:
        """Queues a request. Raises InvalidRequest, Overloaded or ServerUnavailable.

        Args:
            kind: Beginning of its identifier.
            prepared: The request.
        """
        params, body = prepared.params, prepared.body
        if params.logprobs is not None or params.prompt_logprobs is not None or params.explain:
            await self.worker.run_in_thread(self.spelling.load)
        prompts = [prompt.ids for prompt in prepared.prompts]
        ticket = await self.worker.submit(prompts, params, body.priority, prepared.bad_words)
        name = self.intake.served_name(body.model)
        return Generation(kind, name, ticket, self.worker, self.metrics, self.settings.timeout)

"""A BentoML service around one engine: OpenAI's API as in `foretoken serve`, and a typed BentoML endpoint.

    export BENTOML_DO_NOT_TRACK=True
    bentoml serve bentoml_service:Foretoken --working-dir examples/recipes --host 127.0.0.1 --port 3000

FORETOKEN_MODEL and FORETOKEN_DRAFT_MODEL name the models; the default is the bundled pair. BentoML's own routes
(/metrics, /healthz, /livez, /readyz) take precedence; those of the app are also at /foretoken/.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import bentoml
from bentoml.exceptions import InvalidArgument, ServiceUnavailable
from pydantic import BaseModel
from starlette.applications import Starlette

from foretoken import LLM, SamplingParams
from foretoken.core.errors import InvalidRequest
from foretoken.outputs import CompletionOutput
from foretoken.serve.app import create_app
from foretoken.serve.errors import Overloaded, ServerUnavailable
from foretoken.serve.worker import Worker


class Answer(BaseModel):
    """A completion with statistics of its speculation."""

    text: str
    finish_reason: str
    tokens: int
    mean_acceptance_length: float


@asynccontextmanager
async def lifespan(front: Starlette) -> AsyncIterator[None]:
    """Loads the models in the serving process only, and mounts the app of their engine."""
    llm = LLM(
        os.environ.get("FORETOKEN_MODEL"),
        os.environ.get("FORETOKEN_DRAFT_MODEL"),
        methods=("prediction", "ngram"),
        enable_prefix_caching=True,
        max_num_batched_tokens="auto",
        isolate_failures=True,
    )
    front.state.worker = worker = Worker(llm)
    app = create_app(worker)
    front.mount("/foretoken", app)
    front.mount("/", app)
    async with app.router.lifespan_context(app):
        yield
    llm.close()


front = Starlette(lifespan=lifespan)


@bentoml.asgi_app(front)
@bentoml.service(name="foretoken", workers=1, traffic={"timeout": 600})
class Foretoken:
    """One worker: an engine batches its requests itself, and a second process would load the models again."""

    @bentoml.api  # type: ignore[untyped-decorator]
    async def generate(
        self, prompt: str, max_tokens: int = 100, temperature: float = 0.0, seed: int | None = None
    ) -> Answer:
        """Continues a prompt. The same seed gives the same text with every draft."""
        try:
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
            output = await _complete(front.state.worker, prompt, params)
        except InvalidRequest as error:
            raise InvalidArgument(str(error)) from error
        except (Overloaded, ServerUnavailable) as error:
            raise ServiceUnavailable(str(error)) from error
        stats = output.stats
        return Answer(
            text=output.text,
            finish_reason=output.finish_reason or "",
            tokens=len(output.token_ids),
            mean_acceptance_length=stats.mean_acceptance_length,
        )


async def _complete(worker: Worker, prompt: str, params: SamplingParams) -> CompletionOutput:
    """Returns the whole completion. A client that disconnects cancels it."""
    with await worker.submit([prompt], params) as generation:
        outputs = [piece.output async for piece in generation if piece.output is not None]
    return outputs[0]

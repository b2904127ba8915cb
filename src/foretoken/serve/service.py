"""What the endpoints share: the model's names and room, and how a request enters the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from foretoken.core.errors import ContextLengthExceeded
from foretoken.params import SamplingParams
from foretoken.serve.errors import CONTEXT_LENGTH, ApiError, invalid
from foretoken.serve.generation import Generation
from foretoken.serve.limits import ServerSettings
from foretoken.serve.metrics import Metrics
from foretoken.serve.responses import ServedModel
from foretoken.serve.schema import Generate
from foretoken.serve.token_text import TokenText
from foretoken.serve.worker import Worker

T = TypeVar("T")


class Service:
    """One worker behind one app."""

    def __init__(self, worker: Worker, settings: ServerSettings) -> None:
        self.worker, self.settings = worker, settings
        self.metrics = Metrics(settings.model_names[0], lambda: worker.engine.usage, worker.method_of)
        self.spelling = TokenText(worker.llm.tokenizer)
        self.created = int(time.time())
        worker.listeners.append(self.metrics.on_steps)

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its output together."""
        return self.worker.llm.target.max_length

    def named(self, model: str | None) -> str:
        """The name that the answer gives the model. Raises a 404 for a model that is not served."""
        names = self.settings.model_names
        if model is not None and model not in names:
            message = f"the model {model!r} is not served here; served: {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model or names[0]

    def model(self, name: str) -> ServedModel:
        """What /v1/models says of it."""
        llm = self.worker.llm
        return {
            "id": self.named(name),
            "object": "model",
            "created": self.created,
            "owned_by": "foretoken",
            "max_model_len": self.max_model_len,
            "speculation": {"default": llm.methods[0], "methods": list(llm.methods)},
        }

    def budget(self, asked: int | None, prompt: Sequence[int], default: int | None = None) -> int:
        """Tokens that may be generated; ``default`` None is all that fit. Raises ApiError where they do not fit."""
        before = self.worker.llm.requests.start or prompt  # what an encoder reads takes no room of the output's
        left = self.max_model_len - len(before)
        if left < 1 or (asked or 0) > left:
            wish = "" if asked is None else f" and {asked} more were asked for"
            raise invalid(
                f"the model's context length is {self.max_model_len} tokens; the prompt has {len(prompt)}{wish}",
                param="messages" if default is None else "prompt",
                code=CONTEXT_LENGTH,
            )
        return min(left, default or left) if asked is None else asked

    async def tokenized(self, size: int, work: Callable[[], T], param: str) -> T:
        """The result of ``work``, which tokenizes a text. Raises ApiError or InvalidRequest.

        size: of the text in characters, or its ids. param: what the error names where the text is too long.
        """
        try:
            return await self.worker.run_in_thread(work, size)
        except ContextLengthExceeded as error:
            raise invalid(str(error), param, CONTEXT_LENGTH) from error

    def check_counts(self, n: int, prompts: int, logprobs: int | None, name: str = "logprobs") -> None:
        """Raises ApiError for more than the server was set up for."""
        limits = self.settings
        for value, most, param in (
            (n, limits.max_n, "n"), (prompts, limits.max_prompts, "prompt"), (logprobs or 0, limits.max_logprobs, name)
        ):  # fmt: skip
            if value > most:
                what = f"{param} holds {value} prompts" if param == "prompt" else f"{param} is {value}"
                raise invalid(f"{what}; this server allows at most {most}", param=param)
        if n * prompts > (most := self.worker.capacity):
            raise invalid(
                f"{prompts} prompts with n={n} are {n * prompts} sequences, and this server holds at most {most} "
                "(--max-num-seqs and --max-waiting together); ask for fewer in one request",
                param="n" if prompts == 1 else "prompt",
            )

    async def begin(
        self, kind: str, body: Generate, prompts: Sequence[list[int]], params: SamplingParams
    ) -> Generation:
        """Queue it. kind: how its identifier begins. Raises InvalidRequest, Overloaded or Unavailable."""
        name = self.named(body.model)
        if params.logprobs is not None or params.prompt_logprobs is not None or params.explain:
            await self.worker.run_in_thread(self.spelling.load)
        ticket = await self.worker.submit(prompts, params, body.priority)
        return Generation(kind, name, ticket, self.worker, self.metrics, self.settings.timeout)

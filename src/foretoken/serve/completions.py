"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foretoken.outputs import CompletionOutput, StreamPiece
from foretoken.serve.generation import Generation, collect
from foretoken.serve.intake import PreparedRequest
from foretoken.serve.responses import Completion, CompletionChoice, CompletionLogprobs
from foretoken.serve.schema import CompletionRequest
from foretoken.serve.service import Service
from foretoken.serve.stream import cancel_on_disconnect, stream
from foretoken.serve.token_text import LegacyLogprobs


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Answer it, as one object or as a stream."""
    prepared = await service.prepared(body, request)
    generation, body = await service.begin("cmpl", prepared), prepared.body
    generation.shown = prepared.max_tokens > 0
    writer = _CompletionWriter(service, prepared)
    if body.streams:
        return await stream(body, generation, writer, service.spelling, request.receive)
    with generation:
        finals = await cancel_on_disconnect(request.receive, collect(generation))
        return JSONResponse(_answer(writer, generation, finals, body.n or 1, body.return_steps))


def _answer(
    writer: _CompletionWriter, generation: Generation, finals: Mapping[int, StreamPiece], n: int, detailed: bool
) -> Completion:
    per_prompt = generation.params.n
    choices: list[CompletionChoice] = []
    for start in range(0, len(finals), per_prompt):
        numbers: Sequence[int] = range(start, start + per_prompt)
        if n < per_prompt:
            numbers = sorted(numbers, key=lambda number: -_mean_logprob(finals[number].output))[:n]
        for number in numbers:
            choices.append({**writer.whole(number, finals[number]), "index": len(choices)})
    return {
        "id": generation.id,
        "object": "text_completion",
        "created": generation.created,
        "model": generation.model,
        "choices": choices,
        "usage": generation.usage(),
        "metrics": generation.metrics(detailed),
    }


def _mean_logprob(output: CompletionOutput | None) -> float:
    """By which ``best_of`` chooses: log-probability per token."""
    assert output is not None and output.logprobs is not None
    total = sum(entries[token].logprob for token, entries in zip(output.token_ids, output.logprobs, strict=True))
    return total / max(1, len(output.token_ids))


class _CompletionWriter:
    """Choices of a request; also its stream's ``Composer``."""

    object = "text_completion"

    def __init__(self, service: Service, prepared: PreparedRequest[CompletionRequest]) -> None:
        self._body, self._prompts = prepared.body, prepared.prompts
        self._per_prompt, self._shown = prepared.params.n, prepared.max_tokens > 0
        count = len(self._prompts) * self._per_prompt
        self._logprobs = [LegacyLogprobs(service.spelling, self._body.logprobs or 0) for _ in range(count)]
        self._waiting: list[list[StreamPiece]] = [[] for _ in range(count)]

    def whole(self, number: int, final: StreamPiece) -> CompletionChoice:
        """The finished choice at once."""
        output = final.output
        assert output is not None
        return self._choice(number, output.text, output.token_ids, output.logprobs, final)

    def choices(self, number: int, piece: StreamPiece) -> list[dict[str, Any]]:
        """See ``Composer``."""
        waiting = self._waiting[number]
        waiting.append(piece)
        first = piece.step.position == 0
        if not (piece.text or piece.output is not None or (first and self._body.echo)):
            return []  # its log-probabilities come with the text
        tokens = [token for part in waiting for token in part.token_ids]
        logprobs = [entry for part in waiting for entry in part.logprobs or ()]
        text = "".join(part.text for part in waiting)
        start = waiting[0]
        waiting.clear()
        return [cast("dict[str, Any]", self._choice(number, text, tokens, logprobs, piece, start))]

    def silent(self, number: int) -> dict[str, Any]:
        """See ``Composer``."""
        return {"index": number, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}

    def _choice(
        self, number: int, text: str, tokens: Sequence[int], logprobs: Any, last: StreamPiece,
        first: StreamPiece | None = None,
    ) -> CompletionChoice:  # fmt: skip
        """first: the first piece that it tells of, None where it tells of all."""
        if not self._shown:
            text, tokens, logprobs = "", (), ()
        entries = list(logprobs or ())
        tokens = list(tokens)
        if self._body.echo and (first is None or first.step.position == 0):
            prompt = self._prompts[number // self._per_prompt]
            text = prompt.text + text
            tokens = [*prompt.ids, *tokens]
            entries = [*((first or last).prompt_logprobs or ()), *entries]
        shown: CompletionLogprobs | None = None
        if self._body.logprobs is not None:
            shown = self._logprobs[number].of(tokens, entries)
        output = last.output
        reason = None if output is None else "length" if not self._shown else output.finish_reason
        return {
            "index": number,
            "text": text,
            "logprobs": shown,
            "finish_reason": cast("Any", reason),
            "stop_reason": output.stop_reason if output is not None and self._shown else None,
        }

"""Answers of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from foretoken.outputs import CompletionOutput, StreamPiece
from foretoken.serve.answers import Completion, CompletionChoice, CompletionLogprobs
from foretoken.serve.generation import Generation
from foretoken.serve.intake import EncodedPrompt, PreparedRequest
from foretoken.serve.schema import CompletionRequest
from foretoken.serve.token_text import LegacyLogprobs, TokenText, prompt_logprobs


class CompletionWriter:
    """See ``ChoiceWriter``."""

    object = "text_completion"
    reasoning_tokens = 0

    def __init__(self, prepared: PreparedRequest[CompletionRequest], token_text: TokenText) -> None:
        self._body, self._prompts = prepared.body, prepared.prompts
        self._per_prompt, self._shown = prepared.params.n, prepared.max_tokens > 0
        count = len(self._prompts) * self._per_prompt
        self._logprobs = [LegacyLogprobs(token_text, self._body.logprobs or 0) for _ in range(count)]
        self._waiting: list[list[StreamPiece]] = [[] for _ in range(count)]

    def answer(self, generation: Generation, finals: Mapping[int, StreamPiece]) -> Completion:
        """See ``ChoiceWriter``. ``best_of`` returns the texts with the highest log-probability per token."""
        n = self._body.n or 1
        choices: list[CompletionChoice] = []
        for start in range(0, len(finals), self._per_prompt):
            numbers: Sequence[int] = range(start, start + self._per_prompt)
            if n < self._per_prompt:
                numbers = sorted(numbers, key=lambda number: -_mean_logprob(finals[number].output))[:n]
            for number in numbers:
                output = finals[number].output
                assert output is not None
                choice = self._choice(number, output.text, output.token_ids, output.logprobs, finals[number])
                choices.append({**choice, "index": len(choices)})
        return {
            "id": generation.id,
            "object": "text_completion",
            "created": generation.created,
            "model": generation.model,
            "choices": choices,
            "usage": generation.usage(),
            "metrics": generation.speculation(self._body.return_steps),
        }

    def choices(self, number: int, piece: StreamPiece) -> list[dict[str, Any]]:
        """See ``ChoiceWriter``."""
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

    def opening(self) -> dict[str, Any]:
        """See ``ChoiceWriter``."""
        return {}

    def silent(self, number: int) -> dict[str, Any]:
        """See ``ChoiceWriter``."""
        return {"index": number, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}

    def _prompt(self, number: int) -> EncodedPrompt:
        return self._prompts[number // self._per_prompt]

    def _choice(
        self,
        number: int,
        text: str,
        tokens: Sequence[int],
        logprobs: Any,
        last: StreamPiece,
        first: StreamPiece | None = None,
    ) -> CompletionChoice:
        """Returns a choice.

        Args:
            number: Its number.
            text: Its text, without the echo.
            tokens: The tokens of ``text``.
            logprobs: An entry for each token, or None.
            last: The last of its pieces.
            first: The first of its pieces; None where ``last`` has the whole output.
        """
        if not self._shown:
            text, tokens, logprobs = "", (), ()
        entries = list(logprobs or ())
        own = tokens = list(tokens)
        if self._body.echo and (first is None or first.step.position == 0):
            prompt = self._prompt(number)
            text = prompt.text + text
            tokens = [*prompt.ids, *tokens]
            entries = [*((first or last).prompt_logprobs or ()), *entries]
        shown: CompletionLogprobs | None = None
        if self._body.logprobs is not None:
            shown = self._logprobs[number].of(tokens, entries)
        output = last.output
        reason = None if output is None else "length" if not self._shown else output.finish_reason
        choice: CompletionChoice = {
            "index": number,
            "text": text,
            "logprobs": shown,
            "finish_reason": cast("Any", reason),
            "stop_reason": output.stop_reason if output is not None and self._shown else None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = own
            if first is None or first.step.position == 0:
                choice["prompt_token_ids"] = self._prompt(number).ids
        if self._body.prompt_logprobs is not None:
            ids = self._prompt(number).ids
            choice["prompt_logprobs"] = prompt_logprobs(ids, last.prompt_logprobs or (), self._body.prompt_logprobs)
        return choice


def _mean_logprob(output: CompletionOutput | None) -> float:
    """Returns the log-probability per token, by which ``best_of`` chooses."""
    assert output is not None and output.logprobs is not None
    total = sum(entries[token].logprob for token, entries in zip(output.token_ids, output.logprobs, strict=True))
    return total / max(1, len(output.token_ids))

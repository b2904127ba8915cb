"""Converts the body of a request to prompts and sampling parameters.

The server runs this in a thread, and for large bodies in a side process. This module must not import torch, so that the
side process starts quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, cast

from foretoken.core.bad_words import BadWords
from foretoken.core.errors import ContextLengthExceeded
from foretoken.engine.prompts import PromptTokenizer
from foretoken.params import SamplingParams
from foretoken.serve.chat_prompt import render
from foretoken.serve.chat_schema import ChatRequest, Function
from foretoken.serve.errors import CONTEXT_LENGTH, ApiError, invalid
from foretoken.serve.limits import ServerSettings
from foretoken.serve.parameters import sampling
from foretoken.serve.schema import CompletionRequest, Generate
from foretoken.serve.tools import forced

DEFAULT_TOKENS = 16  # OpenAI's

# The fields of a body that are needed to answer. The other fields are in the prompts and parameters.
_NEEDED = {
    *("model", "n", "best_of", "stream", "stream_options", "return_steps", "priority", "cache_salt"),
    *("logprobs", "top_logprobs", "echo", "tools", "tool_choice"),
}

B = TypeVar("B", bound=Generate)


@dataclass(frozen=True)
class EncodedPrompt:
    """A tokenized prompt. text: the prompt, if the answer echoes it; else empty."""

    text: str
    ids: list[int]


@dataclass(frozen=True, kw_only=True)
class PreparedRequest(Generic[B]):
    """A request that is ready to be queued.

    Args:
        body: The fields that answering needs.
        prompts: The prompts in tokens.
        params: Sampling parameters of all of them.
        max_tokens: Number of tokens to generate at most; 0 where only the prompt's log-probabilities are wanted.
        calls_only: Whether the text consists of function calls alone.
        bad_words: The tokens of the bad words; None if ``params`` has the words themselves.
    """

    body: B
    prompts: list[EncodedPrompt]
    params: SamplingParams
    max_tokens: int
    calls_only: bool = False
    bad_words: BadWords | None = None


@dataclass(frozen=True, kw_only=True)
class Intake:
    """Prepares requests to one model.

    Args:
        tokenizer: Tokenizes their prompts.
        settings: The server's limits and the model's names.
        max_model_len: Number of tokens of a prompt and its output together.
        capacity: Number of sequences that may run or wait.
    """

    tokenizer: PromptTokenizer
    settings: ServerSettings = field(repr=False)
    max_model_len: int
    capacity: int

    def prepared(self, body: B) -> PreparedRequest[B]:
        """Returns the prepared request. Raises ApiError or InvalidRequest."""
        prepare: Any = self._chat if isinstance(body, ChatRequest) else self._completion
        return cast("PreparedRequest[B]", prepare(body))

    def tokenized_bad_words(self, prepared: PreparedRequest[B]) -> PreparedRequest[B]:
        """Returns ``prepared`` with the tokens of its bad words. Raises InvalidRequest."""
        if not prepared.params.bad_words:
            return prepared
        bad_words = self.tokenizer.bad_words(prepared.params.bad_words)
        return replace(prepared, params=replace(prepared.params, bad_words=None), bad_words=bad_words)

    def served_name(self, model: str | None) -> str:
        """Returns the model's name in the answer. Raises a 404 ApiError for a model that is not served."""
        names = self.settings.model_names
        if model is not None and model not in names:
            message = f"the model {model!r} is not served here; served: {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model or names[0]

    def _completion(self, body: CompletionRequest) -> PreparedRequest[CompletionRequest]:
        self.served_name(body.model)
        n = body.n or 1
        candidates = n if body.best_of is None else body.best_of
        if candidates < n:
            raise invalid(f"best_of ({candidates}) must be at least n ({n})", param="best_of")
        if candidates > n and body.streams:
            raise invalid("best_of cannot be streamed: what is best is known at the end", param="best_of")
        given = _each(body.prompt)
        self._check_counts(candidates, len(given), body.logprobs)
        prompts = [self._encoded(prompt, echo=bool(body.echo)) for prompt in given]
        budget = min(self._budget(body.max_tokens, prompt.ids, DEFAULT_TOKENS) for prompt in prompts)
        params = sampling(
            body,
            n=candidates,
            max_tokens=max(1, budget),  # at 0 only log-probabilities of the prompt are sent
            logprobs=0 if body.logprobs is None and candidates > n else body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        return PreparedRequest(body=_needed(body), prompts=prompts, params=self._predicted(params), max_tokens=budget)

    def _chat(self, body: ChatRequest) -> PreparedRequest[ChatRequest]:
        self.served_name(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs is only allowed with logprobs: true", param="top_logprobs")
        self._check_counts(body.n or 1, 1, body.top_logprobs, "top_logprobs")
        calls = forced(body)
        text = render(self.tokenizer.tokenizer, body, self.settings.chat_template)
        try:
            ids = self.tokenizer.rendered(text)
        except ContextLengthExceeded as error:
            raise invalid(str(error), "messages", CONTEXT_LENGTH) from error
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        budget = self._budget(asked, ids)
        params = sampling(
            body,
            {"json": calls} if calls is not None else None,
            n=body.n or 1,
            max_tokens=budget,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        return PreparedRequest(
            body=_needed(body),
            prompts=[EncodedPrompt("", ids)],
            params=self._predicted(params),
            max_tokens=budget,
            calls_only=calls is not None,
        )

    def _encoded(self, prompt: str | list[int], echo: bool) -> EncodedPrompt:
        try:
            tokenized = self.tokenizer.tokenize(prompt)
        except ContextLengthExceeded as error:
            raise invalid(str(error), "prompt", CONTEXT_LENGTH) from error
        text = ""
        if echo:
            text = self.tokenizer.tokenizer.decode(tokenized.ids) if tokenized.text is None else tokenized.text
        return EncodedPrompt(text, tokenized.ids)

    def _predicted(self, params: SamplingParams) -> SamplingParams:
        """Returns ``params`` with the predicted output in tokens."""
        if params.prediction is None:
            return params
        return replace(params, prediction=self.tokenizer.prediction(params.prediction))

    def _budget(self, asked: int | None, prompt: Sequence[int], default: int | None = None) -> int:
        """Returns the maximum number of tokens to generate. Raises ApiError if they do not fit.

        Args:
            asked: The client's maximum, or None.
            prompt: The prompt's tokens.
            default: The maximum if the client gave none; None for as many as fit.
        """
        before = self.tokenizer.start or prompt  # an encoder's input takes none of the output's length
        left = self.max_model_len - len(before)
        if left < 1 or (asked or 0) > left:
            more = "" if asked is None else f" and {asked} more were asked for"
            raise invalid(
                f"the model's context length is {self.max_model_len} tokens; the prompt has {len(prompt)}{more}",
                param="messages" if default is None else "prompt",
                code=CONTEXT_LENGTH,
            )
        return min(left, default or left) if asked is None else asked

    def _check_counts(self, n: int, prompts: int, logprobs: int | None, name: str = "logprobs") -> None:
        """Raises ApiError for counts above the server's limits. name: the field that holds ``logprobs``."""
        limits = self.settings
        for value, limit, param in (
            (n, limits.max_n, "n"),
            (prompts, limits.max_prompts, "prompt"),
            (logprobs or 0, limits.max_logprobs, name),
        ):
            if value > limit:
                what = f"{param} holds {value} prompts" if param == "prompt" else f"{param} is {value}"
                raise invalid(f"{what}; this server allows at most {limit}", param=param)
        if n * prompts > self.capacity:
            raise invalid(
                f"{prompts} prompts with n={n} are {n * prompts} sequences, and this server holds at most "
                f"{self.capacity} (--max-num-seqs and --max-waiting together); ask for fewer in one request",
                param="n" if prompts == 1 else "prompt",
            )


def _each(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return cast("list[str | list[int]]", prompt)


def _needed(body: B) -> B:
    """Returns ``body`` with its other fields as if they had not been sent, and of its tools the names."""
    others: dict[str, Any] = {name: None for name in type(body).model_fields if name not in _NEEDED}
    tools = getattr(body, "tools", None)
    if tools:
        others["tools"] = [tool.model_copy(update={"function": Function(name=tool.function.name)}) for tool in tools]
    return body.model_copy(update=others)

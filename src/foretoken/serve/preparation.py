"""Converts the body of a request to prompts and sampling parameters.

Errors name parameters as the client sent them. The server runs this in a thread, and for large bodies in a side
process. This module must not import torch, so that the side process starts quickly.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

from foretoken.core.errors import InvalidRequest
from foretoken.core.restrictions import BadWords
from foretoken.engine.prompts import PromptTokenizer
from foretoken.params import SamplingParams
from foretoken.serve.chat_schema import (
    ChatForm,
    ChatRequest,
    DetokenizeRequest,
    Function,
    Message,
    References,
    StoredContent,
    TokenizeRequest,
)
from foretoken.serve.errors import CONTEXT_LENGTH, ApiError, as_api_error, invalid
from foretoken.serve.parsers.formats import ExpectedOutput, OutputFormat, chosen_format, expect
from foretoken.serve.prompts import fill_in_prompt, forced_calls, render
from foretoken.serve.schema import Body, CompletionRequest, Generate, JsonObjectFormat, JsonSchemaFormat, Sampling
from foretoken.serve.settings import ServerSettings

_CONVERTED = {"logit_bias", "prediction", "structured_outputs"}
_SAME = sorted({f.name for f in fields(SamplingParams)} & Sampling.model_fields.keys() - _CONVERTED)
_SYNONYMS = {"repeat_penalty": "repetition_penalty", "no_stop_trim": "include_stop_str_in_output"}
_STRUCTURED = {
    **{f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")},
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
_PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}  # values of no penalty
_EMPTY_IS_NONE = ("ebnf", "grammar", "regex")


def sampling(body: Generate, structured: Mapping[str, Any] | None = None, **parameters: Any) -> SamplingParams:
    """Returns the sampling parameters of a request.

    ``structured`` replaces the structured outputs of the body. Endpoints name ``parameters`` differently.

    Raises:
        InvalidRequest: A parameter is not valid.
        ApiError: A parameter is given under two names, or contradicts another.
    """
    values = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    for name, ours in _SYNONYMS.items():
        if (value := getattr(body, name)) is not None:
            if ours in values:
                raise invalid(f"{name} and {ours} are the same parameter; give one of them", param=name)
            values[ours] = value
    if body.repeat_last_n not in (None, -1) and any(
        values.get(name, none) != none for name, none in _PENALTIES.items()
    ):
        raise invalid(
            "repeat_last_n is not served beside a penalty: penalties count the whole prompt and output; send -1",
            param="repeat_last_n",
        )
    if body.logit_bias:
        values["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    if body.prediction is not None:
        values["prediction"] = body.prediction.text
    requested = {} if structured else _requested(body)
    if len(requested) > 1:
        fields = list(requested)
        raise invalid(f"{' and '.join(fields)} ask for two things at once; give one of them", param=fields[1])
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return SamplingParams(
        **values,
        **parameters,
        stop=[stop for stop in stops if stop],  # OpenAI's clients send empty ones, which end nothing
        explain=body.return_steps,
        structured_outputs=structured or next(iter(requested.values()), None),
    )


def _requested(body: Any) -> dict[str, dict[str, Any]]:
    """Returns the structured outputs of a body by the field that asks for them."""
    requested: dict[str, dict[str, Any]] = {}
    for name, kind in _STRUCTURED.items():
        value = getattr(body, name, None)
        if value is not None and not (name in _EMPTY_IS_NONE and value == ""):
            requested[name] = {kind: value}
    if (structured := getattr(body, "structured_outputs", None)) is not None:
        requested["structured_outputs"] = structured.model_dump(by_alias=True, exclude_none=True)
    form = getattr(body, "response_format", None)
    if isinstance(form, JsonObjectFormat | JsonSchemaFormat):
        schema = form.schema_ if isinstance(form, JsonObjectFormat) else form.json_schema.schema_
        requested["response_format"] = {"json": schema} if schema is not None else {"json_object": True}
    return requested


def sent_names(body: Body) -> dict[str, str]:
    """Returns the names under which a body has parameters of the engine, where they differ."""
    names = {"explain": "return_steps", "lora": "model"}
    names |= {ours: name for name, ours in _SYNONYMS.items() if getattr(body, name, None) is not None}
    form = isinstance(body, ChatForm)
    chat_names = body.sent_as if isinstance(body, ChatForm) else {}
    if form or isinstance(body, ChatRequest):
        names["prompt"] = "messages"
        if "max_completion_tokens" in chat_names or getattr(body, "max_completion_tokens", None) is not None:
            names["max_tokens"] = "max_completion_tokens"
    if isinstance(body, Sampling):
        otherwise = "response_format" if form else "structured_outputs"
        choice = getattr(body, "tool_choice", None)
        mode = getattr(getattr(choice, "allowed_tools", choice), "mode", getattr(choice, "type", choice))
        demands_call = getattr(body, "tools", None) and mode not in (None, "auto", "none")
        names["structured_outputs"] = "tools" if demands_call else next(iter(_requested(body)), otherwise)
    return {ours: chat_names.get(name, name) for ours, name in names.items()} | dict(chat_names)


def as_sent(error: Exception, names: Mapping[str, str]) -> Exception:
    """Returns an error about a parameter in terms of the field that the client sent. names: see ``sent_names``."""
    if not isinstance(error, InvalidRequest | ApiError):
        return error
    answer = as_api_error(error)
    param, message = names.get(answer.param or "", answer.param), answer.message
    for ours, name in names.items():
        if "_" in ours:  # others are words of the language, too
            message = re.sub(rf"(?<![\w.]){ours}\b(\['\w+'\])?", name if ours != name else r"\g<0>", message)
    return ApiError(answer.status, message, answer.type, param, answer.code, answer.headers)


DEFAULT_TOKENS = 16  # OpenAI's

# The fields of a body that are needed to answer. The other fields are in the prompts and parameters.
_NEEDED = {
    *("model", "n", "best_of", "stream", "stream_options", "return_steps", "priority", "cache_salt"),
    *("logprobs", "top_logprobs", "echo", "tools", "tool_choice"),
    *("cache_prompt", "prompt_logprobs", "request_id", "return_token_ids"),
}

B = TypeVar("B", bound=Body)


class StoredContentNeeded(Exception):
    """A body refers to stored content, which the caller has to find first."""

    def __init__(self, references: References) -> None:
        super().__init__(references)
        self.references = references


@dataclass(frozen=True)
class EncodedPrompt:
    """A tokenized prompt. text: the prompt, if the answer echoes it; else empty."""

    text: str
    ids: list[int]


@dataclass(frozen=True, kw_only=True)
class PreparedRequest(Generic[B]):
    """A request that is ready to be queued."""

    body: B  # with the fields that answering needs
    prompts: list[EncodedPrompt]
    params: SamplingParams  # of all prompts
    max_tokens: int  # to generate; 0 where only the prompt's log-probabilities are requested
    output: ExpectedOutput = field(default_factory=ExpectedOutput)
    bad_words: BadWords | None = None  # None if ``params`` has the words themselves
    chat: ChatRequest | None = None  # to which the body was converted, with the fields that answering needs
    cut: bool = False  # whether ``max_tokens`` is less than requested, because the context ends there
    unknown: tuple[str, ...] = ()  # fields of the body that were ignored
    names: Mapping[str, str] = field(default_factory=dict)  # see ``sent_names``


@dataclass(frozen=True, kw_only=True)
class RequestPreparer:
    """Prepares requests to one model."""

    tokenizer: PromptTokenizer
    settings: ServerSettings = field(repr=False)
    max_model_len: int  # tokens of a prompt and its output together
    capacity: int  # sequences that may run or wait

    def prepare(self, body: B, earlier: StoredContent | None = None) -> PreparedRequest[B]:
        """Returns the prepared request.

        Raises:
            ApiError: It is not valid, or cannot be served.
            StoredContentNeeded: ``earlier`` is None, and the body refers to something.
        """
        names = sent_names(body)
        try:
            return replace(cast("PreparedRequest[B]", self._prepare(body, earlier)), names=names)
        except (InvalidRequest, ApiError) as error:
            raise as_sent(error, names) from error

    def _prepare(self, body: Any, earlier: StoredContent | None) -> PreparedRequest[Any]:
        if isinstance(body, CompletionRequest):
            return self._completion(body)
        if isinstance(body, ChatRequest):
            return self._chat(body, body)
        if not isinstance(body, ChatForm):
            return self._tokenized(body)
        references = body.references()
        if references and earlier is None:
            raise StoredContentNeeded(references)
        return self._chat(body, body.as_chat(earlier or StoredContent()))

    @cached_property
    def _format(self) -> OutputFormat:
        """Format of the model's reasoning and calls."""
        settings = self.settings
        template = settings.chat_template or getattr(self.tokenizer.tokenizer, "chat_template", None)
        shown = template if isinstance(template, str) else None
        return chosen_format(shown, settings.tool_call_parser, settings.reasoning_parser)

    @cached_property
    def marks_turns(self) -> bool:
        """Whether there is a chat template, and it adds more to a message than line breaks."""
        try:
            message = Message(role="user", content="x")
            chat = ChatRequest.model_construct(messages=[message])
            return render(self.tokenizer.tokenizer, chat, self.settings.chat_template).strip() != "x"
        except InvalidRequest:
            return False

    def tokenized_bad_words(self, prepared: PreparedRequest[B]) -> PreparedRequest[B]:
        """Returns ``prepared`` with the tokens of its bad words. Raises InvalidRequest."""
        if not prepared.params.bad_words:
            return prepared
        try:
            bad_words = self.tokenizer.bad_words(prepared.params.bad_words)
        except InvalidRequest as error:
            raise as_sent(error, prepared.names) from error
        return replace(prepared, params=replace(prepared.params, bad_words=None), bad_words=bad_words)

    def _completion(self, body: CompletionRequest) -> PreparedRequest[CompletionRequest]:
        n = body.n or 1
        candidates = n if body.best_of is None else body.best_of
        if candidates < n:
            raise invalid(f"best_of ({candidates}) must be at least n ({n})", param="best_of")
        if candidates > n and body.streams:
            raise invalid("best_of cannot be streamed: what is best is known at the end", param="best_of")
        prompts = _each(body.prompt)
        count = "n" if body.best_of is None else "best_of"
        logprobs = {"logprobs": body.logprobs, "prompt_logprobs": body.prompt_logprobs}
        self._check_counts(count, candidates, len(prompts), logprobs)
        tops = [top for top in (body.logprobs if body.echo else None, body.prompt_logprobs) if top is not None]
        encoded = [self._encoded(body, prompt) for prompt in prompts]
        budget = min(self._budget(body.max_tokens, prompt.ids, DEFAULT_TOKENS) for prompt in encoded)
        params = sampling(
            body,
            n=candidates,
            max_tokens=max(1, budget),  # at 0 only log-probabilities of the prompt are sent
            logprobs=0 if body.logprobs is None and candidates > n else body.logprobs,
            prompt_logprobs=max(tops) if tops else None,
        )
        return PreparedRequest(body=_needed(body), prompts=encoded, params=self._completed(params), max_tokens=budget)

    def _chat(self, body: Any, chat: ChatRequest) -> PreparedRequest[Any]:
        """Prepares a chat. body: the request, which is ``chat`` or was converted to it."""
        form = body if isinstance(body, ChatForm) else None
        if chat.top_logprobs is not None and not chat.logprobs:
            raise invalid("top_logprobs is only allowed with logprobs: true", param="top_logprobs")
        logprobs = {"top_logprobs": chat.top_logprobs, "prompt_logprobs": chat.prompt_logprobs}
        self._check_counts("n", chat.n or 1, 1, logprobs)
        calls = forced_calls(chat)
        asked = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
        text = render(self.tokenizer.tokenizer, chat, self.settings.chat_template)
        ids = self._unlimited(chat.truncate_prompt_tokens).rendered(text, bool(chat.add_special_tokens))
        ids = self._truncated(ids, chat.truncate_prompt_tokens, asked)
        needed = _needed(chat)
        prepared: dict[str, Any] = {
            "body": needed if form is None else form.kept(),
            "prompts": [EncodedPrompt("", ids)],
            "chat": needed,
        }
        if form is not None and form.counts_only:
            return PreparedRequest(params=SamplingParams(), max_tokens=0, **prepared)
        budget = self._budget(None if form is not None and form.fills_context else asked, ids)
        cut = asked is not None and asked > budget
        params = sampling(
            chat,
            {"json": calls} if calls is not None else None,
            n=chat.n or 1,
            max_tokens=budget if cut or asked is None else asked,
            logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
            prompt_logprobs=chat.prompt_logprobs,
        )
        tokenizer = self.tokenizer.tokenizer
        output, params = expect(self._format, chat, text, params, calls is not None, tokenizer)
        params = self._completed(params)
        return PreparedRequest(params=params, max_tokens=params.max_tokens, cut=cut, output=output, **prepared)

    def _encoded(self, body: CompletionRequest, prompt: str | list[int]) -> EncodedPrompt:
        if body.suffix:
            if body.echo or not isinstance(prompt, str):
                raise invalid("suffix goes with a prompt of text, and not with echo", param="suffix")
            ids = fill_in_prompt(self.tokenizer.tokenizer, prompt, body.suffix)
            return EncodedPrompt("", self._truncated(ids, body.truncate_prompt_tokens, body.max_tokens))
        special = body.add_special_tokens is not False
        tokenized = self._unlimited(body.truncate_prompt_tokens).tokenize(prompt, special)
        ids = self._truncated(tokenized.ids, body.truncate_prompt_tokens, body.max_tokens)
        text = ""
        if body.echo:
            complete = tokenized.text is not None and len(ids) == len(tokenized.ids)
            text = str(tokenized.text) if complete else self.tokenizer.tokenizer.decode(ids)
        return EncodedPrompt(text, ids)

    def _unlimited(self, truncated: int | None) -> PromptTokenizer:
        """Returns the tokenizer, which takes prompts of any length if they are truncated afterwards."""
        return self.tokenizer if truncated is None else replace(self.tokenizer, limit=None, source_limit=None)

    def _truncated(self, ids: list[int], kept: int | None, asked: int | None) -> list[int]:
        """Returns the last ``kept`` tokens of a prompt; for -1 as many as leave tokens for the output."""
        if kept is None:
            return ids
        if kept == 0:
            raise invalid("truncate_prompt_tokens must be at least 1, or -1", param="truncate_prompt_tokens")
        return ids[-(kept if kept > 0 else max(1, self.max_model_len - (asked or 1))) :]

    def _tokenized(self, body: Any) -> PreparedRequest[Any]:
        """Returns the tokens of a body of /tokenize, or the text of one of /detokenize."""
        tokenizer = self._unlimited(1)
        if isinstance(body, DetokenizeRequest):
            ids = tokenizer.checked(body.tokens, "the list in tokens")
            prompt = EncodedPrompt(tokenizer.tokenizer.decode(ids), [])
        else:
            assert isinstance(body, TokenizeRequest)
            text = body.prompt or ""
            if (chat := body.chat) is not None:
                text = render(tokenizer.tokenizer, chat, self.settings.chat_template)
            special = chat is None if body.add_special_tokens is None else body.add_special_tokens
            prompt = EncodedPrompt("", tokenizer.text(text, "the prompt", special))
        kept = body.model_copy(update={"messages": None, "prompt": "", "tools": None, "tokens": []})
        return PreparedRequest(body=kept, prompts=[prompt], params=SamplingParams(), max_tokens=0)

    def _completed(self, params: SamplingParams) -> SamplingParams:
        """Returns ``params`` with the server's defaults, and with the predicted output in tokens."""
        if params.acceptance_stop is None and self.settings.acceptance_stop:
            params = replace(params, acceptance_stop=self.settings.acceptance_stops)
        if params.prediction is None:
            return params
        return replace(params, prediction=self.tokenizer.prediction(params.prediction))

    def _budget(self, asked: int | None, prompt: Sequence[int], default: int | None = None) -> int:
        """Returns the maximum number of tokens to generate. Raises ApiError if they do not fit.

        ``default`` is the maximum if the client has ``asked`` for none; None is as many as fit.
        """
        before = self.tokenizer.start or prompt  # an encoder's input takes none of the output's length
        left = self.max_model_len - len(before)
        if left < 1 or (asked or 0) > left:
            more = "" if asked is None else f" and {asked} more were asked for"
            raise invalid(
                f"the model's context length is {self.max_model_len} tokens; the prompt has {len(prompt)}{more}",
                param="prompt",
                code=CONTEXT_LENGTH,
            )
        return min(left, default or left) if asked is None else asked

    def _check_counts(self, count: str, n: int, prompts: int, logprobs: Mapping[str, int | None]) -> None:
        """Raises ApiError for counts above the server's limits. count: the field of ``n``."""
        limits = {count: self.settings.max_n, "prompt": self.settings.max_prompts}
        for param, value in {count: n, "prompt": prompts, **logprobs}.items():
            limit, value = limits.get(param, self.settings.max_logprobs), value or 0
            if value > limit:
                excess = f"{param} holds {value} prompts" if param == "prompt" else f"{param} is {value}"
                raise invalid(f"{excess}; this server allows at most {limit}", param=param)
        if n * prompts > self.capacity:
            raise invalid(
                f"{prompts} prompts with {count}={n} are {n * prompts} sequences, and this server holds at most "
                f"{self.capacity} (--max-num-seqs and --max-waiting together); ask for fewer in one request",
                param=count if prompts == 1 else "prompt",
            )


def _each(prompt: Any) -> list[str | list[int]]:
    """Returns the prompts of a request. An empty list is one prompt without tokens."""
    if not prompt or isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return cast("list[str | list[int]]", prompt)


def _needed(body: B) -> B:
    """Returns ``body`` with the fields that answering needs; its tools have nothing but their names."""
    others: dict[str, Any] = {name: None for name in type(body).model_fields if name not in _NEEDED}
    tools = getattr(body, "tools", None)
    if tools:
        others["tools"] = [tool.model_copy(update={"function": Function(name=tool.function.name)}) for tool in tools]
    return body.model_copy(update=others)

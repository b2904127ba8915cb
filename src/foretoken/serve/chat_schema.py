"""The request bodies of /v1/chat/completions, /tokenize and /detokenize."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag, model_validator

from foretoken.serve.schema import (
    CHAT,
    TOKENIZE,
    Body,
    Content,
    Count,
    Generate,
    Loose,
    Object,
    Refusals,
    Sampling,
    TokenIds,
    check_strict,
    field_error,
    first_wrong,
)

Metadata = Annotated[
    dict[str, str],
    first_wrong("a string with a string", lambda key, value: isinstance(key, str) and isinstance(value, str)),
]


class FunctionCall(Loose):
    """The name of a called function, and its arguments as JSON in a string."""

    name: str
    arguments: str


class ToolCall(Loose):
    """A call that an assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Loose):
    """One message. Only an assistant's message with tool calls or reasoning may lack ``content``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.reasoning_content)):
            raise field_error("content", "content is missing; only an assistant's tool calls go without")
        return self


@dataclass
class Turn:
    """Text, reasoning and calls of one turn of the model."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def call(self, identifier: str, name: str, arguments: str) -> None:
        """Adds a call. arguments: JSON in a string."""
        self.calls.append(ToolCall(id=identifier, function=FunctionCall(name=name, arguments=arguments)))

    def message(self) -> Message:
        return Message(
            role="assistant",
            content="\n".join(self.text) if self.text or not self.calls else None,
            tool_calls=self.calls or None,
            reasoning_content="\n".join(filter(None, self.reasoning)) or None,
        )


class Function(Body):
    """A function that may be called. ``parameters`` is a JSON schema; None means no arguments."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _closed(self) -> Function:
        check_strict(self.strict, self.parameters, f"function {self.name!r}", "parameters")
        return self


class Tool(Body):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: Function


def function_tool(**fields: Any) -> Tool:
    """Returns the tool of a function that another API's type has validated."""
    return Tool(type="function", function=Function.model_construct(**fields))


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """A value of ``tool_choice``: the tool that must be called."""

    type: Literal["function"]
    function: FunctionName

    @classmethod
    def of(cls, name: str) -> NamedTool:
        """Returns the choice of a function by its name."""
        return cls(type="function", function=FunctionName(name=name))


class AllowedNames(Body):
    """The tools that may be called (auto) or of which one must be called (required)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True)]


class AllowedTools(Body):
    """A value of ``tool_choice``: some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


def choice_kind(choice: Any) -> str | None:
    """Returns the tag of a ``tool_choice``, by which one type alone is tried."""
    if choice is None or isinstance(choice, str):
        return "mode"
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return kind if isinstance(kind, str) else None


def _known_choice(choice: Any) -> Any:
    """Raises an error that lists the values of ``tool_choice``."""
    if choice_kind(choice) not in ("mode", "function", "allowed_tools"):
        message = "expected 'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'"
        raise field_error("type" if isinstance(choice, dict) else "", message)
    return choice


CHOICE, KNOWN_CHOICE = Discriminator(choice_kind), BeforeValidator(_known_choice)
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    CHOICE,
    KNOWN_CHOICE,
]
# OpenAI's values, and the highest of Anthropic and SGLang
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class Conversing(Sampling):
    """Fields of chat completions and responses."""

    chat_template_kwargs: Object | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Count | None = None
    # ignored
    metadata: Metadata | None = None
    moderation: JsonValue = None
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None  # by chat completions


class ChatRequest(Generate, Conversing):
    """Body of POST /v1/chat/completions. Fields of OpenAI that do not change the output are ignored."""

    refused: ClassVar[Refusals] = CHAT

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    reasoning_effort: Effort | None = None
    tool_choice: ToolChoice | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    verbosity: Verbosity | None = None
    # accepted only with the supported value
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None


def offered_tools(body: ChatRequest) -> list[Tool]:
    if body.tool_choice == "none":
        return []
    tools = body.tools or []
    if isinstance(body.tool_choice, AllowedTools):
        allowed = {tool.function.name for tool in body.tool_choice.allowed_tools.tools}
        tools = [tool for tool in tools if tool.function.name in allowed]
    return tools


@dataclass(frozen=True)
class References:
    """References of a body to an earlier response, whose conversation it continues, and to single stored items."""

    response: str | None = None
    items: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.response is not None or bool(self.items)


@dataclass(frozen=True)
class StoredContent:
    """The stored content that ``References`` name, in JSON: the conversation's items in order, and the single items."""

    conversation: tuple[bytes, ...] = ()
    items: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of bytes."""
        return sum(map(len, (*self.conversation, *self.items.values())))


class ChatForm(ABC):
    """A body of another API that ``RequestPreparer`` converts to a chat."""

    sent_as: ClassVar[Mapping[str, str]] = {}  # names of the chat's fields in this body, where they differ, for errors
    counts_only: ClassVar[bool] = False  # whether the answer is the number of the prompt's tokens
    # whether the output ends at the end of the context if more tokens are requested
    fills_context: ClassVar[bool] = False

    @abstractmethod
    def as_chat(self, earlier: StoredContent) -> ChatRequest:
        """Returns the chat. Raises ApiError or InvalidRequest."""

    def kept(self) -> Self:
        """Returns the body with the fields that answering needs."""
        return self

    def references(self) -> References:
        """Returns the references that ``as_chat`` needs."""
        return References()


class TokenizeRequest(Body):
    """Body of POST /tokenize: a prompt, or the messages of a chat.

    Args:
        add_special_tokens: Whether the tokenizer adds its own special tokens. By default to a prompt only, because
            chat templates have them.
        return_token_strs: Whether to return the tokens' names as well.
    """

    refused: ClassVar[Refusals] = TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "expected either prompt or messages")
        return self

    @property
    def chat(self) -> ChatRequest | None:
        """The chat, if there is one."""
        if self.messages is None:
            return None
        names = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        return ChatRequest.model_construct(**{name: getattr(self, name) for name in names})


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds

"""The request body of /v1/chat/completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag, model_validator

from foretoken.serve.refused_fields import CHAT, Refusals
from foretoken.serve.schema import Body, Content, Count, Generate, Loose, Object, about, first_wrong
from foretoken.serve.strict_schema import check_strict

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
    def _says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.reasoning_content)):
            raise about("content", "content is missing; only an assistant's tool calls go without")
        return self


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


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """A value of ``tool_choice``: the tool that must be called."""

    type: Literal["function"]
    function: FunctionName


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
        raise about("type" if isinstance(choice, dict) else "", message)
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


class ChatRequest(Generate):
    """Body of POST /v1/chat/completions. Fields of OpenAI that do not change the output are ignored."""

    refused: ClassVar[Refusals] = CHAT

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Object | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    tool_choice: ToolChoice | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    top_logprobs: Count | None = None
    verbosity: Verbosity | None = None
    # accepted only with the supported value
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    # ignored
    metadata: Metadata | None = None
    moderation: JsonValue = None
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None


@dataclass(frozen=True)
class References:
    """What a body refers to on the server: an earlier response, whose conversation it continues, and single items."""

    response: str | None = None
    items: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.response is not None or bool(self.items)


@dataclass(frozen=True)
class Earlier:
    """The stored content that ``References`` name, in JSON: the conversation's items in order, and the single items."""

    conversation: tuple[bytes, ...] = ()
    items: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of bytes."""
        return sum(map(len, (*self.conversation, *self.items.values())))


class ChatForm(ABC):
    """A body of another API that stands for a chat. ``Intake`` converts it.

    Attributes:
        sent_as: Its names of the chat's fields, where they differ, for errors.
        counts_only: Whether only the tokens of the prompt are asked for.
        fills_context: Whether a text may be asked for that is longer than the context; it ends there.
    """

    sent_as: ClassVar[Mapping[str, str]] = {}
    counts_only: ClassVar[bool] = False
    fills_context: ClassVar[bool] = False

    @abstractmethod
    def as_chat(self, earlier: Earlier) -> ChatRequest:
        """Returns the chat. Raises ApiError or InvalidRequest."""

    @abstractmethod
    def kept(self) -> Self:
        """Returns a copy with the fields that answering needs."""

    def references(self) -> References:
        """Returns what ``as_chat`` needs."""
        return References()

"""The request body of /v1/chat/completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from foretoken.serve.schema import Body, Content, Count, Generate, Loose, Object, first_wrong
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
            raise PydanticCustomError("content", "content is missing; only an assistant's tool calls go without")
        return self


class Function(Body):
    """A function that may be called. ``parameters`` is a JSON schema; None means no arguments."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _closed(self) -> Function:
        check_strict(self.strict, self.parameters, f"function {self.name!r}")
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


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class JsonSchema(Body):
    """A named JSON schema."""

    model_config = ConfigDict(protected_namespaces=())
    name: str
    description: str | None = None
    schema_: Annotated[Object | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _closed(self) -> JsonSchema:
        check_strict(self.strict, self.schema_, f"response_format {self.name!r}")
        return self


class TextFormat(Body):
    """Unrestricted text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON that the schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(Generate):
    """Body of POST /v1/chat/completions. Fields of OpenAI that do not change the output are ignored."""

    refused: ClassVar[dict[str, str]] = {
        "audio": "only text comes out",
        "web_search_options": "the server does not search; put what was found into a message",
        "functions": "it was replaced by tools",
        "function_call": "it was replaced by tool_choice",
        "chat_template": "start the server with --chat-template",
        "documents": "put them into a message",
        "use_beam_search": "tokens are sampled one by one; leave it out",
    }

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Object | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    max_completion_tokens: Count | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    response_format: ResponseFormat | None = None
    tool_choice: ToolChoice | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    top_logprobs: Count | None = None
    # accepted only with the supported value
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    verbosity: Literal["medium"] | None = None
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
        prompt_field: The field that holds the conversation, for errors.
        counts_only: Whether only the tokens of the prompt are asked for.
        fills_context: Whether a text may be asked for that is longer than the context; it ends there.
    """

    prompt_field: ClassVar[str] = "messages"
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

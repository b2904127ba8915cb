"""The request bodies of /v1/messages and /v1/messages/count_tokens, and their conversion to chats."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from foretoken.serve.chat_schema import (
    ChatForm,
    ChatRequest,
    Effort,
    Message,
    NamedTool,
    StoredContent,
    ToolChoice,
    Turn,
    function_tool,
)
from foretoken.serve.errors import invalid
from foretoken.serve.schema import (
    MESSAGES,
    Body,
    Count,
    JsonSchema,
    JsonSchemaFormat,
    Loose,
    Object,
    Refusals,
    Sampling,
    Strings,
    TextPart,
    check_strict,
    only_types,
    text_of,
)

_BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
_only_blocks = only_types("block", _BLOCKS, f"served: {', '.join(_BLOCKS)}")
_only_text = only_types("block", ("text",), "served: text")
_only_custom = only_types("tool", ("custom",), "only tools of the client's own are served")


Text = Annotated[str | Annotated[list[TextPart], Field(fail_fast=True)], _only_text]


class ToolUseBlock(Loose):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Object


class ToolResultBlock(Loose):
    """The result of a called tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | None = None
    is_error: bool | None = None


class ThinkingBlock(Loose):
    """Reasoning that led to the blocks behind it. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Loose):
    """Reasoning that only Anthropic can read. It is omitted."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    TextPart | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]


class InputMessageBlocks(Loose):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | Annotated[list[Block], Field(fail_fast=True)], _only_blocks]


def messages_of(system: str | list[TextPart] | None, sent: Sequence[InputMessageBlocks]) -> list[Message]:
    """Returns the messages of a chat. Each result of a tool becomes a message, as chat templates expect."""
    messages = [Message(role="system", content=text_of(system))] if system else []
    for message in sent:
        if isinstance(message.content, str):
            messages.append(Message(role=message.role, content=message.content))
        elif message.role == "assistant":
            messages.append(_assistant(message))
        else:
            messages += _results_and_text(message)
    return messages


def continues(sent: Sequence[InputMessageBlocks]) -> bool:
    """Returns whether the last message is the model's own beginning, which the answer continues."""
    last = sent[-1]
    if last.role != "assistant":
        return False
    if not isinstance(last.content, str) and any(isinstance(block, ToolUseBlock) for block in last.content):
        raise invalid("the last message calls a tool; send the tool_result behind it", param="messages")
    return True


def _assistant(message: InputMessageBlocks) -> Message:
    assert not isinstance(message.content, str)
    turn = Turn()
    for block in message.content:
        match block:
            case TextPart():
                turn.text.append(block.text)
            case ThinkingBlock():
                turn.reasoning.append(block.thinking)
            case ToolUseBlock():
                turn.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            case ToolResultBlock():
                raise invalid("a tool_result belongs into a message of the user", param="messages")
    return turn.message()


def _results_and_text(message: InputMessageBlocks) -> list[Message]:
    assert not isinstance(message.content, str)
    messages, text = [], []
    for block in message.content:
        match block:
            case TextPart():
                text.append(block.text)
            case ToolResultBlock():
                messages.append(Message(role="tool", content=text_of(block.content), tool_call_id=block.tool_use_id))
            case ToolUseBlock() | ThinkingBlock():
                raise invalid(f"a block of type {block.type!r} belongs into a message of the assistant", "messages")
    if text or not messages:
        messages.append(Message(role=message.role, content="\n".join(text)))
    return messages


class CustomTool(Body):
    """A tool of the client's. input_schema: the JSON schema of its input."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: Object
    strict: bool | None = None
    # ignored
    allowed_callers: list[str] | None = None
    cache_control: JsonValue = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: JsonValue = None

    @model_validator(mode="after")
    def _closed(self) -> "CustomTool":
        check_strict(self.strict, self.input_schema, f"tool {self.name!r}", "input_schema")
        return self


class ToolUse(Body):
    """``tool_choice``: whether the model must call a tool (any), one tool, may (auto), or must not."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """``thinking``: reaches the chat template as ``enable_thinking``. There is no budget of tokens."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: str | None = None


class JsonOutput(Body):
    """JSON that the schema allows."""

    type: Literal["json_schema"]
    schema_: Annotated[Object, Field(alias="schema")]


class OutputConfig(Body):
    """``output_config``: the effort reaches the chat template, the format is a structured output."""

    effort: Effort | None = None
    format: JsonOutput | None = None


class CountTokensRequest(Body, ChatForm):
    """Body of POST /v1/messages/count_tokens. Fields of Anthropic that do not change the output are ignored."""

    counts_only: ClassVar[bool] = True
    sent_as: ClassVar[Mapping[str, str]] = {
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }

    model: str | None = None
    messages: Annotated[list[InputMessageBlocks], Field(min_length=1, fail_fast=True)]
    chat_template_kwargs: Object | None = None
    output_config: OutputConfig | None = None
    system: Text | None = None
    thinking: Thinking | None = None
    tool_choice: ToolUse | None = None
    tools: Annotated[list[Annotated[CustomTool, _only_custom]], Field(fail_fast=True)] | None = None
    # ignored
    cache_control: JsonValue = None
    speed: str | None = None

    def as_chat(self, earlier: StoredContent) -> ChatRequest:
        output, template_arguments = self.output_config or OutputConfig(), self.chat_template_kwargs
        schema = (
            None if output.format is None else JsonSchema.model_construct(name="output", schema_=output.format.schema_)
        )
        if self.thinking is not None:
            template_arguments = {"enable_thinking": self.thinking.type != "disabled", **(template_arguments or {})}
        return ChatRequest.model_construct(
            messages=messages_of(self.system, self.messages),
            chat_template_kwargs=template_arguments,
            continue_final_message=continues(self.messages) or None,
            parallel_tool_calls=False if self.tool_choice and self.tool_choice.disable_parallel_tool_use else None,
            reasoning_effort=output.effort,
            response_format=None if schema is None else JsonSchemaFormat(type="json_schema", json_schema=schema),
            tool_choice=_chat_choice(self.tool_choice),
            tools=[
                function_tool(name=t.name, description=t.description, parameters=t.input_schema, strict=t.strict)
                for t in self.tools or ()
            ]
            or None,
        )

    def kept(self) -> Self:
        return self.model_copy(update={"messages": [], "system": None, "tools": None})


class MessagesRequest(CountTokensRequest, Sampling):
    """Body of POST /v1/messages. Fields of Anthropic that do not change the output are ignored."""

    counts_only: ClassVar[bool] = False
    fills_context: ClassVar[bool] = True
    refused: ClassVar[Refusals] = MESSAGES

    max_tokens: Annotated[Count, Field(ge=1)]
    stop_sequences: Annotated[Strings, Field(max_length=64)] | None = None
    # ignored
    context_management: JsonValue = None
    diagnostics: JsonValue = None
    inference_geo: str | None = None
    metadata: JsonValue = None
    service_tier: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    def as_chat(self, earlier: StoredContent) -> ChatRequest:
        fields = {name: getattr(self, name) for name in Sampling.model_fields}
        fields |= {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        return super().as_chat(earlier).model_copy(update=fields)


def _chat_choice(choice: ToolUse | None) -> ToolChoice | None:
    if choice is None or choice.type == "none":
        return None if choice is None else "none"
    if choice.type == "tool":
        return NamedTool.of(choice.name or "")
    return "required" if choice.type == "any" else "auto"

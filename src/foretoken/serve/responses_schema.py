"""The request body of /v1/responses, its input items, and its conversion to a chat."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast
from uuid import uuid4

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag, TypeAdapter

from foretoken.params import SamplingParams
from foretoken.serve.chat_schema import (
    CHOICE,
    KNOWN_CHOICE,
    AllowedNames,
    AllowedTools,
    ChatForm,
    ChatRequest,
    Conversing,
    Effort,
    Function,
    Message,
    NamedTool,
    References,
    StoredContent,
    ToolChoice,
    Turn,
    Verbosity,
    function_tool,
)
from foretoken.serve.errors import invalid
from foretoken.serve.schema import (
    RESPONSES,
    Body,
    Count,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Loose,
    Refusals,
    StreamOptions,
    TextFormat,
    field_error,
    only_types,
    text_of,
)

SERVED = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")

LOGPROBS = "message.output_text.logprobs"  # of ``include``
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class ContentPart(Loose):
    """A part of a message, a summary or a reasoning. Text is the only kind that is served."""

    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: str | None = None
    refusal: str | None = None

    def __str__(self) -> str:
        return self.text or self.refusal or ""


Parts = Annotated[list[ContentPart], Field(fail_fast=True)]
Text = Annotated[str | Parts, only_types("part", _TEXTS, "only text is served, as 'input_text'")]


class InputMessage(Loose):
    """A message."""

    type: Literal["message"] = "message"
    id: str | None = None
    role: Literal["user", "system", "developer", "assistant"]
    content: Text


class FunctionCallItem(Loose):
    """A call that the model made. arguments: JSON in a string."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Loose):
    """The result of a called function."""

    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str | None = None
    output: Text


class ReasoningItem(Loose):
    """Reasoning that led to the items behind it."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Parts | None = None
    content: Parts | None = None


class ItemReference(Loose):
    """The identifier of a stored item."""

    type: Literal["item_reference"] | None = None
    id: str


def _kind(item: Any) -> str | None:
    """Returns the kind of an item: messages need not say it."""
    if not isinstance(item, dict):
        return getattr(item, "type", None) or "item_reference"
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    return kind if isinstance(kind, str) else None


def _served(item: Any) -> Any:
    """Raises an error that names the kind of an item that is not served."""
    kind = _kind(item)
    if kind not in SERVED:
        description = f"of type {kind[:50]!r}" if kind is not None else "whose type is no string"
        raise field_error("type", f"an item {description} was given; served: {', '.join(SERVED)}")
    return item


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
    BeforeValidator(_served),
]


Item = InputMessage | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | ItemReference

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[InputItem])
_ITEM: TypeAdapter[Item] = TypeAdapter(InputItem)


def messages_of(instructions: str | None, earlier: StoredContent, sent: str | Sequence[Item]) -> list[Message]:
    """Returns the messages of a chat: the instructions, the conversation so far, and the input.

    The items of one turn of the model (reasoning, text, calls) become one message, as chat templates expect.
    """
    items = [item for part in earlier.conversation for item in _ITEMS.validate_python(json.loads(part))]
    for item in [InputMessage(role="user", content=sent)] if isinstance(sent, str) else sent:
        if isinstance(item, ItemReference):
            item = _ITEM.validate_python(json.loads(earlier.items[item.id]))
        items.append(item)
    leading = [instructions] if instructions else []
    for item in items:  # templates take one system message, at the beginning
        if not isinstance(item, InputMessage) or item.role not in ("system", "developer"):
            break
        leading.append(text_of(item.content))
    items = items[len(leading) - bool(instructions) :]
    messages = [Message(role="system", content="\n\n".join(leading))] if leading else []
    messages += _messages_from(items)
    if not messages:
        raise invalid("the input has no message", param="input")
    return messages


def _messages_from(items: Iterable[Item]) -> list[Message]:
    messages: list[Message] = []
    turn = Turn()
    for item in items:
        if isinstance(item, FunctionCallOutputItem | InputMessage) and getattr(item, "role", "") != "assistant":
            messages += [turn.message()] if turn != Turn() else []
            turn = Turn()
        match item:
            case ReasoningItem():  # its summary counts where there is nothing else
                turn.reasoning.append(text_of(item.content or item.summary))
            case FunctionCallItem():
                turn.call(item.call_id, item.name, item.arguments)
            case FunctionCallOutputItem():
                messages.append(Message(role="tool", content=text_of(item.output), tool_call_id=item.call_id))
            case InputMessage(role="assistant"):
                turn.text.append(text_of(item.content))
            case InputMessage():
                messages.append(Message(role=item.role, content=text_of(item.content)))
    return [*messages, turn.message()] if turn != Turn() else messages


_only_functions = only_types("tool", ("function",), "only functions are served")


class FunctionTool(Function):
    """A function that may be called."""

    type: Literal["function"]


class NamedFunction(Body):
    """A value of ``tool_choice``: the function that must be called."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    """A value of ``tool_choice``: some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, fail_fast=True)]


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedFunction, Tag("function")]
    | Annotated[AllowedFunctions, Tag("allowed_tools")],
    CHOICE,
    KNOWN_CHOICE,
]


class TextSchemaFormat(JsonSchema):
    """JSON that the schema allows."""

    type: Literal["json_schema"]


class TextSettings(Body):
    """``text``: the format of the text."""

    format: Annotated[TextFormat | JsonObjectFormat | TextSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Verbosity | None = None


class ReasoningSettings(Body):
    """``reasoning``: the effort reaches the chat template. Summaries are not written; the reasoning itself is sent."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Conversing, ChatForm):
    """Body of POST /v1/responses. Fields of OpenAI that do not change the output are ignored."""

    sent_as: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "verbosity": "text.verbosity",
    }
    refused: ClassVar[Refusals] = RESPONSES

    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    previous_response_id: str | None = None
    reasoning: ReasoningSettings | None = None
    stream_options: StreamOptions | None = None
    text: TextSettings | None = None
    tool_choice: ResponseToolChoice | None = None
    tools: Annotated[list[Annotated[FunctionTool, _only_functions]], Field(fail_fast=True)] | None = None
    # accepted with the one value that is served
    truncation: Literal["disabled"] | None = None
    # ignored
    access_programs: JsonValue = None
    background_options: JsonValue = None
    image: JsonValue = None

    def references(self) -> References:
        items = () if isinstance(self.input, str) else self.input
        named = tuple(item.id for item in items if isinstance(item, ItemReference))
        return References(self.previous_response_id, named)

    def as_chat(self, earlier: StoredContent) -> ChatRequest:
        logprobs = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        text = self.text or TextSettings()
        form: Any = text.format
        if isinstance(form, TextSchemaFormat):
            form = JsonSchemaFormat(type="json_schema", json_schema=form)
        return ChatRequest.model_construct(
            **{name: getattr(self, name) for name in Conversing.model_fields},
            messages=messages_of(self.instructions, earlier, self.input),
            logprobs=logprobs or None,
            max_completion_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            response_format=form,
            tool_choice=_chat_choice(self.tool_choice),
            tools=[function_tool(**tool.model_dump(exclude={"type"})) for tool in self.tools] if self.tools else None,
            verbosity=text.verbosity,
        )


def _chat_choice(choice: Any) -> ToolChoice | None:
    if isinstance(choice, NamedFunction):
        return NamedTool.of(choice.name)
    if isinstance(choice, AllowedFunctions):
        allowed = AllowedNames(mode=choice.mode, tools=[NamedTool.of(tool.name) for tool in choice.tools])
        return AllowedTools(type="allowed_tools", allowed_tools=allowed)
    return cast("ToolChoice | None", choice)


def echoed(body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """Returns the request's fields, with OpenAI's defaults for omitted ones."""
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
    reasoning, choice = body.reasoning, body.tool_choice or "auto"
    return {
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium"} | text,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [
            {"description": None, "parameters": None, **tool.model_dump(exclude_none=True), "strict": bool(tool.strict)}
            for tool in body.tools or ()
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def input_items(body: ResponsesRequest, earlier: StoredContent) -> list[dict[str, Any]]:
    """Returns the input as OpenAI lists it: every item with an identifier, texts as parts, references resolved."""
    items = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    return [json.loads(earlier.items[item.id]) if isinstance(item, ItemReference) else _listed(item) for item in items]


def _listed(item: Any) -> dict[str, Any]:
    listed: dict[str, Any] = item.model_dump(exclude_none=True)
    listed["id"] = item.id or f"{_ID_PREFIXES[item.type]}_{uuid4().hex}"
    listed["status"] = "completed"
    if isinstance(item, InputMessage):
        kind = "output_text" if item.role == "assistant" else "input_text"
        part: dict[str, Any] = {"type": kind, "text": text_of(item.content)}
        listed["content"] = [part | ({"annotations": []} if kind == "output_text" else {})]
    elif isinstance(item, ReasoningItem):
        listed.setdefault("summary", [])
    elif not isinstance(item, FunctionCallItem):
        listed["output"] = text_of(item.output)
    return listed

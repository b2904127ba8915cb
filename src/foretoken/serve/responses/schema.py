"""The request body of /v1/responses, and the chat for which it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, Tag

from foretoken.serve.chat_schema import (
    CHOICE,
    KNOWN_CHOICE,
    AllowedNames,
    AllowedTools,
    ChatForm,
    ChatRequest,
    Earlier,
    Effort,
    Function,
    FunctionName,
    Metadata,
    NamedTool,
    References,
    Tool,
    ToolChoice,
    Verbosity,
)
from foretoken.serve.refused_fields import RESPONSES, Refusals
from foretoken.serve.responses.conversion import messages_of
from foretoken.serve.responses.items import InputItem, ItemReference
from foretoken.serve.schema import (
    Body,
    Count,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Object,
    ResponseFormat,
    Sampling,
    StreamOptions,
    TextFormat,
    about,
)

LOGPROBS = "message.output_text.logprobs"  # of ``include``


class FunctionTool(Function):
    """A function that may be called."""

    type: Literal["function"]


def _only_functions(tool: Any) -> Any:
    """Raises an error that names the kind of a tool that is not served."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise about("type", f"a tool of type {kind[:50]!r} was given; only functions are served")
    return tool


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


class ResponsesRequest(Sampling, ChatForm):
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
    chat_template_kwargs: Object | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: ReasoningSettings | None = None
    store: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextSettings | None = None
    tool_choice: ResponseToolChoice | None = None
    tools: Annotated[list[Annotated[FunctionTool, BeforeValidator(_only_functions)]], Field(fail_fast=True)] | None = (
        None
    )
    top_logprobs: Count | None = None
    # accepted with the one value that is served
    truncation: Literal["disabled"] | None = None
    # ignored
    access_programs: JsonValue = None
    background_options: JsonValue = None
    image: JsonValue = None
    moderation: JsonValue = None
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None

    def references(self) -> References:
        """See ``ChatForm``."""
        items = () if isinstance(self.input, str) else self.input
        named = tuple(item.id for item in items if isinstance(item, ItemReference))
        return References(self.previous_response_id, named)

    def as_chat(self, earlier: Earlier) -> ChatRequest:
        """See ``ChatForm``."""
        logprobs = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        return ChatRequest.model_construct(
            **{name: getattr(self, name) for name in Sampling.model_fields},
            messages=messages_of(self.instructions, earlier, self.input),
            chat_template_kwargs=self.chat_template_kwargs,
            logprobs=logprobs or None,
            max_completion_tokens=self.max_output_tokens,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            response_format=_response_format(self.text),
            tool_choice=_chat_choice(self.tool_choice),
            tools=[_chat_tool(tool) for tool in self.tools] if self.tools else None,
            top_logprobs=self.top_logprobs,
            verbosity=self.text.verbosity if self.text is not None else None,
        )

    def kept(self) -> Self:
        """See ``ChatForm``."""
        return self


def _chat_tool(tool: FunctionTool) -> Tool:
    fields = {name: getattr(tool, name) for name in Function.model_fields}
    return Tool(type="function", function=Function.model_construct(**fields))


def _chat_choice(choice: str | NamedFunction | AllowedFunctions | None) -> ToolChoice | None:
    if isinstance(choice, NamedFunction):
        return _named(choice)
    if isinstance(choice, AllowedFunctions):
        allowed = AllowedNames(mode=choice.mode, tools=[_named(tool) for tool in choice.tools])
        return AllowedTools(type="allowed_tools", allowed_tools=allowed)
    return choice  # type: ignore[return-value]


def _named(choice: NamedFunction) -> NamedTool:
    return NamedTool(type="function", function=FunctionName(name=choice.name))


def _response_format(text: TextSettings | None) -> ResponseFormat | None:
    form = text.format if text is not None else None
    if not isinstance(form, TextSchemaFormat):
        return form
    fields = {name: getattr(form, name) for name in JsonSchema.model_fields}
    return JsonSchemaFormat(type="json_schema", json_schema=JsonSchema.model_construct(**fields))

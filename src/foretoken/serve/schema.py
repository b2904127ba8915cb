"""What clients may send: OpenAI's fields, vLLM's beside them, and ours. Types are strict, unknown fields are errors."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

Integer64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Object = dict[str, JsonValue]


class Body(BaseModel):
    """Base of what is refused as a whole where it has a field that is not known.

    refused: fields of OpenAI's that would change what comes out and are not served, and why.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    refused: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {key: value for key, value in data.items() if key not in cls.refused or value is not None}
        for name in cls.refused.keys() & given.keys():
            raise PydanticCustomError("unknown_field", f"{name} is not served: {cls.refused[name]}", {"name": name})
        unknown = sorted(str(key) for key in given.keys() - cls.model_fields.keys())
        if unknown:
            raise PydanticCustomError(
                "unknown_field",
                "unknown field(s): {names}; known: {known}",
                {"name": unknown[0], "names": ", ".join(unknown), "known": ", ".join(cls.model_fields)},
            )
        return given


class Loose(BaseModel):
    """Base of what clients send back as they got it: further fields are no concern of ours."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class TextPart(Loose):
    """A piece of a message; only text is served."""

    type: Literal["text"]
    text: str


class StreamOptions(Body):
    """include_usage: a last chunk with the usage. continuous_usage_stats: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Prediction(Body):
    """OpenAI's predicted output: a text that the answer is expected to follow."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StructuredOutputs(Body):
    """vLLM's: what the text has to be; exactly one of the fields."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})
    json_: Annotated[Object | str | bool | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """``json`` is a field's alias, so the base's own check does not know it."""
        known = ("json", "json_object", "regex", "choice", "grammar")
        if isinstance(data, dict) and (len(data) != 1 or not data.keys() <= set(known)):
            raise PydanticCustomError(
                "structured_outputs", "expected exactly one of {known}", {"known": ", ".join(known)}
            )
        return data


class Generate(Body):
    """The fields that both endpoints have."""

    model: str | None = None
    # OpenAI's
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float] | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    prediction: Prediction | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Integer64 | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    user: str | None = None
    # vLLM's
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Count | None = None
    priority: Integer64 = 0
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Object | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    # ours
    exactness: Literal["distribution", "trajectory", "lossy-typical"] | None = None
    return_steps: bool = False
    speculative_method: str | None = None
    speculative_tokens: Annotated[int, Field(ge=0, le=4096)] | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @model_validator(mode="before")
    @classmethod
    def _characters(cls, data: Any) -> Any:
        """JSON can spell what is no text: half of a pair of surrogates."""
        if isinstance(data, dict):
            try:
                json.dumps(data, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = repr(error.object[error.start])
                raise PydanticCustomError("unicode", f"the body holds {half}, half of a surrogate pair") from error
        return data

    @model_validator(mode="after")
    def _options(self) -> Generate:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is only allowed with stream: true")
        return self


class CompletionRequest(Generate):
    """Body of POST /v1/completions."""

    refused: ClassVar[dict[str, str]] = {"suffix": "the model continues text, it does not fill in; leave it out"}

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    best_of: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class FunctionCall(Loose):
    """A function and its arguments, which are JSON in a string."""

    name: str
    arguments: str


class ToolCall(Loose):
    """What an assistant called."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Loose):
    """One message. ``content`` is missing only beside tool calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError("content", "content is missing; only an assistant's tool calls go without")
        return self


class Function(Body):
    """A function that may be called. ``parameters``: a JSON schema; none: no arguments."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Body):
    """Only functions are served."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """Which function."""

    name: str


class NamedTool(Body):
    """The one tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    """A schema and what it is called."""

    model_config = ConfigDict(protected_namespaces=())
    name: str
    description: str | None = None
    schema_: Annotated[Object | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """``schema`` is a field's alias, and pydantic's own refusal of other fields will do."""
        return data


class TextFormat(Body):
    """Whatever the model says."""

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
    """Body of POST /v1/chat/completions. Where OpenAI's fields change nothing that comes out, they are ignored."""

    refused: ClassVar[dict[str, str]] = {
        "audio": "only text comes out",
        "web_search_options": "the server does not search; put what was found into a message",
        "functions": "it was replaced by tools",
        "function_call": "it was replaced by tool_choice",
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    chat_template_kwargs: Object | None = None
    logprobs: bool | None = None
    max_completion_tokens: Count | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    response_format: ResponseFormat | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    tools: list[Tool] | None = None
    top_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    # accepted where they ask for nothing else than what is done
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    # ignored
    metadata: dict[str, str] | None = None
    moderation: JsonValue = None
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None

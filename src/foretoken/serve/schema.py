"""Request bodies: the fields of OpenAI, of vLLM and our own, with strict types.

Fields of other servers and APIs that would change the text and have no equivalent here are refused by name, because
ignoring them would return another text than the client asked for.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from foretoken.core.checks import MAX_SEED, MIN_SEED
from foretoken.core.schema import subschemas
from foretoken.core.verdict import Kind
from foretoken.params import LARGEST, MAX_COUNT, MAX_N, MAX_SALT, MAX_SPECULATIVE_TOKENS, SMALLEST
from foretoken.serve.request_state import ignore_unknown_fields


@dataclass(frozen=True, slots=True)
class Refusal:
    """The refusal of a field."""

    reason: str  # or the field to use
    off: tuple[Any, ...] = (False,)  # accepted values, beside null, which change nothing; False includes 0

    def accepts(self, value: Any) -> bool:
        """Returns whether the value changes nothing."""
        return value is None or value in self.off


Refusals = Mapping[str, Refusal]

_NO_SAMPLER = "this sampler does not exist here; temperature, top_p, top_k and min_p do"
_NO_PENALTY = "this penalty does not exist here; presence_, frequency_ and repetition_penalty do"
_NO_TOOLS = "no tools are run on this server"
_ONE_BY_ONE = "tokens are sampled one by one"

# On all endpoints that generate.
SAMPLING: Refusals = {
    # llama.cpp
    "adaptive_target": Refusal(_NO_SAMPLER, (-1, False)),
    "dry_multiplier": Refusal(_NO_PENALTY),
    "dynatemp_range": Refusal(_NO_SAMPLER),
    "lora": Refusal("name the adapter as model", ([],)),
    "min_keep": Refusal(_NO_SAMPLER),
    "mirostat": Refusal(_NO_SAMPLER),
    "n_indent": Refusal("indentation is not enforced; use grammar"),
    "n_predict": Refusal("use max_tokens (max_output_tokens in responses)", (-1,)),
    "samplers": Refusal("their order is fixed: penalties, temperature, min_p, top_k, top_p"),
    "t_max_predict_ms": Refusal("a request has no time limit of its own; use max_tokens"),
    "top_n_sigma": Refusal(_NO_SAMPLER, (-1, False)),
    "typical_p": Refusal(_NO_SAMPLER, (1,)),
    "xtc_probability": Refusal(_NO_SAMPLER),
    # vLLM
    "guided_whitespace_pattern": Refusal("JSON has the whitespace of json.dumps, or any: see structured_outputs"),
    "logits_processors": Refusal("no code of clients is run", ([],)),
    "structural_tag": Refusal("use structured_outputs, or tools"),
    "thinking_token_budget": Refusal("reasoning has no budget of tokens here"),
    "truncation_side": Refusal("truncate_prompt_tokens keeps the last tokens", ("left",)),
    "use_beam_search": Refusal(f"{_ONE_BY_ONE}; leave it out"),
    # SGLang
    "custom_logit_processor": Refusal("no code of clients is run"),
    "input_ids": Refusal("token ids are the prompt of /v1/completions"),
    "lora_path": Refusal("name the adapter as model"),
    "separate_reasoning": Refusal("start the server with --reasoning-parser none", (True,)),
    "session_params": Refusal("send the whole conversation; the prefix cache finds what is known of it"),
    "stop_regex": Refusal("use stop, or regex"),
    # DashScope, DeepSeek, text-generation-inference and others
    "enable_thinking": Refusal("put it into chat_template_kwargs", ()),
    "max_new_tokens": Refusal("use max_tokens (max_output_tokens in responses)"),
    "no_repeat_ngram_size": Refusal(_NO_PENALTY),
    "tfs_z": Refusal(_NO_SAMPLER, (1,)),
    "top_a": Refusal(_NO_SAMPLER),
    "typical": Refusal(_NO_SAMPLER, (1,)),
}

STRUCTURED_OUTPUTS: Refusals = {
    "disable_additional_properties": Refusal("say it in the schema, with additionalProperties: false"),
    "structural_tag": Refusal("use tools"),
    "whitespace_pattern": Refusal("use whitespace, which is true for any and false for that of json.dumps"),
}
COMPLETIONS: Refusals = {
    **SAMPLING,
    "max_completion_tokens": Refusal("use max_tokens"),
    "messages": Refusal("use /v1/chat/completions"),
    "prompt_embeds": Refusal("send the prompt as text or as token ids"),
    "tools": Refusal("use /v1/chat/completions", ([],)),
}
CHAT: Refusals = {
    **SAMPLING,
    "audio": Refusal("only text comes out"),
    "best_of": Refusal("use n, or best_of on /v1/completions", (1,)),
    "chat_template": Refusal("start the server with --chat-template"),
    "documents": Refusal("put them into a message"),
    "echo": Refusal("the answer is the new message alone"),
    "function_call": Refusal("it was replaced by tool_choice"),
    "functions": Refusal("it was replaced by tools"),
    "max_output_tokens": Refusal("use max_completion_tokens"),
    "prompt": Refusal("use messages, or /v1/completions"),
    "reasoning": Refusal("use reasoning_effort"),
    "suffix": Refusal("use /v1/completions", ("",)),
    "thinking": Refusal("put enable_thinking into chat_template_kwargs"),
    "web_search_options": Refusal("the server does not search; put what was found into a message"),
}
RESPONSES: Refusals = {
    **SAMPLING,
    "background": Refusal("responses are written while the client waits; use stream, or leave it out"),
    "context_management": Refusal("nothing is compacted; send fewer items"),
    "conversation": Refusal("use previous_response_id"),
    "max_completion_tokens": Refusal("use max_output_tokens"),
    "max_tokens": Refusal("use max_output_tokens"),
    "max_tool_calls": Refusal(_NO_TOOLS),
    "messages": Refusal("use input"),
    "n": Refusal("a response has one output", (1,)),
    "prompt": Refusal("prompt templates are OpenAI's; put the text into instructions or input"),
    "reasoning_effort": Refusal("use reasoning.effort"),
    "response_format": Refusal("use text.format"),
    "stop": Refusal("use stop_token_ids, or /v1/chat/completions", ("", [])),
    "verbosity": Refusal("use text.verbosity"),
}
MESSAGES: Refusals = {
    **SAMPLING,
    "container": Refusal(_NO_TOOLS),
    "max_completion_tokens": Refusal("use max_tokens"),
    "mcp_servers": Refusal(_NO_TOOLS),
    "n": Refusal("there is one answer", (1,)),
    "reasoning_effort": Refusal("use output_config.effort"),
    "response_format": Refusal("use output_config.format"),
    "stop": Refusal("use stop_sequences", ("", [])),
}
TOKENIZE: Refusals = {"chat_template": Refusal("start the server with --chat-template")}


_RESTRICTIONS = {"$ref", "anyOf", "oneOf", "allOf", "enum", "const"}  # a schema without any of them or a type is open


def check_strict(strict: bool | None, schema: Any, owner: str, field: str) -> None:
    """Raises a validation error if a strict schema has an object that is open to other properties.

    ``owner`` and ``field`` name the schema in the error.
    """
    for path, part in subschemas(schema) if strict and schema is not None else ():
        if _allows_objects(part) and part.get("additionalProperties") is not False:
            context = {"owner": owner, "field": field, "path": ", ".join(map(repr, path))}
            raise PydanticCustomError(
                "strict_schema",
                "Invalid schema for {owner}: In context=({path}), 'additionalProperties' is required to be supplied "
                "and to be false, because strict is true; add it, or leave strict out",
                context,
            )


def _allows_objects(schema: dict[str, Any]) -> bool:
    types = schema.get("type")
    if types is None:
        return "properties" in schema or not _RESTRICTIONS & schema.keys()
    return types == "object" or (isinstance(types, list) and "object" in types)


Integer64 = Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)]
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Choices = Annotated[int, Field(ge=1, le=MAX_N)]
Object = dict[str, JsonValue]
Bias = Annotated[float, Field(ge=-100, le=100)]
# Validation stops at the first wrong item of a list, because a million errors would take long to build.
Strings = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]

_NAMED = 5  # unknown fields that an error names
REQUEST_ID = r"^[!-~]{1,128}$"  # goes into a header


def field_error(field: str, message: str) -> PydanticCustomError:
    """Returns the error of a validator of a whole object or list that blames a part: the field's path from there."""
    return PydanticCustomError("field", "{message}", {"message": message, "field": field})


def _no_underflow(temperature: float) -> float:
    if 0 < temperature < SMALLEST:
        raise PydanticCustomError("temperature", f"temperature must be 0 (greedy) or at least {SMALLEST}")
    return temperature


def first_wrong(expected: str, fits: Callable[[str, Any], bool]) -> BeforeValidator:
    """Returns a validator that stops at a dict's first wrong entry. Pydantic's ``fail_fast`` is for lists only."""

    def check(value: Any) -> Any:
        for key, item in value.items() if isinstance(value, dict) else ():
            if not fits(key, item):
                raise PydanticCustomError("entry", "{key} is not {expected}", {"key": repr(key), "expected": expected})
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """Base of objects in which an unknown field is an error, or is ignored with a warning (``request_state``).

    Attributes:
        refused: Fields that would change the output and are not served.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    refused: ClassVar[Refusals] = {}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        sent = {k: value for k, value in data.items() if k not in cls.refused or not cls.refused[k].accepts(value)}
        for name in cls.refused.keys() & sent.keys():
            reason = f"{name} is not served: {cls.refused[name].reason}"
            raise PydanticCustomError("unknown_field", "{reason}", {"reason": reason, "field": name})
        known = [info.alias or name for name, info in cls.model_fields.items()]
        unknown = sorted(str(key) for key in sent.keys() - set(known))
        if unknown and ignore_unknown_fields(unknown):
            return {key: sent[key] for key in sent.keys() & set(known)}
        if unknown:
            raise PydanticCustomError(
                "unknown_field",
                "unknown field(s): {names}; known: {known}",
                {"field": unknown[0], "names": ", ".join(unknown[:_NAMED]), "known": ", ".join(known)},
            )
        return sent


class Loose(BaseModel):
    """Base of objects that clients receive and send back. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class TextPart(Loose):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: str

    def __str__(self) -> str:
        return self.text


def text_of(content: str | Sequence[BaseModel] | None) -> str:
    """Returns the text of parts, a line for each."""
    return content if isinstance(content, str) else "\n".join(map(str, content or ()))


def only_types(noun: str, served: Sequence[str], hint: str) -> BeforeValidator:
    """Returns a validator whose error names the type of an object, or of one in a list, that is not served."""

    def check(value: Any) -> Any:
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            kind = item.get("type") if isinstance(item, dict) else None
            if isinstance(kind, str) and kind not in served:
                field = f"{index}.type" if isinstance(value, list) else "type"
                raise field_error(field, f"a {noun} of type {kind[:50]!r} was given; {hint}")
        return value

    return BeforeValidator(check)


_only_text = only_types("part", ("text",), "only parts of type 'text' are served")
Content = Annotated[str | Annotated[list[TextPart], Field(fail_fast=True)], _only_text]


class StreamOptions(Body):
    """Options of a stream.

    Args:
        include_usage: Whether to send a last chunk with the usage.
        continuous_usage_stats: Whether every chunk has the usage so far.
        include_obfuscation: Accepted and ignored.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class PredictedContent(Body):
    """OpenAI's predicted output: a text that the answer is expected to resemble."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        return "".join(map(str, self.content))


class StructuredOutputs(Body):
    """vLLM's structured outputs, in exactly one of several forms. whitespace: whether JSON may have any whitespace."""

    refused: ClassVar[Refusals] = STRUCTURED_OUTPUTS

    json_: Annotated[Object | str | bool | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[Strings, Field(min_length=1)] | None = None
    grammar: str | None = None
    whitespace: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        forms = {"json": self.json_, **{name: getattr(self, name) for name in _FORMS}}
        if sum(value is not None for value in forms.values()) != 1:
            raise PydanticCustomError(
                "structured_outputs", "expected exactly one of {forms}", {"forms": ", ".join(forms)}
            )
        return self


_FORMS = ("json_object", "regex", "choice", "grammar")


class JsonSchema(Body):
    """A named JSON schema."""

    model_config = ConfigDict(protected_namespaces=())
    name: str
    description: str | None = None
    schema_: Annotated[Object | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _closed(self) -> "JsonSchema":
        check_strict(self.strict, self.schema_, f"response_format {self.name!r}", "schema")
        return self


class TextFormat(Body):
    """Unrestricted text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object, or with ``schema``, as llama.cpp takes it, JSON that the schema allows."""

    model_config = ConfigDict(protected_namespaces=())
    type: Literal["json_object"]
    schema_: Annotated[Object | None, Field(alias="schema")] = None


class JsonSchemaFormat(Body):
    """JSON that the schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


_TOKEN = r"^[0-9]{1,9}$"
_BIASES = first_wrong(
    f"a token id (pattern {_TOKEN}) with a number from -100 to 100",
    lambda key, bias: (
        isinstance(key, str)
        and re.match(_TOKEN, key) is not None
        and isinstance(bias, int | float)
        and not isinstance(bias, bool)
        and -100 <= bias <= 100
    ),
)


class Sampling(Body):
    """Fields of all endpoints that generate: the sampling distribution, and how it is computed."""

    model: str | None = None
    # OpenAI's
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[Annotated[str, Field(pattern=_TOKEN)], Bias], _BIASES] | None = None
    prediction: PredictedContent | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Integer64 | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=LARGEST), AfterValidator(_no_underflow)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1), AfterValidator(lambda p: max(p, SMALLEST))] | None = None
    user: str | None = None
    # vLLM's and llama.cpp's
    add_special_tokens: bool | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    bad_words: Strings | None = None
    cache_prompt: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Count | None = None
    priority: Integer64 = 0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: TokenIds | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Object | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[Strings, Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    # equivalents in llama.cpp and SGLang
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: Object | str | bool | None = None
    no_stop_trim: bool | None = None
    regex: str | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    # ours
    acceptance_stop: Annotated[list[Kind], Field(fail_fast=True)] | None = None
    exactness: Literal["distribution", "trajectory", "lossy-typical"] | None = None
    return_steps: bool = False
    speculative_method: str | None = None
    speculative_tokens: Annotated[int, Field(ge=0, le=MAX_SPECULATIVE_TOKENS)] | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)


class Generate(Sampling):
    """Fields of completions and chat completions."""

    max_tokens: Count | None = None
    n: Choices | None = None
    prompt_logprobs: Count | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    stop: str | Annotated[Strings, Field(max_length=64)] | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options(self) -> "Generate":
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "stream_options is only allowed with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("prompt_logprobs", "prompt_logprobs cannot be streamed; omit stream")
        return self


class CompletionRequest(Generate):
    """Body of POST /v1/completions."""

    refused: ClassVar[Refusals] = COMPLETIONS

    prompt: str | Strings | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    best_of: Choices | None = None
    echo: bool | None = None
    logprobs: Count | None = None
    suffix: str | None = None

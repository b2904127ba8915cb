"""The formats of model families by name, which one a chat template asks for, and the parsers of one answer."""

import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.params import SamplingParams
from foretoken.serve.chat_schema import ChatRequest, NamedTool, offered_tools
from foretoken.serve.parsers import OutputParser
from foretoken.serve.parsers.call_bodies import (
    CallWriter,
    ParameterTags,
    Reading,
    Schemas,
    gemma_body,
    head_body,
    json_body,
    parameter_body,
    python_body,
)
from foretoken.serve.parsers.output_parsers import (
    HARMONY_TAGS,
    CallFormat,
    HarmonyParser,
    ReasoningFormat,
    ReasoningParser,
    ToolParser,
    WithoutTokens,
)
from foretoken.serve.parsers.values import schema_types

# heads of calls, with the function's name in one group
_KIMI = re.compile(r"\s*(?:functions\.)?(.+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*\Z", re.DOTALL)
# V3's ``function<sep>NAME`` before a block of JSON, or V3.1's ``NAME<sep>``
_DEEPSEEK = re.compile(r"\s*(?:function<｜tool▁sep｜>(.+?)\s*```(?:json)?|(.+?)<｜tool▁sep｜>)\s*\Z", re.DOTALL)
# ``NAME``, ``NAME[ARGS]`` or ``NAME[CALL_ID]id[ARGS]``
_MISTRAL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*\Z")

_QWEN_CODER = ParameterTags(
    name=re.compile(r"\s*([^>\n]+)>"),
    parameter=re.compile(r"<parameter=(?P<name>[^>]+)>"),
    value_end="</parameter>",
    end="</function>",
    newlines=True,
)
_GLM = ParameterTags(
    name=re.compile(r"\s*([^\s<{]+)\s*(?=<)"),
    parameter=re.compile(r"<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>", re.DOTALL),
    value_end="</arg_value>",
    end="</tool_call>",
)
_DSML = ParameterTags(
    name=re.compile(r'([^"]+)"\s*>'),
    parameter=re.compile(r'<｜DSML｜parameter\s+name="(?P<name>[^"]+)"(?:\s+string="(?P<string>true|false)")?\s*>'),
    value_end="</｜DSML｜parameter>",
    end="</｜DSML｜invoke>",
)
_MINIMAX = ParameterTags(
    name=re.compile(r'([^"]+)"\s*>'),
    parameter=re.compile(r'<parameter\s+name="(?P<name>[^"]+)"\s*>'),
    value_end="</parameter>",
    end="</invoke>",
)


def _mistral_body(writer: CallWriter) -> Reading:
    """Reads a list of calls in JSON (tokenizers before version 11), or one call with its name before its arguments."""
    text = ""
    while not (text := text.lstrip()):
        text = yield
    return (yield from (json_body(writer, text=text) if text[0] in "[{" else head_body(writer, _MISTRAL, text)))


_BARE = {"{": partial(json_body, strict=True)}

CALL_FORMATS: dict[str, CallFormat] = {
    "hermes": CallFormat({"<tool_call>": json_body}, ("</tool_call>",)),
    "llama3_json": CallFormat(ignored=("<|python_tag|>",), bare=_BARE),
    "pythonic": CallFormat(ignored=("<|python_start|>", "<|python_end|>"), bare={"[": python_body}),
    "qwen3_coder": CallFormat(
        {"<function=": partial(parameter_body, tags=_QWEN_CODER)}, ("<tool_call>", "</tool_call>")
    ),
    "seed_oss": CallFormat(
        {"<function=": partial(parameter_body, tags=_QWEN_CODER)}, ("<seed:tool_call>", "</seed:tool_call>")
    ),
    "glm45": CallFormat({"<tool_call>": partial(parameter_body, tags=_GLM)}),
    "deepseek_v3": CallFormat(
        {"<｜tool▁call▁begin｜>": partial(head_body, head=_DEEPSEEK)},
        ("<｜tool▁calls▁begin｜>", "```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v32": CallFormat(
        {'<｜DSML｜invoke name="': partial(parameter_body, tags=_DSML)},
        (
            *("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
            *("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        ),
    ),
    "minimax_m2": CallFormat(
        {'<invoke name="': partial(parameter_body, tags=_MINIMAX)}, ("<minimax:tool_call>", "</minimax:tool_call>")
    ),
    "kimi_k2": CallFormat(
        {"<|tool_call_begin|>": partial(head_body, head=_KIMI)},
        ("<|tool_calls_section_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
    "mistral": CallFormat({"[TOOL_CALLS]": _mistral_body}),
    "granite": CallFormat({"<|tool_call|>": json_body, "<tool_call>": json_body}, ("</tool_call>",)),
    "phi4_mini": CallFormat({"functools": json_body, "<|tool_call|>": json_body}, ("<|/tool_call|>",)),
    "gemma4": CallFormat({"<|tool_call>": gemma_body}),
    "auto": CallFormat({"<tool_call>": json_body}, ("</tool_call>", "<|python_tag|>"), _BARE),
}
"""Formats of calls by the names of vLLM's parsers. ``auto`` reads Hermes' and Llama 3's form."""

FORMATS = CALL_FORMATS | {"forced": CallFormat(bare={"{": json_body, "[": json_body}, only_calls=True)}

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "qwen3_coder": ReasoningFormat("<think>", "</think>", also_ends=("<tool_call>",)),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>"),
}
"""The tags around reasoning. Nearly all families write ``think``."""

HARMONY = "harmony"

# Texts in a chat template, the parser of calls, and the parser of reasoning. The first row that fits counts.
_SIGNS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("<|channel|>", "<|message|>"), HARMONY, HARMONY),
    (("｜DSML｜",), "deepseek_v32", "think"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v3", "think"),
    (("<|tool_calls_section_begin|>",), "kimi_k2", "think"),
    (("<|tool_call>",), "gemma4", "gemma4"),
    (("<minimax:tool_call>",), "minimax_m2", "think"),
    (("<seed:tool_call>",), "seed_oss", "seed_oss"),
    (("<function=", "<parameter="), "qwen3_coder", "qwen3_coder"),
    (("<arg_key>",), "glm45", "think"),
    (("[TOOL_CALLS]",), "mistral", "mistral"),
    (("<|python_start|>",), "pythonic", "think"),
    (("functools[",), "phi4_mini", "think"),
    (("<|tool_call|>",), "granite", "think"),
)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Format of one model's output."""

    calls: str = "auto"  # a name of ``CALL_FORMATS``, or ``harmony``
    reasoning: str | None = None  # a name of ``REASONING_FORMATS``, ``harmony``, or None if the model does not reason

    @staticmethod
    def of(template: str | None) -> "OutputFormat":
        """Returns the format that a chat template shows."""
        text = template or ""
        calls, reasoning = next(
            ((calls, reasoning) for signs, calls, reasoning in _SIGNS if all(sign in text for sign in signs)),
            ("auto", "think"),
        )
        if reasoning != HARMONY and REASONING_FORMATS[reasoning].end not in text:
            return OutputFormat(calls)
        return OutputFormat(calls, reasoning)

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that must reach the parser, even if they are special tokens."""
        if HARMONY in (self.calls, self.reasoning):
            return HARMONY_TAGS
        reasoning = REASONING_FORMATS[self.reasoning] if self.reasoning else None
        return (*FORMATS[self.calls].tags, *((reasoning.start, reasoning.end) if reasoning else ()))

    def opened_by(self, prompt: str) -> bool:
        """Returns whether the text of a prompt ends within reasoning, so that the output begins there."""
        tags = REASONING_FORMATS.get(self.reasoning or "")
        if tags is None:
            return False
        return prompt.rfind(tags.start) > prompt.rfind(tags.end) and prompt.rstrip().endswith(tags.start)


FORCED = OutputFormat("forced")
"""The JSON to which a grammar restricts an answer that must consist of calls."""


def check_parsers(calls: str | None, reasoning: str | None) -> None:
    """Raises InvalidRequest for the name of a parser that there is not."""
    for option, name, known in (
        ("--tool-call-parser", calls, TOOL_CALL_PARSERS),
        ("--reasoning-parser", reasoning, REASONING_PARSERS),
    ):
        if name is not None and name not in known:
            raise InvalidRequest(f"{option} must be one of {', '.join(known)}, got {name!r}")


def chosen_format(template: str | None, calls: str | None = None, reasoning: str | None = None) -> OutputFormat:
    """Returns the format of a chat template, or that of the parsers that are named instead of it.

    calls: A name of ``TOOL_CALL_PARSERS``, None for the one that the template shows. reasoning: A name of
    ``REASONING_PARSERS``, ``none`` for a model that does not reason.
    """
    shown = OutputFormat.of(template)
    named = shown.reasoning if reasoning is None else None if reasoning == "none" else reasoning
    return OutputFormat(calls or shown.calls, named)


TOOL_CALL_PARSERS = (*CALL_FORMATS, HARMONY)
REASONING_PARSERS = (*REASONING_FORMATS, HARMONY, "none")


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """The expected output of one request."""

    format: OutputFormat = field(default_factory=OutputFormat)
    schemas: Schemas | None = None  # of the functions that may be called; None if none may
    opened: bool = False  # whether the prompt ends within reasoning
    end_token: int | None = None  # the token that ends reasoning, if it is one
    dropped: tuple[str, ...] = ()  # special tokens that the text holds and that are no part of the format
    named: str | None = None  # the function that must be called, if the request names one

    def parser(self) -> OutputParser:
        """Returns a parser of one answer."""
        parser: OutputParser = OutputParser()
        reasoning = self.format.reasoning
        if HARMONY in (self.format.calls, reasoning):
            parser = HarmonyParser()
        else:
            if self.schemas is not None:
                parser = ToolParser(FORMATS[self.format.calls], self.schemas, self.named)
            if reasoning is not None:
                parser = ReasoningParser(REASONING_FORMATS[reasoning], parser, self.opened, self.end_token)
        return WithoutTokens(self.dropped, parser) if self.dropped else parser


def expect(
    format: OutputFormat, chat: ChatRequest, prompt: str, params: SamplingParams, forced: bool, tokenizer: Any
) -> tuple[ExpectedOutput, SamplingParams]:
    """Returns the expected output, and the parameters with which the text shows all tags that its parser needs.

    ``prompt`` is the rendered prompt. ``forced`` is whether a grammar restricts the answer to calls in JSON.
    """
    tools = offered_tools(chat)
    schemas = {tool.function.name: _types(tool.function.parameters) for tool in tools} if tools else None
    if forced:
        named = chat.tool_choice.function.name if isinstance(chat.tool_choice, NamedTool) else None
        return ExpectedOutput(FORCED, schemas, named=named), params
    opened = params.structured_outputs is None and format.opened_by(prompt)  # a grammar holds from the first token on
    special: list[str] = list(getattr(tokenizer, "all_special_tokens", ()))
    end_token = None
    if (reasoning := REASONING_FORMATS.get(format.reasoning or "")) is not None:
        token = tokenizer.convert_tokens_to_ids(reasoning.end)
        if isinstance(token, int) and token != getattr(tokenizer, "unk_token_id", None):
            end_token = token
    if params.skip_special_tokens and set(special).intersection(format.tags):
        params = replace(params, skip_special_tokens=False)
        return ExpectedOutput(format, schemas, opened, end_token, tuple({*special} - {*format.tags})), params
    return ExpectedOutput(format, schemas, opened, end_token), params


def _types(parameters: Any) -> dict[str, Any]:
    """Returns the types of a schema's arguments; a parser needs nothing else of it."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    named = properties.items() if isinstance(properties, dict) else ()
    return {"properties": {name: {"type": sorted(schema_types(schema))} for name, schema in named}}

"""The expected output of one chat, and the parsers that read it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from foretoken.params import SamplingParams
from foretoken.serve.chat_schema import ChatRequest, NamedTool, offered_tools
from foretoken.serve.output import OutputParser
from foretoken.serve.parsers.call_bodies import Schemas
from foretoken.serve.parsers.formats import FORCED, FORMATS, HARMONY, REASONING_FORMATS, OutputFormat
from foretoken.serve.parsers.output_parsers import HarmonyParser, ReasoningParser, ToolParser, WithoutTokens
from foretoken.serve.parsers.values import schema_types


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

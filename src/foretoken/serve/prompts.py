"""Prompts: conversations by a chat template, the tools they offer, and fill-in-the-middle."""

import inspect
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.core.schema import subschemas
from foretoken.engine.prompts import apply_template, own_template
from foretoken.serve.chat_schema import AllowedTools, ChatRequest, Message, NamedTool, Tool, offered_tools
from foretoken.serve.errors import invalid
from foretoken.serve.parsers.values import object_of
from foretoken.serve.schema import text_of

_ID_LENGTH = 9  # of calls in Mistral's templates
# (before the prefix, before the suffix, before the middle), as llama.cpp knows them by name
FORMATS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
)


def forced_calls(body: ChatRequest) -> dict[str, Any] | None:
    """Returns the JSON schema of the calls that ``tool_choice`` demands, None if it demands none. Raises ApiError."""
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        names = {tool.function.name for tool in body.tools or ()}
        for named in choice.allowed_tools.tools:
            if named.function.name not in names:
                raise invalid(_no_such_tool(named.function.name, body.tools or ()), param="tool_choice")
        choice = choice.allowed_tools.mode
    tools = offered_tools(body)
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        raise invalid("tool_choice demands a call, but there are no tools", param="tool_choice")
    if isinstance(choice, NamedTool):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        if not chosen:
            raise invalid(_no_such_tool(choice.function.name, tools), param="tool_choice")
        return _with_definitions(_call_schema(chosen[0]), chosen)
    call = {"anyOf": [_call_schema(tool) for tool in tools]}
    if body.parallel_tool_calls is False:
        return _with_definitions(call, tools)
    return _with_definitions({"type": "array", "minItems": 1, "items": call}, tools)


def _no_such_tool(name: str, tools: Sequence[Tool]) -> str:
    return f"tool_choice names {name!r}; tools: {', '.join(tool.function.name for tool in tools) or 'none'}"


def _call_schema(tool: Tool) -> dict[str, Any]:
    name = tool.function.name
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _with_definitions(schema: dict[str, Any], tools: Sequence[Tool]) -> dict[str, Any]:
    """Returns ``schema`` with each tool's parameters as a definition, to which their references are adapted."""
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    definitions = {}
    for tool in tools:
        name = tool.function.name
        definitions[name] = deepcopy(tool.function.parameters or nothing)
        for _, part in subschemas(definitions[name]):
            if isinstance(part.get("$ref"), str) and part["$ref"].startswith("#"):
                part["$ref"] = f"#/$defs/{name}" + part["$ref"][1:]
    return {**schema, "$defs": definitions}


def render(tokenizer: Any, body: ChatRequest, template: str | None) -> str:
    """Returns the conversation as a text. Raises InvalidRequest."""
    shown = template or own_template(
        tokenizer, "this model", "use /v1/completions, or start the server with --chat-template"
    )
    tools = offered_tools(body)
    if tools and body.tool_choice in (None, "auto") and isinstance(shown, str) and "tools" not in shown:
        raise InvalidRequest("tools cannot be passed to this model: its chat template does not mention them", "tools")
    variables = dict(body.chat_template_kwargs or {})
    reserved = sorted(variables.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys())
    if reserved:
        raise InvalidRequest(
            f"chat_template_kwargs must not hold {', '.join(reserved)}; only the template's own names",
            param="chat_template_kwargs",
        )
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        for switch in ("enable_thinking", "thinking"):  # of templates that do not grade the effort
            variables.setdefault(switch, body.reasoning_effort != "none")
    if body.verbosity is not None:
        variables["verbosity"] = body.verbosity
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and generates:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other: a message is continued, or begun",
            param="continue_final_message",
        )
    text: str = apply_template(
        tokenizer,
        _adapted([_templated(message) for message in body.messages], shown if isinstance(shown, str) else ""),
        tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
        chat_template=template,
        add_generation_prompt=generates,
        continue_final_message=continues,
        tokenize=False,
        **variables,
    )
    return text


def _templated(message: Message) -> dict[str, Any]:
    """Returns a message as templates expect it: one text, arguments as objects, ``developer`` as ``system``."""
    templated = message.model_dump(exclude_none=True)
    templated["content"] = text_of(message.content)
    templated["role"] = "system" if message.role == "developer" else message.role
    if not templated.get("tool_calls"):
        templated.pop("tool_calls", None)  # some templates take an empty list for a call
    for call in templated.get("tool_calls", ()):
        call["function"]["arguments"] = object_of(call["function"]["arguments"])
    return templated


def _adapted(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Returns the messages in the form that a template demands of calls: by Mistral's check of ids, or by Llama 3's."""
    if f"length != {_ID_LENGTH}" in template:
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["id"] = call.get("id", "")[-_ID_LENGTH:]
            if "tool_call_id" in message:
                message["tool_call_id"] = message["tool_call_id"][-_ID_LENGTH:]
    if "single tool-calls" in template:
        return _one_call_each(messages)
    return messages


def _one_call_each(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Divides messages of several calls into messages of one, each before its result."""
    divided: list[dict[str, Any]] = []
    pending: list[dict[str, Any]] = []  # messages of further calls, until their results come
    for message in messages:
        if message["role"] == "tool":
            identifier = message.get("tool_call_id")
            called = [call_message for call_message in pending if call_message["tool_calls"][0].get("id") == identifier]
            divided += called[:1]
            pending = [call_message for call_message in pending if call_message not in called[:1]]
        else:
            divided += pending
            first, *others = message.get("tool_calls") or [None]
            pending = [{**message, "content": "", "tool_calls": [call]} for call in others]
            message = {**message, "tool_calls": [first]} if first else message
        divided.append(message)
    return divided + pending


def fill_in_prompt(tokenizer: Any, prefix: str, suffix: str) -> list[int]:
    """Returns the tokens of a prompt for the text between ``prefix`` and ``suffix``. Raises ApiError."""
    vocabulary = tokenizer.get_vocab()
    marks = next(
        ([vocabulary[name] for name in names] for names in FORMATS if all(n in vocabulary for n in names)), None
    )
    if marks is None:
        raise invalid(
            "this model has no tokens for filling in (such as <|fim_prefix|>); leave suffix out, or serve a code model "
            "that has them",
            param="suffix",
        )

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    starts = list(tokenizer("")["input_ids"])  # such as a beginning-of-text token
    beginning = starts[:1] if starts and starts[0] == tokenizer.bos_token_id else []
    return [*beginning, marks[0], *ids(prefix), marks[1], *ids(suffix), marks[2]]

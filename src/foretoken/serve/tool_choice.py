"""``tool_choice``: which tools may be called, and the grammar of calls that are demanded."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from foretoken.core.json_schema import subschemas
from foretoken.serve.chat_schema import AllowedTools, ChatRequest, NamedTool, Tool
from foretoken.serve.errors import invalid


def offered(body: ChatRequest) -> list[Tool]:
    """Returns the tools that may be called."""
    if body.tool_choice == "none":
        return []
    tools = body.tools or []
    if isinstance(body.tool_choice, AllowedTools):
        allowed = {tool.function.name for tool in body.tool_choice.allowed_tools.tools}
        tools = [tool for tool in tools if tool.function.name in allowed]
    return tools


def forced(body: ChatRequest) -> dict[str, Any] | None:
    """Returns the JSON schema of the calls that ``tool_choice`` demands, None if it demands none. Raises ApiError."""
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        known = {tool.function.name for tool in body.tools or ()}
        for named in choice.allowed_tools.tools:
            if named.function.name not in known:
                raise invalid(_no_such_tool(named.function.name, body.tools or ()), param="tool_choice")
        choice = choice.allowed_tools.mode
    tools = offered(body)
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        raise invalid("tool_choice demands a call, but there are no tools", param="tool_choice")
    if isinstance(choice, NamedTool):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        if not chosen:
            raise invalid(_no_such_tool(choice.function.name, tools), param="tool_choice")
        return _with_definitions(_call_schema(chosen[0]), chosen)
    each = {"anyOf": [_call_schema(tool) for tool in tools]}
    if body.parallel_tool_calls is False:
        return _with_definitions(each, tools)
    return _with_definitions({"type": "array", "minItems": 1, "items": each}, tools)


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
        definitions[name] = _moved(tool.function.parameters or nothing, f"#/$defs/{name}")
    return {**schema, "$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """Returns a copy of ``schema`` whose references to itself are references to ``place``."""
    moved = deepcopy(schema)
    for _, part in subschemas(moved):
        if isinstance(part.get("$ref"), str) and part["$ref"].startswith("#"):
            part["$ref"] = place + part["$ref"][1:]
    return moved

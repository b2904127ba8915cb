"""What a response repeats of its request, and the input items as they are listed."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

from foretoken.params import SamplingParams
from foretoken.serve.chat_schema import Earlier
from foretoken.serve.responses.items import FunctionCallItem, InputMessage, ItemReference, ReasoningItem, text_of
from foretoken.serve.responses.schema import ResponsesRequest

_BEGINNINGS = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def echoed(body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """Returns the fields that are the request's, with OpenAI's defaults for what it left out."""
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
    reasoning = body.reasoning
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
        "tool_choice": _dumped(body.tool_choice or "auto"),
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _tool(tool: Any) -> dict[str, Any]:
    return {"description": None, "parameters": None, **tool.model_dump(exclude_none=True), "strict": bool(tool.strict)}


def _dumped(value: Any) -> Any:
    return value if isinstance(value, str) else value.model_dump()


def input_items(body: ResponsesRequest, earlier: Earlier) -> list[dict[str, Any]]:
    """Returns the input as OpenAI lists it: every item with an identifier, texts as parts, references resolved."""
    given = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    return [json.loads(earlier.items[item.id]) if isinstance(item, ItemReference) else _listed(item) for item in given]


def _listed(item: Any) -> dict[str, Any]:
    listed: dict[str, Any] = item.model_dump(exclude_none=True)
    listed["id"] = item.id or f"{_BEGINNINGS[item.type]}_{uuid4().hex}"
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

"""Conversations as texts, by a chat template."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.engine.chat_template import apply_template, own_template
from foretoken.serve.chat_schema import ChatRequest, Message
from foretoken.serve.parsers.values import object_of
from foretoken.serve.tool_choice import offered

_ID_LENGTH = 9  # of calls in Mistral's templates


def render(tokenizer: Any, body: ChatRequest, template: str | None) -> str:
    """Returns the conversation as a text. Raises InvalidRequest.

    Args:
        tokenizer: The model's tokenizer.
        body: The request.
        template: A template in place of the tokenizer's own.
    """
    used = template or own_template(
        tokenizer, "this model", "use /v1/completions, or start the server with --chat-template"
    )
    tools = offered(body)
    if tools and body.tool_choice in (None, "auto") and isinstance(used, str) and "tools" not in used:
        raise InvalidRequest("tools cannot be told to this model: its chat template does not mention them", "tools")
    own = dict(body.chat_template_kwargs or {})
    reserved = sorted(own.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys())
    if reserved:
        raise InvalidRequest(
            f"chat_template_kwargs must not hold {', '.join(reserved)}; only the template's own names",
            param="chat_template_kwargs",
        )
    if body.reasoning_effort is not None:
        own["reasoning_effort"] = body.reasoning_effort
        for switch in ("enable_thinking", "thinking"):  # of templates that do not grade the effort
            own.setdefault(switch, body.reasoning_effort != "none")
    if body.verbosity is not None:
        own["verbosity"] = body.verbosity
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and generates:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other: a message is continued, or begun",
            param="continue_final_message",
        )
    text: str = apply_template(
        tokenizer,
        _adapted([_templated(message) for message in body.messages], used if isinstance(used, str) else ""),
        tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
        chat_template=template,
        add_generation_prompt=generates,
        continue_final_message=continues,
        tokenize=False,
        **own,
    )
    return text


def _templated(message: Message) -> dict[str, Any]:
    """Returns a message as templates expect it: one text, arguments as objects, ``developer`` as ``system``."""
    templated = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        templated["content"] = "\n".join(part.text for part in message.content)
    templated.setdefault("content", "")
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
            called = [each for each in pending if each["tool_calls"][0].get("id") == identifier]
            divided += called[:1]
            pending = [each for each in pending if each not in called[:1]]
        else:
            divided += pending
            first, *others = message.get("tool_calls") or [None]
            pending = [{**message, "content": "", "tool_calls": [call]} for call in others]
            message = {**message, "tool_calls": [first]} if first else message
        divided.append(message)
    return divided + pending

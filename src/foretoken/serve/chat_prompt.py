"""Conversations as texts, by a chat template."""

from __future__ import annotations

import inspect
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.serve.chat_schema import ChatRequest, Message
from foretoken.serve.tool_choice import offered, parsed_arguments


def render(tokenizer: Any, body: ChatRequest, template: str | None) -> str:
    """Returns the conversation as a text. Raises InvalidRequest.

    Args:
        tokenizer: The model's tokenizer.
        body: The request.
        template: A template in place of the tokenizer's own.
    """
    used = template or getattr(tokenizer, "chat_template", None)
    if not used:
        raise InvalidRequest(
            "this model has no chat template; use /v1/completions, or start the server with --chat-template"
        )
    tools = offered(body)
    if tools and body.tool_choice in (None, "auto") and isinstance(used, str) and "tools" not in used:
        raise InvalidRequest("tools cannot be told to this model: its chat template does not mention them")
    own = dict(body.chat_template_kwargs or {})
    reserved = sorted(own.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys())
    if reserved:
        raise InvalidRequest(f"chat_template_kwargs must not hold {', '.join(reserved)}; only the template's own names")
    if body.reasoning_effort is not None:
        own["reasoning_effort"] = body.reasoning_effort
        for switch in ("enable_thinking", "thinking"):  # of templates that do not grade the effort
            own.setdefault(switch, body.reasoning_effort != "none")
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and generates:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other: a message is continued, or begun"
        )
    try:
        text: str = tokenizer.apply_chat_template(
            [_templated(message) for message in body.messages],
            tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
            chat_template=template,
            add_generation_prompt=generates,
            continue_final_message=continues,
            tokenize=False,
            **own,
        )
    except InvalidRequest:
        raise
    except Exception as error:  # templates raise what they like, some on purpose
        raise InvalidRequest(f"messages do not fit the chat template: {error}") from error
    return text


def _templated(message: Message) -> dict[str, Any]:
    """Returns a message as templates expect it: one text, arguments as objects, ``developer`` as ``system``."""
    templated = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        templated["content"] = "\n".join(part.text for part in message.content)
    templated.setdefault("content", "")
    templated["role"] = "system" if message.role == "developer" else message.role
    for call in templated.get("tool_calls", ()):
        call["function"]["arguments"] = parsed_arguments(call["function"]["arguments"])
    return templated

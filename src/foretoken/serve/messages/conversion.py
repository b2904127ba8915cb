"""Converts Anthropic's messages to the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence

from foretoken.serve.chat_schema import FunctionCall, Message, ToolCall
from foretoken.serve.errors import invalid
from foretoken.serve.messages.blocks import (
    InputMessageBlocks,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    text_of,
)


def messages_of(system: str | list[TextBlock] | None, given: Sequence[InputMessageBlocks]) -> list[Message]:
    """Returns the messages of a chat. Results of tools become messages of their own, as chat templates expect."""
    messages = [Message(role="system", content=text_of(system))] if system else []
    for message in given:
        if isinstance(message.content, str):
            messages.append(Message(role=message.role, content=message.content))
        elif message.role == "assistant":
            messages.append(_assistant(message))
        else:
            messages += _results_and_text(message)
    return messages


def continues(given: Sequence[InputMessageBlocks]) -> bool:
    """Returns whether the last message is the model's own beginning, which the answer continues."""
    last = given[-1]
    if last.role != "assistant":
        return False
    if not isinstance(last.content, str) and any(isinstance(block, ToolUseBlock) for block in last.content):
        raise invalid("the last message calls a tool; send the tool_result behind it", param="messages")
    return True


def _assistant(message: InputMessageBlocks) -> Message:
    assert not isinstance(message.content, str)
    text, thoughts, calls = [], [], []
    for block in message.content:
        match block:
            case TextBlock():
                text.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = FunctionCall(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
                calls.append(ToolCall(id=block.id, function=function))
            case ToolResultBlock():
                raise invalid("a tool_result belongs into a message of the user", param="messages")
    return Message(
        role="assistant",
        content="\n".join(text) if text or not calls else None,
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )


def _results_and_text(message: InputMessageBlocks) -> list[Message]:
    assert not isinstance(message.content, str)
    messages, text = [], []
    for block in message.content:
        match block:
            case TextBlock():
                text.append(block.text)
            case ToolResultBlock():
                messages.append(Message(role="tool", content=text_of(block.content), tool_call_id=block.tool_use_id))
            case ToolUseBlock() | ThinkingBlock():
                raise invalid(f"a block of type {block.type!r} belongs into a message of the assistant", "messages")
    if text or not messages:
        messages.append(Message(role=message.role, content="\n".join(text)))
    return messages

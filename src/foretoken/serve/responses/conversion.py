"""Converts the items of a response's input to the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from pydantic import TypeAdapter

from foretoken.serve.chat_schema import Earlier, FunctionCall, Message, ToolCall
from foretoken.serve.errors import invalid
from foretoken.serve.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    InputMessage,
    ItemReference,
    ReasoningItem,
    text_of,
)

Item = InputMessage | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | ItemReference

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[InputItem])
_ITEM: TypeAdapter[Item] = TypeAdapter(InputItem)


def messages_of(instructions: str | None, earlier: Earlier, given: str | Sequence[Item]) -> list[Message]:
    """Returns the messages of a chat: the instructions, the conversation so far, and the input.

    The items of one turn of the model (reasoning, text, calls) become one message, as chat templates expect.
    """
    items = [item for part in earlier.conversation for item in _ITEMS.validate_python(json.loads(part))]
    items += [InputMessage(role="user", content=given)] if isinstance(given, str) else _resolved(given, earlier)
    leading = [instructions] if instructions else []
    for item in items:  # templates take one system message, at the beginning
        if not isinstance(item, InputMessage) or item.role not in ("system", "developer"):
            break
        leading.append(text_of(item.content))
    items = items[len(leading) - bool(instructions) :]
    messages = [Message(role="system", content="\n\n".join(leading))] if leading else []
    messages += _messages(items)
    if not messages:
        raise invalid("the input has no message", param="input")
    return messages


def _resolved(items: Iterable[Item], earlier: Earlier) -> list[Item]:
    return [
        _ITEM.validate_python(json.loads(earlier.items[item.id])) if isinstance(item, ItemReference) else item
        for item in items
    ]


def _messages(items: Iterable[Item]) -> list[Message]:
    messages: list[Message] = []
    turn = _Turn()
    for item in items:
        if isinstance(item, FunctionCallOutputItem | InputMessage) and getattr(item, "role", "") != "assistant":
            messages += turn.ended()
        match item:
            case ReasoningItem():
                turn.reasoning.append(item.text)
            case FunctionCallItem():
                turn.calls.append(
                    ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
                )
            case FunctionCallOutputItem():
                messages.append(Message(role="tool", content=text_of(item.output), tool_call_id=item.call_id))
            case InputMessage(role="assistant"):
                turn.text.append(text_of(item.content))
            case InputMessage():
                messages.append(Message(role=item.role, content=text_of(item.content)))
    return messages + turn.ended()


class _Turn:
    """Text, reasoning and calls of one turn of the model."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.text: list[str] = []
        self.calls: list[ToolCall] = []
        self.reasoning: list[str] = []

    def ended(self) -> list[Message]:
        """Returns its message, if there is one, and begins the next turn."""
        if not (self.text or self.calls or self.reasoning):
            return []
        message = Message(
            role="assistant",
            content="\n".join(self.text) if self.text or not self.calls else None,
            tool_calls=self.calls or None,
            reasoning_content="\n".join(filter(None, self.reasoning)) or None,
        )
        self._clear()
        return [message]

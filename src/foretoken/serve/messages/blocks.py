"""The blocks that Anthropic's messages consist of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from foretoken.serve.schema import Loose, Object, about

_SERVED = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


def _only(*served: str) -> BeforeValidator:
    """Returns a validator whose error names the kind of a block that is not served."""

    def check(content: Any) -> Any:
        for index, block in enumerate(content if isinstance(content, list) else ()):
            kind = block.get("type") if isinstance(block, dict) else None
            if isinstance(kind, str) and kind not in served:
                message = f"a block of type {kind[:50]!r} was given; served: {', '.join(served)}"
                raise about(f"{index}.type", message)
        return content

    return BeforeValidator(check)


class TextBlock(Loose):
    """Text."""

    type: Literal["text"]
    text: str


Text = Annotated[str | Annotated[list[TextBlock], Field(fail_fast=True)], _only("text")]


def text_of(content: str | list[TextBlock] | None) -> str:
    """Returns the text of blocks."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


class ToolUseBlock(Loose):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Object


class ToolResultBlock(Loose):
    """What a called tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | None = None
    is_error: bool | None = None


class ThinkingBlock(Loose):
    """Reasoning that led to the blocks behind it. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Loose):
    """Reasoning that only Anthropic can read. It is left out."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]


class InputMessageBlocks(Loose):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | Annotated[list[Block], Field(fail_fast=True)], _only(*_SERVED)]

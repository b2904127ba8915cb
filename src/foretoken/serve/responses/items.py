"""The items that a response's input consists of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from foretoken.serve.schema import Loose, about

SERVED = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


class ContentPart(Loose):
    """A part of a message, a summary or a reasoning. Text is the only kind that is served."""

    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: str | None = None
    refusal: str | None = None

    @property
    def content(self) -> str:
        """The text."""
        return self.text or self.refusal or ""


def _only_text(content: Any) -> Any:
    """Raises an error that names the kind of a part that is not text."""
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in _TEXTS:
            message = f"a part of type {kind[:50]!r} was given; only text is served, as 'input_text'"
            raise about(f"{index}.type", message)
    return content


Parts = Annotated[list[ContentPart], Field(fail_fast=True)]
Text = Annotated[str | Parts, BeforeValidator(_only_text)]


def text_of(content: str | list[ContentPart] | None) -> str:
    """Returns the text of parts, a line for each."""
    return content if isinstance(content, str) else "\n".join(part.content for part in content or ())


class InputMessage(Loose):
    """A message."""

    type: Literal["message"] = "message"
    id: str | None = None
    role: Literal["user", "system", "developer", "assistant"]
    content: Text


class FunctionCallItem(Loose):
    """A call that the model made. arguments: JSON in a string."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Loose):
    """What a called function returned."""

    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str | None = None
    output: Text


class ReasoningItem(Loose):
    """Reasoning that led to the items behind it."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Parts | None = None
    content: Parts | None = None

    @property
    def text(self) -> str:
        """The reasoning, or its summary where there is nothing else."""
        return text_of(self.content or self.summary)


class ItemReference(Loose):
    """The identifier of a stored item."""

    type: Literal["item_reference"] | None = None
    id: str


def _kind(item: Any) -> str | None:
    """Returns the kind of an item: messages need not say it."""
    if not isinstance(item, dict):
        return getattr(item, "type", None) or "item_reference"
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    return kind if isinstance(kind, str) else None


def _served(item: Any) -> Any:
    """Raises an error that names the kind of an item that is not served."""
    kind = _kind(item)
    if kind not in SERVED:
        given = f"of type {kind[:50]!r}" if kind is not None else "whose type is no string"
        raise about("type", f"an item {given} was given; served: {', '.join(SERVED)}")
    return item


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
    BeforeValidator(_served),
]

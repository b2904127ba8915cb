"""Bodies of /tokenize and /detokenize: vLLM's fields."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from foretoken.serve.chat_schema import ChatRequest, Message, Tool
from foretoken.serve.refused_fields import TOKENIZE, Refusals
from foretoken.serve.schema import Body, Object, TokenIds, about


class TokenizeRequest(Body):
    """Body of POST /tokenize: a prompt, or the messages of a chat.

    Args:
        add_special_tokens: Whether the tokenizer adds its own special tokens. By default to a prompt only, because
            chat templates have them.
        return_token_strs: Whether to return the tokens' names as well.
    """

    refused: ClassVar[Refusals] = TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise about("prompt", "expected either prompt or messages")
        return self

    @property
    def chat(self) -> ChatRequest | None:
        """The chat, if there is one."""
        if self.messages is None:
            return None
        names = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        return ChatRequest.model_construct(**{name: getattr(self, name) for name in names})


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds

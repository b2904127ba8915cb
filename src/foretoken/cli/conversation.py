"""A conversation as a prompt: rendered by the chat template, and cut to the model's context length."""

from __future__ import annotations

from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.engine.chat_template import apply_template, own_template


class Conversation:
    """The turns of one chat.

    ``tokenizer`` has ``apply_chat_template``, ``template`` replaces its template, ``max_length`` is the number of
    tokens of prompt and answer together, and ``model`` is a name for error messages.

    Raises:
        InvalidRequest: There is no valid template.
    """

    def __init__(self, tokenizer: Any, max_length: int, model: str, template: str | None = None) -> None:
        if template is None:
            own_template(tokenizer, model, "give one with --chat-template FILE, or use foretoken generate")
        self._tokenizer, self._max_length, self._template = tokenizer, max_length, template
        self.system: str | None = None
        self.turns: list[dict[str, str]] = []
        self._from = 0  # earlier turns do not fit the context

    @property
    def messages(self) -> list[dict[str, str]]:
        """All turns in OpenAI's format, including those that no longer fit the context."""
        return [*self._instructions, *self.turns]

    @property
    def _instructions(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str, max_tokens: int) -> tuple[list[int], int]:
        """Adds a message. Returns the prompt's token ids, and how many more of the oldest turns do not fit.

        ``max_tokens`` are reserved for the answer, at most half of the context.

        Raises:
            InvalidRequest: The message alone is too long, or the template refuses it. The message is not added.
        """
        turns = [*self.turns, {"role": "user", "content": text}]
        first, budget = self._from, self._max_length - min(max_tokens, self._max_length // 2)
        ids = self._prompt(turns[first:])
        while len(ids) > budget and first < len(turns) - 1:
            first = next((i for i in range(first + 1, len(turns)) if turns[i]["role"] == "user"), len(turns) - 1)
            ids = self._prompt(turns[first:])
        if len(ids) >= self._max_length:
            raise InvalidRequest(
                f"the message has {len(ids)} tokens by itself and the model holds {self._max_length}, question and "
                "answer together; send a shorter one, or raise --max-model-len"
            )
        dropped, self._from, self.turns = first - self._from, first, turns
        return ids, dropped

    def answer(self, text: str) -> None:
        """Adds the answer to the last message."""
        self.turns.append({"role": "assistant", "content": text})

    def withdraw(self) -> None:
        """Removes the last message, which has no answer."""
        self.turns.pop()
        self._from = min(self._from, len(self.turns))

    def reset(self) -> None:
        """Removes all turns but the system message."""
        self.turns, self._from = [], 0

    def _prompt(self, turns: list[dict[str, str]]) -> list[int]:
        options = {} if self._template is None else {"chat_template": self._template}
        ids: list[int] = apply_template(
            self._tokenizer, [*self._instructions, *turns], add_generation_prompt=True, return_dict=False, **options
        )
        return ids

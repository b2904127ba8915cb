"""The same draft length in every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.control.base import Controller
from foretoken.control.memory import MemoryWatch
from foretoken.core.context import Context


@dataclass(frozen=True)
class Fixed(Controller):
    """``depth`` draft tokens, unless the request asks for another number or memory is short."""

    depth: int
    memory: MemoryWatch | None = None

    def admit(self, context: Context) -> None:
        context.depth = self.depth if context.depth is None else context.depth

    def budgets(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> list[int]:
        return caps(contexts, max_draft_tokens, self.depth, self.memory)

    def describe(self) -> dict[str, Any]:
        return {"name": "fixed", "max_tokens": self.depth, "memory_halvings": halvings(self.memory)}

    @property
    def pause(self) -> str | None:
        return short_of_memory(self.memory, self.depth)


def requested(contexts: Sequence[Context], limits: Sequence[int]) -> list[int]:
    """Returns the budgets of a step in which only requests that ask for a draft length draft."""
    return [0 if context.depth is None else limit for context, limit in zip(contexts, limits, strict=True)]


def halvings(memory: MemoryWatch | None) -> int:
    """Returns the number of halvings of draft lengths because memory is short."""
    return 0 if memory is None else memory.halvings


def short_of_memory(memory: MemoryWatch | None, length: int) -> str | None:
    """Returns a reason if memory allows no draft of ``length`` tokens."""
    return "memory is short" if memory is not None and memory.halvings and not memory.cap(length) else None


def caps(
    contexts: Sequence[Context], max_draft_tokens: Sequence[int], depth: int, memory: MemoryWatch | None
) -> list[int]:
    """Returns the largest draft length of each sequence: its own or ``depth``, within its tokens and free memory."""
    lengths = [depth if context.depth is None else context.depth for context in contexts]
    if memory is not None and memory.look():
        lengths = [memory.cap(length) for length in lengths]
    return [max(0, min(length, left)) for length, left in zip(lengths, max_draft_tokens, strict=True)]

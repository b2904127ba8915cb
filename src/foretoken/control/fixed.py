"""The same draft length in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.control.base import Controller
from foretoken.control.memory import MemoryWatch
from foretoken.core.context import Context


@dataclass(frozen=True)
class Fixed(Controller):
    """``depth`` draft tokens, unless the request asks for another number or memory is short."""

    depth: int
    memory: MemoryWatch | None = None

    def budgets(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> list[int]:
        return caps(contexts, max_draft_tokens, self.depth, self.memory)


def caps(
    contexts: Sequence[Context], max_draft_tokens: Sequence[int], depth: int, memory: MemoryWatch | None
) -> list[int]:
    """Returns the largest draft length of each sequence: its own or ``depth``, within its tokens and free memory."""
    lengths = [depth if context.depth is None else context.depth for context in contexts]
    if memory is not None and memory.look():
        lengths = [memory.cap(length) for length in lengths]
    return [max(0, min(length, left)) for length, left in zip(lengths, max_draft_tokens, strict=True)]

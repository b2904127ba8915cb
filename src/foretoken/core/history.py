"""The tokens before one node of a draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class History:
    """All tokens before one tree node.

    Args:
        tokens: Committed tokens, prompt and output. The sequence object grows as the request does.
        prompt_length: Number of prompt tokens at the beginning of ``tokens``.
        path: Draft tokens from the root to the node.
    """

    tokens: Sequence[int]
    prompt_length: int
    path: tuple[int, ...] = ()

    @property
    def generated(self) -> int:
        """Returns the number of generated tokens, draft tokens of ``path`` included."""
        return len(self.tokens) - self.prompt_length + len(self.path)

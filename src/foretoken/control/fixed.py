"""The same depth every round."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.control.base import Controller
from foretoken.core.context import Context


@dataclass(frozen=True)
class Fixed(Controller):
    """``depth`` drafted tokens a round unless the request asks for another number."""

    depth: int

    def budgets(self, contexts: Sequence[Context], rooms: Sequence[int]) -> list[int]:
        wanted = (self.depth if c.depth is None else c.depth for c in contexts)
        return [max(0, min(k, room)) for k, room in zip(wanted, rooms, strict=True)]

    def rest(self) -> int:
        """It has nothing to learn."""
        return sys.maxsize

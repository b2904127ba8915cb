"""Where the rows of a pass lie in the KV cache and what they see."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

STRETCH = 256  # keys of one program; the sums over stretches depend on this number alone, not on the cache's length


@dataclass(frozen=True)
class PassRows:
    """Where the rows of a pass lie and what they see, int32 tensors [R] on the device.

    Attributes:
        counts: number of keys that the row sees without a window: its position plus one; 0 for padding.
        slots: the slot of the KV cache.
        places: the cache row of the row's own keys and values.
        prefixes: number of committed keys, which lie at the rows of their positions.
        paths: cache rows of the keys behind them in the order of their positions, [R, depth]; depth 0 without trees.
        longest: at least the greatest of ``counts``.
    """

    counts: Tensor
    slots: Tensor
    places: Tensor
    prefixes: Tensor
    paths: Tensor
    longest: int

    def part(self, start: int, end: int) -> PassRows:
        """Returns the layout of rows ``start`` to ``end``."""
        own = slice(start, end)
        fields = self.counts[own], self.slots[own], self.places[own], self.prefixes[own], self.paths[own]
        return PassRows(*fields, longest=self.longest)

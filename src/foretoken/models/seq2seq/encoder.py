"""The encoder of either runtime, with a cache of its outputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor

MAX_SOURCES = 32  # cached outputs, for other completions of a request and for a draft that shares the encoder


class Encoder:
    """Encodes one source at a time, so that its output depends on nothing else, and caches outputs.

    Args:
        compute: returns the output for a source, [source, H].
    """

    def __init__(self, compute: Callable[[tuple[int, ...]], Tensor]) -> None:
        self._compute = compute
        self._cached: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def states(self, source: Sequence[int]) -> Tensor:
        """Returns the encoder's output for a source, [source, H]."""
        key = tuple(source)
        states = self._cached.pop(key, None)
        self._cached[key] = states = self._compute(key) if states is None else states
        while len(self._cached) > MAX_SOURCES:
            self._cached.popitem(last=False)
        return states

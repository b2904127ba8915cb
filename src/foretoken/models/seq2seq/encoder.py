"""Components of both runtimes of encoder-decoders: a cache of the encoder's outputs, and the sources of slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import NO_SOURCE, check_source
from foretoken.models.runners.base import Runner
from foretoken.models.runners.pass_plan import Part, PassPlan
from foretoken.models.state.kv import KVCache
from foretoken.models.state.pages import Pages

MAX_SOURCES = 32  # cached outputs, for other completions of a request and for a draft that shares the encoder
CacheT = TypeVar("CacheT", bound=KVCache | Pages)


class Encoder:
    """Encodes one source at a time, so that its output does not depend on others, and caches outputs.

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


def encoded(runner: Runner, layers: int, source: Sequence[int]) -> Tensor:
    """Returns the normed states of a source, [source, H], from a runner of the encoder's ``layers`` layers."""
    count = len(source)
    slot, _ = runner.acquire()
    try:
        part = Part(slot, 0, count, count, Draft.empty(), mutual=True)
        plan = PassPlan(list(source), list(range(count)), [part], [], [], count)
        return runner.run(plan, (layers,), logits=False).taps[layers]
    finally:
        runner.release(slot)


class SourceSlots(Generic[CacheT]):
    """The source of each slot, which is encoded before the slot's first pass.

    Args:
        longest: maximum number of tokens of a source.
        cache: keys and values of sources, with the same slots as the decoder's.
    """

    def __init__(self, longest: int, cache: CacheT) -> None:
        self.lengths: dict[int, int] = {}
        self.cache: CacheT = cache
        self._longest = longest
        self._pending: dict[int, tuple[int, ...]] = {}

    def acquire(self, slot: int) -> None:
        """Takes the cache's slot of this number."""
        number, _ = self.cache.acquire()
        assert number == slot

    def attach(self, slot: int, source: Sequence[int]) -> None:
        """Sets a slot's source. Raises InvalidRequest if it is too long."""
        check_source(source, self._longest)
        self._pending[slot], self.lengths[slot] = tuple(source), len(source)

    def pending(self, slot: int) -> tuple[int, ...] | None:
        """Returns the slot's source if it is not encoded yet. Raises InvalidRequest if it has none."""
        if slot not in self.lengths:
            raise InvalidRequest(NO_SOURCE)
        return self._pending.get(slot)

    def encoded(self, slot: int) -> None:
        """Records that the slot's source is encoded."""
        del self._pending[slot]

    def release(self, slot: int) -> None:
        """Frees a slot and forgets its source."""
        self._pending.pop(slot, None)
        self.lengths.pop(slot, None)
        self.cache.release(slot)

    def check(self) -> None:
        """Raises AssertionError if the bookkeeping is inconsistent."""
        assert set(self._pending) <= set(self.lengths), "a pending source has no slot"
        self.cache.check()

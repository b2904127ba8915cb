"""A model whose closed sequences can be opened again where they were left, and whose passes can be called off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.base import Handle, Model, Scores


class Resumable(Model):
    """``inner``; sequences that are closed inside ``aside`` wait, and a text of the same source and ``cache_salt`` that
    begins like one finds its rows.

    So whoever drafted behind a text that did not come may forget the sequence and begin again: only the rows that
    differ are computed, and rows are the same whatever pass computes them.

    before: called before every pass; what it raises ends the pass before it begins.
    """

    def __init__(self, inner: Model, before: Callable[[], None] = lambda: None) -> None:
        self.inner, self.before = inner, before
        self.vocab_size, self.max_length = inner.vocab_size, inner.max_length
        self.num_layers, self.hidden_size = inner.num_layers, inner.hidden_size
        self.device, self.dtype = inner.device, inner.dtype
        self.rows_independent, self.cuts_freely = inner.rows_independent, inner.cuts_freely
        self.source_length = inner.source_length
        # by slot, of those that are open and those that wait: the source and the cache_salt
        self._scopes: dict[int, tuple[tuple[int, ...], str | None]] = {}
        self._waiting: list[tuple[int, Handle]] = []
        self._key: int | None = None

    @contextmanager
    def aside(self, key: int) -> Iterator[None]:
        """What is closed inside waits under that name."""
        self._key = key
        try:
            yield
        finally:
            self._key = None

    def release(self, key: int) -> None:
        """Close for good what waits under that name."""
        gone = [handle for name, handle in self._waiting if name == key]
        self._waiting = [(name, handle) for name, handle in self._waiting if name != key]
        for handle in gone:
            self.close(handle)

    def open(self, prompt: Sequence[int], source: Sequence[int] = (), cache_salt: str | None = None) -> Handle:
        scope = tuple(source), cache_salt
        waiting = [(i, h) for i, (_, h) in enumerate(self._waiting) if self._scopes[h.slot] == scope]
        shared, place = max(((_shared(h.tokens, prompt), i) for i, h in waiting), default=(0, 0))
        if not shared:
            handle = self.inner.open(prompt, source, cache_salt)
            self._scopes[handle.slot] = scope
            return handle
        _, handle = self._waiting.pop(place)
        handle.truncate(shared)
        if shared < len(prompt):
            self.inner.commit([handle], [prompt[shared:]])
        return handle

    def close(self, handle: Handle) -> None:
        if handle.slot < 0 or any(handle is other for _, other in self._waiting):
            return
        if self._key is None:
            del self._scopes[handle.slot]
            self.inner.close(handle)
        else:
            self._waiting.append((self._key, handle))

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        self.before()
        return self.inner.score(handles, drafts, taps)

    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        self.inner.commit(handles, tokens)

    def admit(self, prompt: Sequence[int], source: Sequence[int]) -> None:
        self.inner.admit(prompt, source)

    @property
    def row_bytes(self) -> int:
        return self.inner.row_bytes

    def keep(self, limit: int) -> bool:
        return self.inner.keep(limit)

    def check(self) -> None:
        self.inner.check()

    def unembed(self, hidden: Tensor) -> Tensor:
        return self.inner.unembed(hidden)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))

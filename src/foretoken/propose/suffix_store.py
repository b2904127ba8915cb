"""What earlier requests wrote, searchable, within a bound of memory: the global half of suffix decoding."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from foretoken.propose.occurrences import BREAK, LIMIT, GrowingText, Ids, Occurrences, SortedText, Text

FRESH_TOKENS = 16384  # are searched unsorted, in some 20 us
SHARE = 4  # a part holds at most this fraction of the bound, so that eviction takes no more at once
STEP = 4  # a part is merged with the one before it unless that is so many times larger
STORE_TOKENS = 256  # memory of a store beside its outputs, in tokens of 8 bytes


@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """Consecutive outputs. ``text`` grows in the newest part alone."""

    text: Text
    requests: int

    @property
    def sorted(self) -> bool:
        return isinstance(self.text, SortedText)


class SuffixStore:
    """Finished outputs, the oldest dropped first.

    depth: longest context that is told apart. max_tokens, max_requests: the bounds, held after every ``add``.
    A sorted token takes 6 bytes, 8 in vocabularies of 65,535 tokens and more (and some 40 while its part is sorted,
    which is at most a quarter of the bound).

    ``add`` copies the tokens and returns. Parts are sorted in the background and merged so that their sizes fall
    at least geometrically: a token is sorted again only when its part has grown by half or so.
    Readers see one tuple of parts, which is replaced whole.
    """

    def __init__(
        self, depth: int, max_tokens: int, max_requests: int, sorter: ThreadPoolExecutor | None = None
    ) -> None:
        """sorter: the thread that sorts, where several stores share one."""
        self.depth, self.max_tokens, self.max_requests = depth, max_tokens, max_requests
        self._part_tokens, self._part_requests = max(1, max_tokens // SHARE), max(1, max_requests // SHARE)
        self._fresh_tokens = min(FRESH_TOKENS, self._part_tokens)
        self._parts: tuple[_Part, ...] = ()  # the oldest first
        self._lock = threading.Lock()
        self._worker = sorter
        self._sorting: Future[None] | None = None

    def __len__(self) -> int:
        """Tokens held, with one break for each request."""
        return sum(len(part.text) for part in self._parts)

    @property
    def requests(self) -> int:
        return sum(part.requests for part in self._parts)

    @property
    def nbytes(self) -> int:
        return sum(part.text.nbytes for part in self._parts)

    @property
    def parts(self) -> int:
        """Texts that a search visits."""
        return len(self._parts)

    def add(self, tokens: Sequence[int]) -> None:
        """Keep an output; of one beyond the bound, its end. Does nothing where the bounds are 0."""
        if not tokens or self.max_tokens < 2 or self.max_requests < 1:
            return
        output = np.array([*tokens[1 - self.max_tokens :], BREAK], np.int32)
        with self._lock:
            older, requests = self._parts, 1
            text = GrowingText()  # another one, since a reader may be searching the last
            if older and not self._full(older[-1]) and len(older[-1].text) + len(output) <= self.max_tokens:
                text.extend(older[-1].text.tokens())
                requests += older[-1].requests
                older = older[:-1]
            text.extend(output)
            self._parts = self._bounded((*older, _Part(text, requests)))
            if self._full(self._parts[-1]):
                self._worker = self._worker or ThreadPoolExecutor(1, "foretoken-suffix-store")
                self._sorting = self._worker.submit(self._tidy)

    def occurrences(self, tail: Ids, steps: int, limit: int = LIMIT, least: int = 1) -> Occurrences:
        """See ``Text``; the latest requests first. Contexts less than half as long as the longest are left out."""
        texts = [part.text for part in reversed(self._parts)]
        longest = max((text.longest(tail) for text in texts if isinstance(text, SortedText)), default=0)
        least = max(least, longest // 2)
        return Occurrences.best([text.occurrences(tail, steps, limit, least) for text in texts], limit)

    def drop_oldest(self) -> None:
        """Drop the oldest part, a quarter of the bound at most."""
        with self._lock:
            self._parts = self._parts[1:]

    def settle(self) -> None:
        """Wait until everything is sorted."""
        if self._sorting is not None:
            self._sorting.result()

    def _full(self, part: _Part) -> bool:
        return part.sorted or len(part.text) >= self._fresh_tokens or part.requests >= self._part_requests

    def _bounded(self, parts: tuple[_Part, ...]) -> tuple[_Part, ...]:
        while sum(len(p.text) for p in parts) > self.max_tokens or sum(p.requests for p in parts) > self.max_requests:
            parts = parts[1:]
        return parts

    def _tidy(self) -> None:
        """In the background: sort full parts, each together with as many before it as its size asks for."""
        while run := self._mergeable():
            tokens = np.concatenate([part.text.tokens() for part in run])
            merged = _Part(SortedText.build(tokens, self.depth), sum(part.requests for part in run))
            with self._lock:
                # Evicted meanwhile are the oldest, if any: then what was built of them is too old as well.
                if run[0] in self._parts:
                    at = self._parts.index(run[0])
                    self._parts = (*self._parts[:at], merged, *self._parts[at + len(run) :])

    def _mergeable(self) -> tuple[_Part, ...]:
        with self._lock:
            full = [part for part in self._parts if self._full(part)]
            unsorted = next((i for i, part in enumerate(full) if not part.sorted), None)
            if unsorted is None:
                return ()
            start, size, requests = unsorted, len(full[unsorted].text), full[unsorted].requests
            while start > 0:
                before = full[start - 1]
                size, requests = size + len(before.text), requests + before.requests
                grows = len(before.text) < STEP * (size - len(before.text))
                if not grows or size > self._part_tokens or requests > self._part_requests:
                    break
                start -= 1
            return tuple(full[start : unsorted + 1])


class SuffixStores:
    """One ``SuffixStore`` for each ``Context.cache_salt``, all of them together within the bounds of one.

    Where they outgrow the bounds, the least recently used store loses its oldest outputs. One thread sorts for all.
    """

    def __init__(self, depth: int, max_tokens: int, max_requests: int) -> None:
        sorter = ThreadPoolExecutor(1, "foretoken-suffix-store")
        self._new = partial(SuffixStore, depth, max_tokens, max_requests, sorter)
        self.max_tokens, self.max_requests = max_tokens, max_requests
        self._stores: OrderedDict[str | None, SuffixStore] = OrderedDict()  # the least recently used first
        self._tokens = self._requests = 0

    def __len__(self) -> int:
        """Tokens held, with one break for each request."""
        return self._tokens

    @property
    def requests(self) -> int:
        return self._requests

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores.values())

    @property
    def parts(self) -> int:
        """Texts of all stores."""
        return sum(store.parts for store in self._stores.values())

    @property
    def scopes(self) -> int:
        """Stores that hold outputs."""
        return len(self._stores)

    def add(self, tokens: Sequence[int], cache_salt: str | None = None) -> None:
        """See ``SuffixStore.add``."""
        store = self._stores.pop(cache_salt, None)
        if store is None:
            store = self._new()
        before = len(store), store.requests
        store.add(tokens)
        self._count(store, *before)
        if store.requests:
            self._stores[cache_salt] = store
        while len(self._stores) > 1 and self._outgrown:
            self._shrink()

    def occurrences(
        self, tail: Ids, steps: int, limit: int = LIMIT, least: int = 1, cache_salt: str | None = None
    ) -> Occurrences:
        """See ``SuffixStore.occurrences``; in the outputs of that salt alone."""
        store = self._stores.get(cache_salt)
        if store is None:
            return Occurrences.none()
        self._stores.move_to_end(cache_salt)
        return store.occurrences(tail, steps, limit, least)

    def settle(self) -> None:
        """Wait until everything is sorted."""
        for store in self._stores.values():
            store.settle()

    @property
    def _outgrown(self) -> bool:
        tokens = self._tokens + STORE_TOKENS * len(self._stores)
        return tokens > self.max_tokens or self._requests > self.max_requests

    def _shrink(self) -> None:
        cache_salt, store = next(iter(self._stores.items()))
        before = len(store), store.requests
        store.drop_oldest()
        self._count(store, *before)
        if not store.requests:
            del self._stores[cache_salt]

    def _count(self, store: SuffixStore, tokens: int, requests: int) -> None:
        """Note the size of ``store``, which was ``tokens`` and ``requests``."""
        self._tokens += len(store) - tokens
        self._requests += store.requests - requests

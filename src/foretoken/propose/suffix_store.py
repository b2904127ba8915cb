"""A searchable store of earlier outputs with bounded memory: the global half of suffix decoding."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from foretoken.propose.matches import BREAK, LIMIT, GrowingText, Ids, Matches, SearchableText
from foretoken.propose.suffix_array import SuffixArray

FRESH_TOKENS = 16384  # tokens that are searched unsorted, in about 20 us
SHARE = 4  # a segment holds at most this fraction of the bound, which limits what one eviction drops
STEP = 4  # a segment is merged with its predecessor unless that is this many times larger
STORE_TOKENS = 256  # overhead of a store besides its outputs, in tokens of 8 bytes


@dataclass(frozen=True, eq=False, slots=True)
class _Segment:
    """Consecutive outputs. Only the newest segment grows."""

    text: SearchableText
    requests: int

    @property
    def sorted(self) -> bool:
        return isinstance(self.text, SuffixArray)


class SuffixStore:
    """Finished outputs, evicted oldest first.

    A sorted token takes 6 bytes, or 8 with vocabularies of 65,535 tokens and more (and about 40 while its segment is
    sorted, which is at most a quarter of the bound).

    ``add`` copies the tokens and returns. Segments are sorted in the background and merged so that their sizes fall at
    least geometrically: a token is sorted again only when its segment has grown by about half. Readers see one tuple of
    segments, which is replaced as a whole.

    Args:
        depth: Maximum length of a matched context.
        max_tokens: Bound on the tokens, held after every ``add``.
        max_requests: Bound on the outputs, held after every ``add``.
        sorter: The thread that sorts, if several stores share one.
    """

    def __init__(
        self, depth: int, max_tokens: int, max_requests: int, sorter: ThreadPoolExecutor | None = None
    ) -> None:
        self.depth, self.max_tokens, self.max_requests = depth, max_tokens, max_requests
        self._segment_tokens, self._segment_requests = max(1, max_tokens // SHARE), max(1, max_requests // SHARE)
        self._fresh_tokens = min(FRESH_TOKENS, self._segment_tokens)
        self._segments: tuple[_Segment, ...] = ()  # the oldest first
        self._lock = threading.Lock()
        self._worker = sorter
        self._sorting: Future[None] | None = None

    def __len__(self) -> int:
        """Returns the number of tokens, with one break for each request."""
        return sum(len(segment.text) for segment in self._segments)

    @property
    def requests(self) -> int:
        """Number of outputs."""
        return sum(segment.requests for segment in self._segments)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(segment.text.nbytes for segment in self._segments)

    @property
    def segments(self) -> int:
        """Number of texts that a search visits."""
        return len(self._segments)

    def add(self, tokens: Sequence[int]) -> None:
        """Stores an output; if it exceeds the bound, its end. Does nothing if a bound is 0."""
        if not tokens or self.max_tokens < 2 or self.max_requests < 1:
            return
        output = np.array([*tokens[1 - self.max_tokens :], BREAK], np.int32)
        with self._lock:
            older, requests = self._segments, 1
            text = GrowingText()  # a new object, since a reader may be searching the previous one
            if older and not self._full(older[-1]) and len(older[-1].text) + len(output) <= self.max_tokens:
                text.extend(older[-1].text.tokens())
                requests += older[-1].requests
                older = older[:-1]
            text.extend(output)
            self._segments = self._bounded((*older, _Segment(text, requests)))
            if self._full(self._segments[-1]):
                self._worker = self._worker or ThreadPoolExecutor(1, "foretoken-suffix-store")
                self._sorting = self._worker.submit(self._tidy)

    def find_matches(self, tail: Ids, steps: int, limit: int = LIMIT, min_length: int = 1) -> Matches:
        """As ``SearchableText.find_matches``, the latest requests first.

        Contexts less than half as long as the longest are skipped.
        """
        texts = [segment.text for segment in reversed(self._segments)]
        longest = max((text.longest(tail) for text in texts if isinstance(text, SuffixArray)), default=0)
        min_length = max(min_length, longest // 2)
        return Matches.best([text.find_matches(tail, steps, limit, min_length) for text in texts], limit)

    def drop_oldest(self) -> None:
        """Drops the oldest segment, at most a quarter of the bound."""
        with self._lock:
            self._segments = self._segments[1:]

    def settle(self) -> None:
        """Waits until every segment is sorted."""
        if self._sorting is not None:
            self._sorting.result()

    def _full(self, segment: _Segment) -> bool:
        return segment.sorted or len(segment.text) >= self._fresh_tokens or segment.requests >= self._segment_requests

    def _bounded(self, segments: tuple[_Segment, ...]) -> tuple[_Segment, ...]:
        while (
            sum(len(p.text) for p in segments) > self.max_tokens
            or sum(p.requests for p in segments) > self.max_requests
        ):
            segments = segments[1:]
        return segments

    def _tidy(self) -> None:
        """Sorts full segments, each merged with as many predecessors as its size calls for. Runs in the background."""
        while run := self._mergeable():
            tokens = np.concatenate([segment.text.tokens() for segment in run])
            merged = _Segment(SuffixArray.build(tokens, self.depth), sum(segment.requests for segment in run))
            with self._lock:
                # Eviction takes the oldest first. If run[0] is gone meanwhile, the merged segment is too old as well.
                if run[0] in self._segments:
                    at = self._segments.index(run[0])
                    self._segments = (*self._segments[:at], merged, *self._segments[at + len(run) :])

    def _mergeable(self) -> tuple[_Segment, ...]:
        """Returns the next segments to merge and sort, empty if all are sorted."""
        with self._lock:
            full = [segment for segment in self._segments if self._full(segment)]
            unsorted = next((i for i, segment in enumerate(full) if not segment.sorted), None)
            if unsorted is None:
                return ()
            start, size, requests = unsorted, len(full[unsorted].text), full[unsorted].requests
            while start > 0:
                before = full[start - 1]
                size, requests = size + len(before.text), requests + before.requests
                grows = len(before.text) < STEP * (size - len(before.text))
                if not grows or size > self._segment_tokens or requests > self._segment_requests:
                    break
                start -= 1
            return tuple(full[start : unsorted + 1])


class SuffixStores:
    """One ``SuffixStore`` for each ``Context.cache_salt``, all of them within the bounds of one.

    When they exceed the bounds, the least recently used store loses its oldest outputs. One thread sorts for all.
    """

    def __init__(self, depth: int, max_tokens: int, max_requests: int) -> None:
        sorter = ThreadPoolExecutor(1, "foretoken-suffix-store")
        self._new = partial(SuffixStore, depth, max_tokens, max_requests, sorter)
        self.max_tokens, self.max_requests = max_tokens, max_requests
        self._stores: OrderedDict[str | None, SuffixStore] = OrderedDict()  # the least recently used first
        self._tokens = self._requests = 0

    def __len__(self) -> int:
        """Returns the number of tokens, with one break for each request."""
        return self._tokens

    @property
    def requests(self) -> int:
        """Number of outputs."""
        return self._requests

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(store.nbytes for store in self._stores.values())

    @property
    def segments(self) -> int:
        """Number of segments of all stores."""
        return sum(store.segments for store in self._stores.values())

    @property
    def scopes(self) -> int:
        """Number of stores that hold outputs."""
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

    def find_matches(
        self, tail: Ids, steps: int, limit: int = LIMIT, min_length: int = 1, cache_salt: str | None = None
    ) -> Matches:
        """See ``SuffixStore.find_matches``. Searches only the outputs of that salt."""
        store = self._stores.get(cache_salt)
        if store is None:
            return Matches.none()
        self._stores.move_to_end(cache_salt)
        return store.find_matches(tail, steps, limit, min_length)

    def settle(self) -> None:
        """Waits until every segment is sorted."""
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
        """Updates the totals after ``store`` held ``tokens`` and ``requests``."""
        self._tokens += len(store) - tokens
        self._requests += store.requests - requests

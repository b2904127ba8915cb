"""What earlier requests wrote, searchable, within a bound of memory: the global half of suffix decoding."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from foretoken.propose.occurrences import BREAK, LIMIT, GrowingText, Ids, Occurrences, SortedText, Text

FRESH_TOKENS = 16384  # are searched unsorted, in some 20 us
SHARE = 4  # a part holds at most this fraction of the bound, so that eviction takes no more at once
STEP = 4  # a part is merged with the one before it unless that is so many times larger


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

    def __init__(self, depth: int, max_tokens: int, max_requests: int) -> None:
        self.depth, self.max_tokens, self.max_requests = depth, max_tokens, max_requests
        self._part_tokens, self._part_requests = max(1, max_tokens // SHARE), max(1, max_requests // SHARE)
        self._fresh_tokens = min(FRESH_TOKENS, self._part_tokens)
        self._parts: tuple[_Part, ...] = ()  # the oldest first
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
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

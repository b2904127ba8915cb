"""Chooses the replica of a request: the one with the longest prefix-cache hit, unless it is much busier.

Prompts with a common prefix should go to one replica. But a free place is worth more than a cache hit: only replicas
within ``slack`` requests of the least busy one are compared by their hits.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

R = TypeVar("R", bound=Hashable)

REMEMBERED = 65_536  # latest blocks of prompts; about 16 million characters


class Beginnings:
    """Remembers which replicas prefilled which blocks of prompts. Blocks are results of ``forwarded.beginnings``."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._readers: OrderedDict[int, set[Hashable]] = OrderedDict()  # the latest block last

    def note(self, beginnings: Sequence[int], reader: Hashable) -> None:
        """Records that ``reader`` prefills a prompt with these blocks."""
        for block in beginnings:
            self._readers.setdefault(block, set()).add(reader)
            self._readers.move_to_end(block)
        while len(self._readers) > self._remembered:
            self._readers.popitem(last=False)

    def known(self, beginnings: Sequence[int], reader: Hashable) -> int:
        """Returns how many of these blocks, counted from the first without a gap, the reader has prefilled."""
        for count, block in enumerate(beginnings):
            if reader not in self._readers.get(block, ()):
                return count
        return len(beginnings)

    def forget(self, reader: Hashable) -> None:
        """Forgets a replica that ended."""
        for readers in self._readers.values():
            readers.discard(reader)


def ranked(load: Mapping[R, int], known: Mapping[R, int], slack: int) -> list[R]:
    """Returns replicas, the best first.

    ``load`` is the number of requests of each, ``known`` the number of the prompt's blocks that each has prefilled.
    """
    lowest = min(load.values(), default=0)

    def key(replica: R) -> tuple[bool, int, int, float]:
        far = load[replica] > lowest + slack
        return far, 0 if far else -known[replica], load[replica], random.random()

    return sorted(load, key=key)


class ReplicaLoad:
    """Counts the running requests of each replica. Thread-safe."""

    def __init__(self) -> None:
        self._open: defaultdict[Hashable, set[str]] = defaultdict(set)

    def add(self, replica: Hashable, request: str) -> None:
        self._open[replica].add(request)

    def remove(self, replica: Hashable, request: str) -> None:
        self._open[replica].discard(request)

    def load(self, replica: Hashable) -> int:
        requests = self._open.get(replica)
        return len(requests) if requests is not None else 0

    def forget(self, replica: Hashable) -> None:
        self._open.pop(replica, None)

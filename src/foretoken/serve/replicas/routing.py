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


class PrefilledBlocks:
    """Remembers which replicas prefilled which blocks of prompts. A block is a hash of ``forwarded.prefix_hashes``."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._replicas: OrderedDict[int, set[Hashable]] = OrderedDict()  # the latest block last

    def note(self, prefix_hashes: Sequence[int], replica: Hashable) -> None:
        """Records that ``replica`` prefills a prompt with these blocks."""
        for block in prefix_hashes:
            self._replicas.setdefault(block, set()).add(replica)
            self._replicas.move_to_end(block)
        while len(self._replicas) > self._remembered:
            self._replicas.popitem(last=False)

    def known(self, prefix_hashes: Sequence[int], replica: Hashable) -> int:
        """Returns how many of these blocks, counted from the first without a gap, the replica has prefilled."""
        for count, block in enumerate(prefix_hashes):
            if replica not in self._replicas.get(block, ()):
                return count
        return len(prefix_hashes)

    def forget(self, replica: Hashable) -> None:
        """Forgets a replica that ended."""
        for replicas in self._replicas.values():
            replicas.discard(replica)


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
        """Counts ``request`` as running on ``replica``."""
        self._open[replica].add(request)

    def remove(self, replica: Hashable, request: str) -> None:
        """Removes a request that has ended."""
        self._open[replica].discard(request)

    def load(self, replica: Hashable) -> int:
        """Returns the number of requests that run on ``replica``."""
        requests = self._open.get(replica)
        return len(requests) if requests is not None else 0

    def forget(self, replica: Hashable) -> None:
        """Forgets a replica that ended."""
        self._open.pop(replica, None)

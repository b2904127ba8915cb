"""Which replica gets a request: the one that has read the prompt's beginning, unless it is much busier.

How many tokens of a prompt a replica finds computed depends on what it read before, so prompts that begin alike belong
together. But a free seat is worth more than a beginning: only replicas within ``slack`` requests of the least busy one
are chosen by what they know.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

R = TypeVar("R", bound=Hashable)

REMEMBERED = 65_536  # blocks of prompts, the latest; some 16 million characters


class Beginnings:
    """Who has read which blocks of prompts, as far as is remembered; blocks as ``forwarded.beginnings`` names them."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._readers: OrderedDict[int, set[Hashable]] = OrderedDict()  # the latest block last

    def note(self, beginnings: Sequence[int], reader: Hashable) -> None:
        """``reader`` reads a prompt that begins so."""
        for block in beginnings:
            self._readers.setdefault(block, set()).add(reader)
            self._readers.move_to_end(block)
        while len(self._readers) > self._remembered:
            self._readers.popitem(last=False)

    def known(self, beginnings: Sequence[int], reader: Hashable) -> int:
        """How many of these blocks, from the first on without a gap, the reader has read."""
        for count, block in enumerate(beginnings):
            if reader not in self._readers.get(block, ()):
                return count
        return len(beginnings)

    def forget(self, reader: Hashable) -> None:
        """It is no more."""
        for readers in self._readers.values():
            readers.discard(reader)


def ranked(load: Mapping[R, int], known: Mapping[R, int], slack: int) -> list[R]:
    """Replicas, the best first. load: requests each has. known: blocks of the prompt that each has read."""
    least = min(load.values(), default=0)

    def key(replica: R) -> tuple[bool, int, int, float]:
        far = load[replica] > least + slack
        return far, 0 if far else -known[replica], load[replica], random.random()

    return sorted(load, key=key)


class Ledger:
    """Requests that each replica has in work; from several threads."""

    def __init__(self) -> None:
        self._open: defaultdict[Hashable, set[str]] = defaultdict(set)

    def add(self, replica: Hashable, request: str) -> None:
        self._open[replica].add(request)

    def remove(self, replica: Hashable, request: str) -> None:
        self._open[replica].discard(request)

    def load(self, replica: Hashable) -> int:
        found = self._open.get(replica)
        return len(found) if found is not None else 0

    def forget(self, replica: Hashable) -> None:
        self._open.pop(replica, None)

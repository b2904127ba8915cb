"""Drafts that stay on a device until the host reads them, mostly with the results of the pass that verifies them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.devices import fetched
from foretoken.core.draft import (
    Decision,
    Draft,
    LawElsewhere,
    SampledElsewhere,
    TopPlusSampledElsewhere,
    WithoutReplacementElsewhere,
)
from foretoken.models.chains import ChainRequest, ModelChain

# Fields of a node, int32: its token, the number of nodes back to its parent (the root is before all nodes), a float32.
TOKEN, UP, SCORE, FIELDS = range(4)
NODE_BYTES = 4
# The laws of sampled trees, by ``TreeShape.kind``.
TREE_LAWS: dict[str, type[LawElsewhere]] = {
    "sampled": WithoutReplacementElsewhere,
    "greedy_multi": TopPlusSampledElsewhere,
}


class DraftMemory:
    """The nodes of several drafts on a device.

    Args:
        nodes: int32 [fields, sequences, nodes], in memory that a later call overwrites.
        rows: float32 [sequences, nodes, V], the distributions of sampled tokens; None for none.
    """

    def __init__(self, nodes: Tensor, rows: Tensor | None = None) -> None:
        self.nodes, self.rows = nodes, rows
        self._host: NDArray[np.int32] | None = None

    def read(self, number: int) -> NDArray[np.int32]:
        """Returns the nodes of one draft, [fields, nodes]; the first use copies those of all drafts."""
        if self._host is None:
            self._host = fetched(self.nodes).numpy()
        return self._host[:, number]

    def read_rows(self, number: int, count: int) -> Tensor:
        """Returns the first distributions of one draft."""
        assert self.rows is not None
        return fetched(self.rows[number, :count])

    def release(self) -> None:
        """Copies all of it on the device, before it is overwritten."""
        self.nodes, self.rows = self.nodes.clone(), None if self.rows is None else self.rows.clone()


class UnreadChain:
    """One of the drafts.

    Args:
        memory: its memory.
        number: its index there.
        request: the request for it.

    Attributes:
        limit: the largest number of nodes. A tree of few levels has fewer than were requested.
    """

    def __init__(self, memory: DraftMemory, number: int, request: ChainRequest) -> None:
        self._memory: DraftMemory | None = memory  # None once the draft is read
        self._number, self._request = number, request
        self.limit = min(request.limit, memory.nodes.shape[2])
        self._chain: ModelChain | None = None

    @property
    def tree_depth(self) -> int:
        """The largest depth of a tree's node; 0 for a chain."""
        return 0 if self._request.tree is None else min(self._request.levels, self.limit)

    @property
    def law(self) -> type[LawElsewhere] | None:
        """The law of a sampled draft; None for fixed candidates."""
        draws, tree = self._request.draws, self._request.tree
        if draws is None or not draws.rows:
            return None
        return SampledElsewhere if tree is None else TREE_LAWS[tree.kind]

    @property
    def siblings(self) -> int:
        """The largest number of siblings of a tree; 0 for a chain."""
        return 0 if self._request.tree is None else self._request.tree.width

    @property
    def distributions(self) -> Tensor:
        """The distributions that the tokens of a sampled draft were sampled from, on the device, [rows, V]."""
        assert self._memory is not None and self._memory.rows is not None
        return self._memory.rows[self._number]

    @property
    def unread(self) -> bool:
        """Whether the host has not read the draft."""
        return self._memory is not None

    @property
    def places(self) -> tuple[int, int]:
        """The address of the first node's token, and the number of bytes from a field to the next one."""
        assert self._memory is not None
        nodes = self._memory.nodes
        return nodes[TOKEN, self._number].data_ptr(), nodes.stride(0) * NODE_BYTES

    def peek(self) -> tuple[list[int], list[int]]:
        """Returns tokens and parents of all nodes, those after the draft's end included."""
        assert self._memory is not None
        tokens, up, _ = self._memory.read(self._number)[:, : self.limit]
        return tokens.tolist(), (np.arange(self.limit) - up).clip(-1).tolist()

    def read(self) -> ModelChain:
        """Returns the draft, which is copied from the device unless it was received."""
        if self._memory is not None:
            self.receive(*fields_of(self._memory.read(self._number).T))
        assert self._chain is not None
        return self._chain

    def receive(self, tokens: list[int], up: list[int], scores: list[float]) -> None:
        """Takes the fields of the nodes, at least ``limit`` of them, that were read with other results."""
        assert self._memory is not None
        if self._request.tree is None:
            rows = partial(self._memory.read_rows, self._number) if self.law else None
            self._chain = chain_of(self._request, tokens[: self.limit], scores[: self.limit], rows)
        else:
            self._chain = tree_of(self._request, tokens, up, scores[: self.limit])
            if self.law and self._chain.tokens:
                read = partial(self._memory.read_rows, self._number, max(self._chain.parents) + 2)
                self._chain = replace(self._chain, rows=self.law(read))
        self._memory = None


def chain_of(
    request: ChainRequest, tokens: list[int], probs: list[float], read_rows: Callable[[int], Tensor] | None
) -> ModelChain:
    """Returns a chain up to the first level where no token is possible or a score ends it: its probability is NaN."""
    possible = next((depth for depth, prob in enumerate(probs) if prob != prob), len(probs))
    ids, probs, count = tokens[:possible], probs[:possible], possible
    if request.draws is not None:
        law = SampledElsewhere(partial(read_rows, count)) if read_rows is not None and count else None
        return ModelChain(ids, count < request.limit, probabilities=probs if request.stop else [], rows=law)
    if request.end is not None:
        reach = 1.0
        for depth, prob in enumerate(probs):
            reach *= request.end.rate(prob)
            if reach < request.end.minimum(depth):
                count, ids, probs = depth, ids[: depth + 1], probs[: depth + 1]
                break
    return ModelChain(ids[:count], count < request.limit, ids, probs)


def tree_of(request: ChainRequest, tokens: list[int], up: list[int], scores: list[float]) -> ModelChain:
    """Returns a tree; nodes that it does not have come last, and their scores are -inf."""
    count = sum(score > -math.inf for score in scores)
    parents = [node - back for node, back in enumerate(up[:count])]
    return ModelChain(tokens[:count], count < request.limit, probabilities=scores[:count], parents=parents)


def fields_of(nodes: NDArray[Any]) -> tuple[list[int], list[int], list[float]]:
    """Returns the fields of nodes [nodes, fields], integers."""
    scores = nodes[:, SCORE].astype(np.int32).view(np.float32)
    return nodes[:, TOKEN].tolist(), nodes[:, UP].tolist(), scores.tolist()


class UnreadChains(Sequence[ModelChain]):
    """Drafts of one call. Any look at one of them reads it. unread: the drafts."""

    def __init__(self, unread: Sequence[UnreadChain]) -> None:
        self.unread = unread

    def __len__(self) -> int:
        return len(self.unread)

    @overload
    def __getitem__(self, index: int) -> ModelChain: ...
    @overload
    def __getitem__(self, index: slice) -> list[ModelChain]: ...
    def __getitem__(self, index: int | slice) -> ModelChain | list[ModelChain]:
        if isinstance(index, slice):
            return [chain.read() for chain in self.unread[index]]
        return self.unread[index].read()

    def __iter__(self) -> Iterator[ModelChain]:
        return (chain.read() for chain in self.unread)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class UnreadDraft(Draft):
    """A draft of which only bounds are known. Any look at its nodes reads it.

    Args:
        source: its nodes on the device.
        finish: makes the draft of the nodes.
    """

    def __init__(self, source: UnreadChain, finish: Callable[[ModelChain], Draft]) -> None:
        self.__dict__.update(source=source, _finish=finish)

    source: UnreadChain
    _finish: Callable[[ModelChain], Draft]

    def read(self) -> Draft:
        """Returns the draft, which is copied from the device unless it was received."""
        if "_draft" not in self.__dict__:
            self.__dict__["_draft"] = self._finish(self.source.read())
        draft: Draft = self.__dict__["_draft"]
        return draft

    def decided(self, levels: int, decide: Callable[[Draft], Decision]) -> Draft:
        # All levels were computed, wherever the draft ends.
        return UnreadDraft(self.source, lambda chain: replace(self._finish(chain), levels=None).decided(levels, decide))

    def peek(self) -> tuple[Sequence[int], Sequence[int]]:
        return self.source.peek() if self.unread else super().peek()

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.read(), name)

    scores = property(lambda self: self.read().scores)
    levels = property(lambda self: self.read().levels)
    decision = property(lambda self: self.read().decision)
    drawn = property(lambda self: self.source.law is not None)

    @property
    def unread(self) -> bool:
        return self.source.unread

    @property
    def limit(self) -> int:
        return self.source.limit

    @property
    def tree_depth(self) -> int:
        return self.source.tree_depth

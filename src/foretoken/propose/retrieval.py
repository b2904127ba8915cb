"""Retrieval (REST, 2311.08252): continuations of the same context in a datastore of text, as a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.checks import integer, number
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.propose.base import Method, Proposer, Workshop
from foretoken.propose.continuations import likeliest
from foretoken.propose.datastore import DEPTH, Datastore
from foretoken.propose.occurrences import LIMIT, PAD, ContextTexts, Occurrences


@dataclass(frozen=True, slots=True)
class RetrievalConfig:
    """num_steps: greatest depth of the tree. top_k: children of a node at most; 1 drafts a chain.

    base: a context one token longer weighs so many times more. With 1 all found contexts count the same; a large
    number trusts the longest alone, as REST does.
    """

    num_steps: int = 16
    top_k: int = 8
    base: float = 3.0

    def __post_init__(self) -> None:
        integer("num_steps", self.num_steps, 1, PAD)
        integer("top_k", self.top_k, 1)
        number("base", self.base, 1.0, 1e6)


class Retrieval(Proposer):
    """Fixed candidates: the likeliest nodes of the trie of what followed the nearest contexts.

    The sequence's own text is searched with the datastore, as if it were part of it. Weights count occurrences, those
    of longer contexts more, so that where the longest match speaks once the shorter ones still fill the tree.
    """

    name = "retrieval"
    costless = True

    def __init__(self, datastore: Datastore, config: RetrievalConfig | None = None) -> None:
        self.datastore, self.config = datastore, config or RetrievalConfig()
        self._texts = ContextTexts()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._guess(c, b) if b > 0 else Draft.empty() for c, b in zip(contexts, budgets, strict=True)]

    def forget(self, context: Context) -> None:
        self._texts.forget(context)

    def _guess(self, context: Context, budget: int) -> Draft:
        text, config = self._texts.of(context), self.config
        tail, steps = text.tail(DEPTH), min(budget, config.num_steps)
        own = text.occurrences(tail, steps)
        found = Occurrences.best([own, *self.datastore.occurrences(tail, steps)], LIMIT)
        weights: dict[tuple[int, ...], float] = {}
        longest = max(found.lengths, default=0)
        for length, row in zip(found.lengths.tolist(), found.following.tolist(), strict=True):
            continuation = tuple(row)
            weights[continuation] = weights.get(continuation, 0.0) + config.base ** float(length - longest)
        return likeliest(weights, budget, steps, config.top_k).draft()


def build(config: RetrievalConfig, workshop: Workshop) -> Retrieval:
    """``model`` is the datastore's folder."""
    if workshop.model is None:
        raise InvalidRequest(
            "method 'retrieval' needs a datastore: build one with foretoken build-datastore and name its folder as "
            "'model' in speculative_config"
        )
    return Retrieval(Datastore.open(workshop.model, workshop.tokenizer), config)


METHOD = Method(RetrievalConfig, build, tokens=16)

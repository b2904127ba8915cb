"""Retrieval (REST, 2311.08252): drafts continuations of the same context in a datastore of text, as a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.checks import integer, number
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.propose.base import BuildContext, Method, Proposer
from foretoken.propose.continuations import candidate_tree
from foretoken.propose.datastore import DEPTH, Datastore
from foretoken.propose.matches import LIMIT, PAD, ContextTexts, Matches


@dataclass(frozen=True, slots=True)
class RetrievalConfig:
    """Size of the draft tree made of matches.

    Attributes:
        num_steps: Maximum depth of the tree.
        top_k: Maximum number of children of a node. 1 drafts a chain.
        base: Weight factor of a context that is one token longer. 1 counts all matches equally; a large number trusts
            only the longest, as REST does.
    """

    num_steps: int = 16
    top_k: int = 8
    base: float = 3.0

    def __post_init__(self) -> None:
        integer("num_steps", self.num_steps, 1, PAD)
        integer("top_k", self.top_k, 1)
        number("base", self.base, 1.0, 1e6)


class Retrieval(Proposer):
    """Drafts the likeliest nodes of the trie of continuations, as fixed candidates.

    The sequence's own text is searched together with the datastore. Weights count occurrences, longer contexts more, so
    that shorter matches still fill the tree where the longest occurs only once.
    """

    name = "retrieval"
    costless = True

    def __init__(self, datastore: Datastore, config: RetrievalConfig | None = None) -> None:
        self.datastore, self.config = datastore, config or RetrievalConfig()
        self._texts = ContextTexts()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(c, b) if b > 0 else Draft.empty() for c, b in zip(contexts, budgets, strict=True)]

    def forget(self, context: Context) -> None:
        self._texts.forget(context)

    def _draft(self, context: Context, budget: int) -> Draft:
        text, config = self._texts.of(context), self.config
        tail, steps = text.tail(DEPTH), min(budget, config.num_steps)
        own = text.find_matches(tail, steps)
        matches = Matches.best([own, *self.datastore.find_matches(tail, steps)], LIMIT)
        weights: dict[tuple[int, ...], float] = {}
        longest = max(matches.lengths, default=0)
        for length, row in zip(matches.lengths.tolist(), matches.following.tolist(), strict=True):
            continuation = tuple(row)
            weights[continuation] = weights.get(continuation, 0.0) + config.base ** float(length - longest)
        return candidate_tree(weights, budget, steps, config.top_k).draft()


def build(config: RetrievalConfig, build_context: BuildContext) -> Retrieval:
    """Builds the proposer from the datastore's folder, which "model" names."""
    if build_context.model is None:
        raise InvalidRequest(
            "method 'retrieval' needs a datastore: build one with foretoken build-datastore and name its folder as "
            "'model' in speculative_config"
        )
    return Retrieval(Datastore.open(build_context.model, build_context.tokenizer), config)


METHOD = Method(RetrievalConfig, build, tokens=16, drafts_trees=True)

"""Prompt lookup: the longest recent n-gram that ends the text and occurred before is copied on. Costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.propose.base import Proposer


@dataclass(frozen=True, slots=True)
class LookupConfig:
    """Lengths of the n-grams that are tried, longest first (vLLM's prompt_lookup_min and _max)."""

    shortest: int = 1
    longest: int = 4


@dataclass(slots=True)
class _Index:
    """Where each n-gram of one sequence last ended, with a token after it."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0

    def update(self, tokens: Sequence[int], config: LookupConfig) -> None:
        for end in range(max(1, self.indexed), len(tokens)):
            for length in range(config.shortest, min(config.longest, end) + 1):
                self.ends[tuple(tokens[end - length : end])] = end
        self.indexed = len(tokens)


class Lookup(Proposer):
    """Copies what followed the latest occurrence of the text's own ending; fixed candidates, verified by the walk."""

    name = "ngram"

    def __init__(self, config: LookupConfig | None = None) -> None:
        self.config = config or LookupConfig()
        self._indexes: dict[int, _Index] = {}

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._copy(c, b) if b > 0 else Draft.empty() for c, b in zip(contexts, budgets, strict=True)]

    def forget(self, context: Context) -> None:
        self._indexes.pop(context.id, None)

    def _copy(self, context: Context, budget: int) -> Draft:
        index = self._indexes.setdefault(context.id, _Index())
        tokens = context.tokens
        index.update(tokens, self.config)
        for length in range(min(self.config.longest, len(tokens)), self.config.shortest - 1, -1):
            end = index.ends.get(tuple(tokens[-length:]))
            if end is not None:
                # A match near the end runs into its own copy: a period repeats for as long as asked.
                period = len(tokens) - end
                return Draft.chain([tokens[end + i % period] for i in range(budget)])
        return Draft.empty()

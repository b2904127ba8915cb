"""Prompt lookup: the longest recent n-gram that ends the text and occurred before is copied on. Costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.checks import integer
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.propose.base import Method, Proposer, Workshop
from foretoken.propose.occurrences import PAD, ContextTexts


@dataclass(frozen=True, slots=True)
class LookupConfig:
    """Lengths of the n-grams that are tried, longest first; named as in vLLM."""

    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        integer("prompt_lookup_min", self.prompt_lookup_min, 1, PAD)
        integer("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, PAD)


class Lookup(Proposer):
    """Copies what followed the latest occurrence of the text's own ending; fixed candidates, verified by the walk."""

    name = "ngram"
    costless = True

    def __init__(self, config: LookupConfig | None = None) -> None:
        self.config = config or LookupConfig()
        self._texts = ContextTexts()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._copy(c, b) if b > 0 else Draft.empty() for c, b in zip(contexts, budgets, strict=True)]

    def forget(self, context: Context) -> None:
        self._texts.forget(context)

    def _copy(self, context: Context, budget: int) -> Draft:
        text, config = self._texts.of(context), self.config
        tail = text.tail(config.prompt_lookup_max)
        found = text.occurrences(tail, budget, limit=1, least=config.prompt_lookup_min)
        return Draft.chain(found.following[0].tolist()) if len(found.lengths) else Draft.empty()


def build(config: LookupConfig, workshop: Workshop) -> Lookup:
    """Needs the text alone."""
    return Lookup(config)


METHOD = Method(LookupConfig, build, tokens=8)

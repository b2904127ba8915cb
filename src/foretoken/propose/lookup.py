"""Prompt lookup: copies what followed the latest occurrence of the longest n-gram that ends the text. Uses no model."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.core.checks import integer
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.propose.base import BuildContext, Method
from foretoken.propose.matches import PAD, TextProposer


@dataclass(frozen=True, slots=True)
class LookupConfig:
    """Lengths of the n-grams to try, longest first; named as in vLLM."""

    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        integer("prompt_lookup_min", self.prompt_lookup_min, 1, PAD)
        integer("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, PAD)


class Lookup(TextProposer):
    """Copies what followed the latest occurrence of the end of the text, as fixed candidates."""

    name = "ngram"

    def __init__(self, config: LookupConfig | None = None) -> None:
        self.config = config or LookupConfig()
        super().__init__()

    def _draft(self, context: Context, budget: int) -> Draft:
        text, config = self._texts.of(context), self.config
        tail = text.tail(config.prompt_lookup_max)
        matches = text.find_matches(tail, budget, limit=1, min_length=config.prompt_lookup_min)
        return Draft.chain(matches.following[0].tolist()) if len(matches.lengths) else Draft.empty()


def build(config: LookupConfig, build_context: BuildContext) -> Lookup:
    return Lookup(config)


METHOD = Method(LookupConfig, build, tokens=8)

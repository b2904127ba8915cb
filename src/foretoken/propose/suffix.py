"""Suffix decoding (2411.04975): what followed the same context before, here or in earlier requests' outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.checks import integer, number
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.propose.base import Method, Observation, Proposer, Workshop
from foretoken.propose.continuations import Guess, likeliest
from foretoken.propose.occurrences import PAD, ContextTexts, Occurrences
from foretoken.propose.suffix_store import SuffixStores


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """vLLM's keys with its meanings, and two more.

    suffix_decoding_max_tree_depth: longest context that is matched, and longest continuation.
    suffix_decoding_max_cached_requests: finished outputs that are kept for later requests, those of all values of
    ``cache_salt`` together; 0 keeps none.
    suffix_decoding_max_spec_factor: a match of m tokens is followed for at most this times m (vLLM's default is 1).
    suffix_decoding_min_token_prob: drafted tokens have at least this estimated probability.
    suffix_decoding_max_cached_tokens: the bound on memory, 6 to 8 bytes a token (4 million: 32 MB).
    top_k: continuations followed at each node; 1 drafts a chain.
    """

    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 4.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_max_cached_tokens: int = 4_000_000
    top_k: int = 4

    def __post_init__(self) -> None:
        integer("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 1, PAD)
        integer("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0)
        integer("suffix_decoding_max_cached_tokens", self.suffix_decoding_max_cached_tokens, 0, 2**30)
        integer("top_k", self.top_k, 1)
        number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0.0)
        number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class _Match:
    """A guess and the length of the context it follows from."""

    guess: Guess
    length: int = 0

    @property
    def rank(self) -> tuple[float, int]:
        return self.guess.score, self.length


class Suffix(Proposer):
    """Fixed candidates from the sequence's own text and from a store of finished outputs.

    Every output that ends by itself or by its length is stored; aborted ones are not, and the end of the prompt is
    stored before it, so that the same question finds its old answer from the first token on. A request finds outputs of
    its own ``cache_salt`` alone.
    """

    name = "suffix"
    costless = True
    learns = True

    def __init__(self, config: SuffixConfig | None = None) -> None:
        self.config = config = config or SuffixConfig()
        self.store = SuffixStores(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_tokens,
            config.suffix_decoding_max_cached_requests,
        )
        self._texts = ContextTexts()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._guess(c, b) if b > 0 else Draft.empty() for c, b in zip(contexts, budgets, strict=True)]

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for context, observation in zip(contexts, observations, strict=True):
            if observation.step.finish_reason in ("stop", "length"):
                start = max(0, context.prompt_length - self.config.suffix_decoding_max_tree_depth)
                self.store.add(context.tokens[start:], context.cache_salt)

    def forget(self, context: Context) -> None:
        self._texts.forget(context)

    def _guess(self, context: Context, budget: int) -> Draft:
        depth = self.config.suffix_decoding_max_tree_depth
        text = self._texts.of(context)
        tail, steps = text.tail(depth), min(budget, depth)
        own = text.occurrences(tail, steps)
        least = max(1, int(own.lengths[0]) // 2) if len(own.lengths) else 1
        match = best_match(own, budget, self.config)
        earlier = self.store.occurrences(tail, steps, least=least, cache_salt=context.cache_salt)
        match = best_match(earlier, budget, self.config, match)
        return match.guess.draft()


def best_match(found: Occurrences, budget: int, config: SuffixConfig, rival: _Match | None = None) -> _Match:
    """The context length whose continuations promise most tokens; the longer on ties, and ``rival`` on further ones.

    For a match of m tokens: follow likely continuations for floor(factor * m) tokens; the score is the sum of the
    nodes' probabilities, each the product of count ratios along its path (2411.04975, section 3).
    """
    best = rival or _Match(Guess())
    lengths, rows = found.lengths.tolist(), [tuple(row) for row in found.following.tolist()]
    for count in (i for i in range(1, len(rows) + 1) if i == len(rows) or lengths[i] < lengths[i - 1]):
        length = lengths[count - 1]
        steps = min(int(config.suffix_decoding_max_spec_factor * length), budget)
        if steps < 1 or best.rank >= (steps, length):
            break  # a level's probabilities sum to 1 at most, and what is left is shorter still
        counts = Counter(rows[:count])
        guess = likeliest(counts, budget, steps, config.top_k, config.suffix_decoding_min_token_prob)
        match = _Match(guess, length)
        if match.rank > best.rank:
            best = match
    return best


def build(config: SuffixConfig, workshop: Workshop) -> Suffix:
    """Needs the text alone."""
    return Suffix(config)


METHOD = Method(SuffixConfig, build, tokens=24)

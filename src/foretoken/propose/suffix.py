"""Suffix decoding (2411.04975): what followed the same context earlier in this text or in earlier outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.checks import integer, number
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.native import sampling as native
from foretoken.core.native.sampling import CopySearch
from foretoken.propose.base import BuildContext, Method, Observation, Proposer
from foretoken.propose.continuations import CandidateTree, candidate_tree
from foretoken.propose.matches import LIMIT, PAD, ContextTexts, Matches
from foretoken.propose.suffix_store import SuffixStores


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """vLLM's keys with the same meaning, and two more.

    Attributes:
        suffix_decoding_max_tree_depth: Maximum length of a matched context, and of a continuation.
        suffix_decoding_max_cached_requests: Number of finished outputs kept for later requests, over all values of
            ``cache_salt``. 0 keeps none.
        suffix_decoding_max_spec_factor: A match of m tokens is followed for at most this factor times m tokens (vLLM's
            default is 1).
        suffix_decoding_min_token_prob: Minimum estimated probability of a draft token.
        suffix_decoding_max_cached_tokens: Bound on the memory of kept outputs, at 6 to 8 bytes a token (4 million: 32
            MB).
        top_k: Continuations followed at each node. 1 drafts a chain.
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
    """A candidate tree and the length of the context that it follows."""

    tree: CandidateTree
    length: int = 0

    @property
    def rank(self) -> tuple[float, int]:
        return self.tree.score, self.length


class Suffix(Proposer):
    """Drafts fixed candidates from the sequence's own text and from a store of finished outputs.

    Outputs that finish by themselves or by their length are stored, aborted ones are not. The end of the prompt is
    stored before the output, so that a repeated question matches its earlier answer from the first token on. A request
    sees only outputs of its own ``cache_salt``.
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
        self._kernels = None if config.suffix_decoding_max_cached_requests else native.kernels()
        self._search = CopySearch(
            factor=config.suffix_decoding_max_spec_factor,
            min_prob=config.suffix_decoding_min_token_prob,
            depth=config.suffix_decoding_max_tree_depth,
            limit=LIMIT,
            top_k=config.top_k,
        )

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(c, b) if b > 0 else Draft.empty() for c, b in zip(contexts, budgets, strict=True)]

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for context, observation in zip(contexts, observations, strict=True):
            if observation.step.finish_reason in ("stop", "length"):
                start = max(0, context.prompt_length - self.config.suffix_decoding_max_tree_depth)
                self.store.add(context.tokens[start:], context.cache_salt)

    def forget(self, context: Context) -> None:
        self._texts.forget(context)

    def _draft(self, context: Context, budget: int) -> Draft:
        depth = self.config.suffix_decoding_max_tree_depth
        text = self._texts.of(context)
        if self._kernels is not None:
            search = self._search
            search.text, search.count, search.budget = text.address, len(text), budget
            tokens, parents, probs, length = self._kernels.copies(search)
            return CandidateTree(tokens, parents, probs).draft(length)
        tail, steps = text.tail(depth), min(budget, depth)
        own = text.find_matches(tail, steps)
        min_length = max(1, int(own.lengths[0]) // 2) if len(own.lengths) else 1
        match = best_match(own, budget, self.config)
        earlier = self.store.find_matches(tail, steps, min_length=min_length, cache_salt=context.cache_salt)
        match = best_match(earlier, budget, self.config, match)
        return match.tree.draft(match.length)


def best_match(matches: Matches, budget: int, config: SuffixConfig, incumbent: _Match | None = None) -> _Match:
    """Returns the context length whose continuations promise most tokens; on ties the longer one, then ``incumbent``.

    Likely continuations of a match of m tokens are followed for floor(factor * m) tokens. Their score is the sum of the
    nodes' probabilities, each a product of count ratios along its path (2411.04975, section 3).
    """
    best = incumbent or _Match(CandidateTree())
    lengths, rows = matches.lengths.tolist(), [tuple(row) for row in matches.following.tolist()]
    for count in (i for i in range(1, len(rows) + 1) if i == len(rows) or lengths[i] < lengths[i - 1]):
        length = lengths[count - 1]
        steps = min(int(config.suffix_decoding_max_spec_factor * length), budget)
        if steps < 1 or best.rank >= (steps, length):
            break  # a level's probabilities sum to at most 1, and the remaining matches are shorter
        counts = Counter(rows[:count])
        tree = candidate_tree(counts, budget, steps, config.top_k, config.suffix_decoding_min_token_prob)
        match = _Match(tree, length)
        if match.rank > best.rank:
            best = match
    return best


def build(config: SuffixConfig, build_context: BuildContext) -> Suffix:
    """Builds the proposer, which needs only the text."""
    return Suffix(config)


METHOD = Method(SuffixConfig, build, tokens=24, drafts_trees=True)

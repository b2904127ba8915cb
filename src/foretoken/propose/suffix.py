"""Copies of what followed the same context in this text or in earlier outputs; no model is used.

Prompt lookup copies what followed the latest occurrence of the longest n-gram that ends the text. Suffix decoding
(2411.04975) drafts a tree of what followed; earlier outputs are in a searchable store with bounded memory.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from foretoken.core.checks import integer, number
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.native import sampling as native
from foretoken.core.native.sampling import CopySearch
from foretoken.propose.base import BuildContext, Method
from foretoken.propose.matches import BREAK, LIMIT, PAD, GrowingText, Ids, Matches, SearchableText, TextProposer
from foretoken.propose.suffix_array import SuffixArray
from foretoken.propose.tree import CandidateTree, candidate_tree


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


def build_lookup(config: LookupConfig, build_context: BuildContext) -> Lookup:
    return Lookup(config)


LOOKUP = Method(LookupConfig, build_lookup, tokens=8)


FRESH_TOKENS = 16384  # tokens that are searched unsorted, in about 20 us
SHARE = 4  # a segment holds at most this fraction of the bound, which limits what one eviction drops
STEP = 4  # a segment is merged with its predecessor unless that is this many times larger
STORE_TOKENS = 256  # overhead of a store besides its outputs, in tokens of 8 bytes


@dataclass(frozen=True, eq=False, slots=True)
class _Segment:
    """Consecutive outputs. Only the newest segment grows."""

    text: SearchableText
    requests: int

    @property
    def sorted(self) -> bool:
        return isinstance(self.text, SuffixArray)


class SuffixStore:
    """Finished outputs by ``Context.cache_salt``, evicted oldest first.

    A sorted token takes 6 bytes, or 8 with vocabularies of 65,535 tokens and more (and about 40 while its segment is
    sorted, which is at most a quarter of the bound).

    ``add`` copies the tokens and returns. Segments are sorted in the background and merged so that their sizes fall at
    least geometrically: a token is sorted again only when its segment has grown by about half. Readers see one tuple of
    segments of their salt, which is replaced as a whole. When all salts together exceed the bounds, the least recently
    used one loses its oldest outputs.

    Args:
        depth: Maximum length of a matched context.
        max_tokens: Bound on the tokens, held after every ``add``.
        max_requests: Bound on the outputs, held after every ``add``.
    """

    def __init__(self, depth: int, max_tokens: int, max_requests: int) -> None:
        self.depth, self.max_tokens, self.max_requests = depth, max_tokens, max_requests
        self._segment_tokens, self._segment_requests = max(1, max_tokens // SHARE), max(1, max_requests // SHARE)
        self._fresh_tokens = min(FRESH_TOKENS, self._segment_tokens)
        # by salt, the least recently used first: its segments, the oldest first
        self._segments: OrderedDict[str | None, tuple[_Segment, ...]] = OrderedDict()
        self._tokens = self.requests = 0
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._sorting: Future[None] | None = None

    def __len__(self) -> int:
        """Returns the number of tokens, with one break for each request."""
        return self._tokens

    @property
    def nbytes(self) -> int:
        return sum(segment.text.nbytes for segments in self._segments.values() for segment in segments)

    @property
    def segments(self) -> int:
        return sum(map(len, self._segments.values()))

    @property
    def scopes(self) -> int:
        """Number of salts that have outputs."""
        return len(self._segments)

    def add(self, tokens: Sequence[int], cache_salt: str | None = None) -> None:
        """Stores an output; if it exceeds the bound, its end. Does nothing if a bound is 0."""
        if not tokens or self.max_tokens < 2 or self.max_requests < 1:
            return
        output = np.array([*tokens[1 - self.max_tokens :], BREAK], np.int32)
        with self._lock:
            older, requests = self._segments.get(cache_salt, ()), 1
            text = GrowingText()  # a new object, since a reader may be searching the previous one
            if older and not self._full(older[-1]) and len(older[-1].text) + len(output) <= self.max_tokens:
                text.extend(older[-1].text.tokens())
                requests += older[-1].requests
                older = older[:-1]
            text.extend(output)
            segments = [*older, _Segment(text, requests)]
            while self._outgrown(*_totals(segments)):
                del segments[0]
            self._replace(cache_salt, segments)
            self._segments.move_to_end(cache_salt)
            while len(self._segments) > 1 and self._outgrown(self._tokens + STORE_TOKENS * self.scopes, self.requests):
                salt, oldest = next(iter(self._segments.items()))
                self._replace(salt, oldest[1:])
            if self._full(segments[-1]):
                self._worker = self._worker or ThreadPoolExecutor(1, "foretoken-suffix-store")
                self._sorting = self._worker.submit(self._tidy, cache_salt)

    def find_matches(
        self, tail: Ids, steps: int, limit: int = LIMIT, min_length: int = 1, cache_salt: str | None = None
    ) -> Matches:
        """As ``SearchableText.find_matches``, the latest requests of the salt first.

        Contexts less than half as long as the longest are skipped.
        """
        with self._lock:
            if cache_salt not in self._segments:
                return Matches.none()
            self._segments.move_to_end(cache_salt)
            texts = [segment.text for segment in reversed(self._segments[cache_salt])]
        longest = max((text.longest(tail) for text in texts if isinstance(text, SuffixArray)), default=0)
        min_length = max(min_length, longest // 2)
        return Matches.best([text.find_matches(tail, steps, limit, min_length) for text in texts], limit)

    def settle(self) -> None:
        """Waits until every segment is sorted."""
        if self._sorting is not None:
            self._sorting.result()

    def _full(self, segment: _Segment) -> bool:
        return segment.sorted or len(segment.text) >= self._fresh_tokens or segment.requests >= self._segment_requests

    def _outgrown(self, tokens: int, requests: int) -> bool:
        return tokens > self.max_tokens or requests > self.max_requests

    def _replace(self, cache_salt: str | None, segments: Sequence[_Segment]) -> None:
        """Replaces the segments of a salt, and updates the totals."""
        before, after = _totals(self._segments.get(cache_salt, ())), _totals(segments)
        self._tokens, self.requests = self._tokens + after[0] - before[0], self.requests + after[1] - before[1]
        if segments:
            self._segments[cache_salt] = tuple(segments)
        else:
            del self._segments[cache_salt]

    def _tidy(self, cache_salt: str | None) -> None:
        """Sorts full segments, each merged with as many predecessors as its size calls for. Runs in the background."""
        while run := self._mergeable(cache_salt):
            tokens = np.concatenate([segment.text.tokens() for segment in run])
            merged = _Segment(SuffixArray.build(tokens, self.depth), sum(segment.requests for segment in run))
            with self._lock:
                # Eviction takes the oldest first. If run[0] is gone meanwhile, the merged segment is too old as well.
                segments = self._segments.get(cache_salt, ())
                if run[0] in segments:
                    at = segments.index(run[0])
                    self._replace(cache_salt, (*segments[:at], merged, *segments[at + len(run) :]))

    def _mergeable(self, cache_salt: str | None) -> tuple[_Segment, ...]:
        """Returns the next segments to merge and sort, empty if all are sorted."""
        with self._lock:
            full = [segment for segment in self._segments.get(cache_salt, ()) if self._full(segment)]
            unsorted = next((i for i, segment in enumerate(full) if not segment.sorted), None)
            if unsorted is None:
                return ()
            start, size, requests = unsorted, len(full[unsorted].text), full[unsorted].requests
            while start > 0:
                before = full[start - 1]
                size, requests = size + len(before.text), requests + before.requests
                grows = len(before.text) < STEP * (size - len(before.text))
                if not grows or size > self._segment_tokens or requests > self._segment_requests:
                    break
                start -= 1
            return tuple(full[start : unsorted + 1])


def _totals(segments: Sequence[_Segment]) -> tuple[int, int]:
    """Returns the numbers of tokens and of outputs."""
    return sum(len(segment.text) for segment in segments), sum(segment.requests for segment in segments)


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """vLLM's keys with the same meaning, and two more."""

    suffix_decoding_max_tree_depth: int = 24  # maximum length of a matched context, and of a continuation
    # number of finished outputs kept for later requests, over all values of ``cache_salt``; 0 keeps none
    suffix_decoding_max_cached_requests: int = 10_000
    # a match of m tokens is followed for at most this factor times m tokens (vLLM's default is 1)
    suffix_decoding_max_spec_factor: float = 4.0
    suffix_decoding_min_token_prob: float = 0.1  # minimum estimated probability of a draft token
    # bound on the memory of kept outputs, at 6 to 8 bytes a token (4 million: 32 MB)
    suffix_decoding_max_cached_tokens: int = 4_000_000
    top_k: int = 4  # continuations followed at each node; 1 drafts a chain

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


class Suffix(TextProposer):
    """Drafts fixed candidates from the sequence's own text and from a store of finished outputs.

    Outputs that finish by themselves or by their length are stored, aborted ones are not. The end of the prompt is
    stored before the output, so that a repeated question matches its earlier answer from the first token on. A request
    sees only outputs of its own ``cache_salt``.
    """

    name = "suffix"
    learns = True

    def __init__(self, config: SuffixConfig | None = None) -> None:
        self.config = config = config or SuffixConfig()
        self.store = SuffixStore(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_tokens,
            config.suffix_decoding_max_cached_requests,
        )
        super().__init__()
        self._kernels = None if config.suffix_decoding_max_cached_requests else native.kernels()
        self._search = CopySearch(
            factor=config.suffix_decoding_max_spec_factor,
            min_prob=config.suffix_decoding_min_token_prob,
            depth=config.suffix_decoding_max_tree_depth,
            limit=LIMIT,
            top_k=config.top_k,
        )

    def forget(self, context: Context) -> None:
        super().forget(context)
        if context.finish_reason in ("stop", "length"):
            start = max(0, context.prompt_length - self.config.suffix_decoding_max_tree_depth)
            self.store.add(context.tokens[start:], context.cache_salt)

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
    return Suffix(config)


METHOD = Method(SuffixConfig, build, tokens=24, drafts_trees=True)

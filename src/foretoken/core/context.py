"""One sequence as proposers and verifiers see it: its tokens, sampling parameters and random numbers."""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from foretoken.core.distributions import Law
from foretoken.core.draft import Draft
from foretoken.core.history import History, TokenCounts
from foretoken.core.streams import Streams
from foretoken.core.verdict import Exactness as Exactness


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """End of a draft: at the first token that is reached with less than the minimum acceptance.

    A token that the draft gives probability p is accepted at the rate ``bases[i] + slopes[i] * p``, where i is the
    number of ``bounds`` up to p. It is reached with the product of the rates of all tokens up to it.

    Attributes:
        bounds: [buckets - 1], ascending.
        bases: [buckets].
        slopes: [buckets].
        min_acceptance: By depth; the last one also holds for all deeper tokens.
    """

    bounds: Sequence[float]
    bases: Sequence[float]
    slopes: Sequence[float]
    min_acceptance: Sequence[float]

    def rate(self, probability: float) -> float:
        """Returns the rate at which a token of this probability is accepted."""
        bucket = bisect_right(self.bounds, probability)
        return self.bases[bucket] + self.slopes[bucket] * probability

    def minimum(self, depth: int) -> float:
        return self.min_acceptance[min(depth, len(self.min_acceptance) - 1)]


@dataclass(eq=False, slots=True)
class Context:
    """The live state of one sequence.

    Args:
        id: Identifier of the sequence, unique in its engine.
        tokens: Prompt and output. Only the engine appends to it; only ``rewind`` takes any away.
        prompt_length: Number of prompt tokens.
        law: Sampling parameters: turns the target's logits into probabilities.
        streams: Random numbers of the sequence.
        exactness: Grade of exactness that the request is promised.
        depth: Draft tokens per step that the request asks for. None leaves it to the controller.
        prediction: Tokens of a text that the client expects the output to resemble.
        method: Name of the loaded proposer to draft with. None takes the engine's default.
        source: Encoder input of an encoder-decoder. ``tokens`` are then the decoder's alone.
        cache_salt: Scope of the state kept across requests. Requests share KV blocks and proposers' stores only with
            requests of the same salt. None is a scope like any other.
        adapter: Key of the LoRA adapter with which the target computes the sequence. None is none.
        num_proposer_tokens: Number of leading tokens that the proposer has processed. Kept by the engine.
        finish_reason: As in ``StepOutput``, once the sequence has ended. Kept by the engine.
        end: Where drafts end early that estimate their acceptance; None for nowhere. Kept by the draft policy.
    """

    id: int
    tokens: list[int]
    prompt_length: int
    law: Law
    streams: Streams
    exactness: Exactness = Exactness.DISTRIBUTION
    depth: int | None = None
    prediction: tuple[int, ...] = ()
    method: str | None = None
    source: tuple[int, ...] = ()
    cache_salt: str | None = None
    adapter: str | None = None
    num_proposer_tokens: int = 0
    end: ChainEnd | None = None
    finish_reason: str | None = None
    _counts: TokenCounts = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._counts = TokenCounts(self.prompt_length)

    def rewind(self, tokens: Sequence[int]) -> None:
        """Replaces the tokens, for a context whose last tokens were predicted wrongly."""
        self.tokens[:] = tokens
        self._counts = TokenCounts(self.prompt_length)

    @property
    def missed_tokens(self) -> int:
        """Number of tokens that the proposer's model has to process before it can draft."""
        return len(self.tokens) - self.num_proposer_tokens

    @property
    def scope(self) -> Hashable:
        """Scope of the target's hidden states: sequences that differ in it have different ones for the same tokens."""
        return self.cache_salt, self.adapter

    @property
    def generated(self) -> int:
        """Number of generated tokens, which is the position of the next one in ``streams``."""
        return len(self.tokens) - self.prompt_length

    def history(self, drafted: Sequence[int] = ()) -> History:
        """Returns the history of the node that the path ``drafted`` leads to."""
        return History(self.tokens, self.prompt_length, tuple(drafted), self._counts)

    def histories(self, draft: Draft) -> list[History]:
        """Returns one history per row of a forward pass over ``draft``: the root's, then each node's."""
        return [self.history_at(draft, row) for row in range(len(draft) + 1)]

    def history_at(self, draft: Draft, row: int) -> History:
        """Returns the history of one row: row 0 is the root, row i + 1 is node i."""
        return self.history([draft.ids[i] for i in draft.path(row - 1)])

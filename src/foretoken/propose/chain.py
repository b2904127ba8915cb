"""One sequence's chain while a model drafts it, level by level or at once."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.distributions import Law, NodeDistributions
from foretoken.core.draft import (
    Draft,
    PointMass,
    ProposalLaw,
    Sampled,
    SampledElsewhere,
    log_scores,
)
from foretoken.core.history import History
from foretoken.core.native import sampling
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import PrivateStream, SharedStream, Stream
from foretoken.models.base import Handle
from foretoken.models.chains import ChainRequest, DraftStop, Draws, ModelChain, ScoredRows, TreeShape
from foretoken.models.device_drafts import UnreadChains, UnreadDraft

# Maps logits [rows, Vd] over the draft's vocabulary to [rows, V] over the target's.
Widen = Callable[[Tensor], Tensor]

T = TypeVar("T")
Opened = TypeVar("Opened", bound=Handle, contravariant=True)


@dataclass(slots=True)
class Chain:
    """A chain of sampled tokens; under a greedy law each is the argmax.

    It ends where ``Context.end`` says. A greedy chain keeps the token that is below the minimum acceptance as its last
    one, so that its acceptance is learned; whether it is verified is the policy's decision.
    """

    context: Context
    budget: int
    law: Law
    widen: Widen
    stream: Stream
    sampled: bool  # the tokens are random samples, so the verifier needs their distributions
    stop: DraftStop | None = None  # scores the tokens in the place of the draft's own probabilities
    claims: list[float] = field(default_factory=list)  # estimated acceptance of each token, from before it was sampled
    reach: float = 1.0  # calibrated acceptance of all tokens
    stopped: bool = False  # it ended before its budget was spent
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)  # the distribution [V] of each sampled token
    # these, [tokens, V], or the law that reads them, where a model drafted the chain at once
    stacked: Tensor | SampledElsewhere | None = None

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.budget

    def growing(self) -> Draft:
        return Draft.chain(self.tokens)

    def request(self) -> ChainRequest | None:
        """Returns the request to a model that drafts the chain at once; None if each token has to be inspected."""
        law, budget = self.law, self.budget
        if self.stop is None:
            return request_of(law, self.context, budget, draws_of(law, self.stream, budget, self.sampled))
        if self.context.end is not None:
            return None
        scored = self._scored_law
        draws = draws_of(scored, self.stream, 0 if law.greedy else budget, self.sampled)
        request = request_of(law, self.context, budget, draws)
        return None if request is None or draws is None else replace(request, stop=self.stop)

    def take(self, chain: ModelChain) -> None:
        assert chain.rows is None or isinstance(chain.rows, Tensor | SampledElsewhere)
        self.tokens, self.stopped, self.stacked = chain.candidates or chain.tokens, chain.ended, chain.rows
        self.claims = chain.probabilities

    def extend(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        logits = self.widen(logits)
        rows = self._rows(self.law, logits)
        certain = rows.certain(0)
        # If no token is possible the chain ends before sampling: to drop a sampled token would change the distribution.
        if math.isnan(rows[0][0]) if certain is None else certain < 0:
            self.stopped = True
            return
        self._score(rows, logits, certain, hidden)
        if self.stopped and not self._keeps_last:
            return
        self.tokens.append(self.stream.categorical(rows[0], len(self.tokens)) if certain is None else certain)
        if self.sampled:
            self.rows.append(rows[0])

    def draft(self) -> Draft:
        rows = torch.stack(self.rows) if self.rows else self.stacked
        law: ProposalLaw = PointMass()
        if rows is not None and self.tokens:
            law = rows if isinstance(rows, SampledElsewhere) else Sampled(rows)
        reach = list(accumulate(self.claims[: len(self.tokens)], mul))
        return replace(Draft.chain(self.tokens, law), levels=self._levels, scores=log_scores(reach) if reach else None)

    @property
    def _levels(self) -> int | None:
        """Passes of the model, if fewer than the budget."""
        return len(self.tokens) + (not self._keeps_last) if self.stopped else None

    @property
    def _keeps_last(self) -> bool:
        """Whether the token at which the chain ends is its last one."""
        return not self.sampled and self.context.end is not None

    def _score(self, rows: NodeDistributions, logits: Tensor, certain: int | None, hidden: Tensor | None) -> None:
        """Estimates the acceptance of the next token, and ends the chain there if it is below the minimum."""
        if self.stop is not None:
            tested = self._rows(self._scored_law, logits) if self.law.greedy else rows
            before = [*self.context.tokens[-1:], *self.tokens][-1]
            read = None if hidden is None else hidden[:1]
            scored = ScoredRows(tested[0][None], read, torch.tensor([before]), torch.tensor([self.law.greedy]))
            claim = float(self.stop.score(scored))
        elif self.law.greedy and certain is not None and self.context.end is not None:
            claim = _probability(logits[0], certain)
        else:
            return
        end, depth = self.context.end, len(self.claims)
        self.claims.append(claim)
        self.reach *= claim if end is None else end.rate(claim)
        if end is not None:
            self.stopped = self.reach < end.minimum(depth)
        elif self.stop is not None:
            self.stopped = (claim if self.stop.each else self.reach) < self.stop.threshold

    @property
    def _scored_law(self) -> Law:
        """The law of the distributions that a score reads."""
        return self.law.with_temperature(1.0) if self.law.greedy else self.law

    def _rows(self, law: Law, logits: Tensor) -> NodeDistributions:
        return NodeDistributions(law, logits, lambda row: self.context.history(self.tokens))


def _probability(logits: Tensor, token: int) -> float:
    if logits.device.type != "cpu":  # one number is copied from the device
        return float(logits.float().log_softmax(0)[token].exp())
    scores = logits.float().numpy()  # torch would wake threads that then compete with those of the compiled kernels
    weights = np.exp(scores - scores.max())
    return float(weights[token] / weights.sum())


def draws_of(law: Law, stream: Stream, count: int, rows: bool = False) -> Draws | None:
    """Returns the sampling of ``count`` tokens or levels by ``law`` for a model; None if it cannot sample so.

    rows: Whether the distributions are returned.
    """
    if not isinstance(law, SamplingLaw) or law.greedy:
        return None
    if isinstance(stream, SharedStream):
        return Draws(law.kept, keys=stream.keys(count), rows=rows)
    if isinstance(stream, PrivateStream):
        return Draws(law.kept, uniforms=stream.uniforms(count), rows=rows)
    return None


def request_of(
    law: Law, context: Context, limit: int, draws: Draws | None, tree: TreeShape | None = None
) -> ChainRequest | None:
    """Returns the request to a model that drafts at once as ``law`` requires; None if it cannot.

    Args:
        limit: Maximum number of tokens.
        draws: Their sampling by the law; None if it cannot sample them or is greedy.
    """
    if not isinstance(law, SamplingLaw) or (draws is None and not law.greedy):
        return None
    if not law.adjusts:
        return ChainRequest(limit, draws, context.end if law.greedy else None, tree)
    end, follows = context.end if law.greedy else None, law.changes_follow_tokens
    possible = None if follows else partial(_at_root, context, law.possible_at)
    return ChainRequest(limit, draws, end, tree, partial(_at_root, context, law.changes_at), possible)


def _at_root(context: Context, call: Callable[[int, History], T], vocabulary: int) -> T:
    """Calls a function of a vocabulary's size and the history behind a sequence."""
    return call(vocabulary, context.history())


class AtOnce(Protocol):
    """A draft that a model may draft in one call."""

    def request(self) -> ChainRequest | None:
        """Returns the request to the model; None if it cannot draft this."""
        ...

    def take(self, chain: ModelChain) -> None: ...

    def draft(self) -> Draft: ...


class DraftsChains(Protocol[Opened]):
    """A drafter of chains in one call: a model, or a head on a target's hidden states."""

    @property
    def drafts_chains(self) -> bool:
        """Whether ``chains`` may be called."""

    @property
    def adapts_levels(self) -> bool:
        """See ``Model``."""

    def chains(self, handles: Sequence[Opened], requests: Sequence[ChainRequest], vocab: int) -> Sequence[ModelChain]:
        """See ``Model.chains``."""


def draft_at_once(
    model: DraftsChains[Opened], active: Sequence[tuple[Opened, AtOnce]], vocab_size: int
) -> list[Draft | None]:
    """Drafts chains and trees in one call.

    Args:
        vocab_size: The target's vocabulary size.

    Returns:
        The drafts. None for each that the model cannot draft at once, because it needs a look at every token; for all
        where the passes of these would come on top of the others' (``Model.adapts_levels``).
    """
    requests = [_request(model, grower) for _, grower in active]
    if not model.drafts_chains or (model.adapts_levels and None in requests):
        requests = [None] * len(active)
    drafts: list[Draft | None] = [None] * len(active)
    if not (numbers := [number for number, request in enumerate(requests) if request is not None]):
        return drafts
    asked = [request for request in requests if request is not None]
    drafted = model.chains([active[number][0] for number in numbers], asked, vocab_size)
    for at, (number, request) in enumerate(zip(numbers, asked, strict=True)):
        grower = active[number][1]
        if not isinstance(drafted, UnreadChains):
            drafts[number] = _draft_of(grower, drafted[at])
            continue
        drafts[number] = UnreadDraft(drafted.unread[at], partial(_draft_of, grower))
        if request.possible is not None:  # masks of the nodes are computed while the target's pass runs
            drafted.unread[at].peek()
    return drafts


def _request(model: DraftsChains[Opened], grower: AtOnce) -> ChainRequest | None:
    """Returns the request to a model; None if it cannot draft this at once."""
    request = grower.request() if model.drafts_chains else None
    if request is None:
        return None
    if not model.adapts_levels:  # a device draws by itself, and the host may look at what it has drafted
        return request
    unable = request.possible is not None or request.stop is not None
    return None if unable or (request.changes is not None and sampling.drawing() is None) else request


def _draft_of(grower: AtOnce, chain: ModelChain) -> Draft:
    grower.take(chain)
    return grower.draft()

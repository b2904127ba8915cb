"""One sequence's chain while a model drafts it, level by level or at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.distributions import Law, NodeDistributions
from foretoken.core.draft import Draft
from foretoken.core.law import PointMass, ProposalLaw, Sampled
from foretoken.core.native import sampling
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import PrivateStream, SharedStream, Stream
from foretoken.models.base import Handle
from foretoken.models.chains import ChainRequest, Draws, ModelChain
from foretoken.propose.drawn_tree import expected_acceptance
from foretoken.propose.stopping.base import Gate
from foretoken.propose.stopping.paying import PayingDraft

# Maps logits [rows, Vd] over the draft's vocabulary to [rows, V] over the target's.
Widen = Callable[[Tensor], Tensor]

Opened = TypeVar("Opened", bound=Handle, contravariant=True)


@dataclass(slots=True)
class Chain:
    """A chain of drawn tokens; under a greedy law each is the argmax.

    Attributes:
        drawn: The tokens are random draws, so the verifier needs their distributions.
        gate: Decides before each draw whether the chain ends.
        paying: Decides so by what the next token is worth.
        floor: Estimated probability of acceptance below which nothing is drawn.
        reach: Estimated probability that the next token is accepted.
        stopped: It ended before its budget was spent.
        rows: The distribution [V] of each drawn token.
        stacked: These, [tokens, V], where a model drafted the chain at once.
    """

    context: Context
    budget: int
    law: Law
    widen: Widen
    stream: Stream
    drawn: bool
    gate: Gate | None = None
    paying: PayingDraft | None = None
    floor: float = 0.0
    reach: float = 1.0
    stopped: bool = False
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    stacked: Tensor | None = None

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.budget

    def growing(self) -> Draft:
        return Draft.chain(self.tokens)

    def request(self) -> ChainRequest | None:
        """Returns what a model is asked for that drafts the chain at once; None where each token needs a look."""
        law, stream, budget = self.law, self.stream, self.budget
        if not isinstance(law, SamplingLaw) or law.adjusts or self.gate is not None:
            return None
        if law.greedy:
            return ChainRequest(budget, end=None if self.paying is None else self.paying.end)
        if sampling.chooser() is None or (self.floor and self.drawn):
            return None
        if isinstance(stream, SharedStream):
            return ChainRequest(budget, Draws(law.kept, keys=stream.keys(budget), rows=self.drawn))
        if isinstance(stream, PrivateStream):
            return ChainRequest(budget, Draws(law.kept, uniforms=stream.uniforms(budget), rows=self.drawn))
        return None

    def take(self, chain: ModelChain) -> None:
        """Takes over a chain that a model drafted at once."""
        self.tokens, self.stopped, self.stacked = chain.tokens, chain.ended, chain.rows
        if self.paying is not None:
            self.paying.candidates, self.paying.claims = chain.candidates, chain.probabilities

    def extend(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        logits = self.widen(logits)
        rows = self._rows(self.law, logits)
        certain = rows.certain(0)
        # If no token is possible the chain ends before the draw: dropping a drawn token would change the distribution.
        impossible = math.isnan(rows[0][0]) if certain is None else certain < 0
        unpaid = (
            not impossible and certain is not None and self.paying is not None and self.paying.ends(logits[0], certain)
        )
        self.stopped = impossible or unpaid or self._gated(rows, logits, hidden) or self._unlikely(rows)
        if self.stopped:
            return
        self.tokens.append(self.stream.categorical(rows[0], len(self.tokens)) if certain is None else certain)
        if self.drawn:
            self.rows.append(rows[0])

    def draft(self) -> Draft:
        rows = torch.stack(self.rows) if self.rows else self.stacked
        law: ProposalLaw = Sampled(rows) if rows is not None and self.tokens else PointMass()
        chain = Draft.chain(self.tokens, law)
        return replace(chain, levels=len(self.tokens) + 1) if self.stopped else chain

    def _unlikely(self, rows: NodeDistributions) -> bool:
        """Returns whether a drawn token would be accepted too seldom, by the distribution that it comes from."""
        if not self.floor or not self.drawn:
            return False
        self.reach *= expected_acceptance(rows[0])
        return self.reach < self.floor

    def _gated(self, rows: NodeDistributions, logits: Tensor, hidden: Tensor | None) -> bool:
        """Returns whether the gate ends the chain here."""
        if self.gate is None:
            return False
        tested = self._rows(self.law.with_temperature(1.0), logits) if self.law.greedy else rows
        return self.gate.stops(tested[0], None if hidden is None else hidden[0])

    def _rows(self, law: Law, logits: Tensor) -> NodeDistributions:
        return NodeDistributions(law, logits, lambda row: self.context.history(self.tokens))


@runtime_checkable
class AtOnce(Protocol):
    """A draft that a model may draft in one call."""

    def request(self) -> ChainRequest | None:
        """Returns what the model is asked for; None where it cannot draft this."""

    def take(self, chain: ModelChain) -> None:
        """Takes over what the model drafted."""


class DraftsChains(Protocol[Opened]):
    """What drafts chains in one call: a model, or a head on a target's hidden states."""

    @property
    def vocab_size(self) -> int:
        """Size of its vocabulary."""

    @property
    def drafts_chains(self) -> bool:
        """Whether ``chains`` may be called."""

    def chains(self, handles: Sequence[Opened], requests: Sequence[ChainRequest], vocab: int) -> list[ModelChain]:
        """See ``Model.chains``."""


def draft_at_once(model: DraftsChains[Opened], active: Sequence[tuple[Opened, object]], vocab_size: int) -> bool:
    """Drafts the chains of all sequences in one call.

    Args:
        model: The draft model or head.
        active: The sequences and what grows their drafts.
        vocab_size: The target's vocabulary size.

    Returns:
        Whether it did. Nothing is drafted if the model cannot, or if one draft needs a look at every token: its passes
        would come on top of the others'.
    """
    if not model.drafts_chains:
        return False
    vocab = min(model.vocab_size, vocab_size)
    chains: list[tuple[AtOnce, ChainRequest]] = []
    for _, grower in active:
        if not isinstance(grower, AtOnce) or (request := grower.request()) is None:
            return False
        if request.draws and vocab < vocab_size:  # rows would lack tokens of the target
            return False
        chains.append((grower, request))
    drafted = model.chains([handle for handle, _ in active], [request for _, request in chains], vocab)
    for (grower, _), chain in zip(chains, drafted, strict=True):
        grower.take(chain)
    return True

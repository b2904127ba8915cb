"""Ends a greedy chain where its next token would not pay for its row, by the controller's measured costs.

What a token costs is in ``Context.floors``: the probability of acceptance from which it pays. How likely a token is
accepted is learned by the probability that the draft gives it, over all requests and in each request.

Drawn chains have no such end: at temperature 1 the draft's distribution hardly tells whether a draw is accepted, and
the lengths of ``goodput`` did better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.step import StepOutput
from foretoken.models.chains import ChainEnd
from foretoken.propose.acceptance import ScoredRates


@dataclass(slots=True)
class PayingDraft:
    """One chain while it grows.

    Attributes:
        rates: Acceptance rates of the request.
        floors: See ``Context.floors``.
        candidates: The tokens, with the one that was left out.
        claims: The probability that the draft gives each.
        reach: Estimated probability that all tokens so far are accepted.
    """

    rates: ScoredRates
    floors: Sequence[float]
    candidates: list[int] = field(default_factory=list)
    claims: list[float] = field(default_factory=list)
    reach: float = 1.0

    def ends(self, logits: Tensor, token: int) -> bool:
        """Returns whether the chain ends before ``token``, its next one.

        Args:
            logits: [V], the draft's.
            token: The candidate, which has the largest of them unless the request's parameters change them.
        """
        floor = self.floors[min(len(self.claims), len(self.floors) - 1)]
        self.claims.append(_probability(logits, token))
        self.candidates.append(token)
        self.reach *= self.rates.chance(self.claims[-1])
        return self.reach < floor

    @property
    def end(self) -> ChainEnd:
        """Where a chain ends that is drafted at once, as ``ends`` has it."""
        return self.rates.end(self.floors)

    def learn(self, step: StepOutput) -> None:
        """Learns from the outcome of the draft."""
        if step.finish_reason is not None:
            return
        # The text also shows whether the token that was left out was right.
        for token, candidate, claim in zip(step.tokens, self.candidates, self.claims, strict=False):
            self.rates.learn(claim, token == candidate)
            if token != candidate:
                return


class PayingChains:
    """Learns from the chains of all sequences."""

    def __init__(self) -> None:
        self._rates = ScoredRates()
        self._requests: dict[int, ScoredRates] = {}
        self._drafts: dict[int, PayingDraft] = {}

    def begin(self, context: Context) -> PayingDraft:
        """Returns the record of a new chain for ``context``."""
        if context.id not in self._requests:
            self._requests[context.id] = self._rates.for_request()
        draft = self._drafts[context.id] = PayingDraft(self._requests[context.id], context.floors)
        return draft

    def observe(self, context: Context, step: StepOutput) -> None:
        """Receives the outcome of a step. Does nothing if no chain began in it."""
        if (draft := self._drafts.pop(context.id, None)) is not None:
            draft.learn(step)

    def forget(self, context: Context) -> None:
        """Drops the state of a sequence that has ended. Unknown sequences are ignored."""
        self._requests.pop(context.id, None)
        self._drafts.pop(context.id, None)


def _probability(logits: Tensor, token: int) -> float:
    """Returns the softmax of logits [V] at ``token``."""
    if logits.device.type != "cpu":  # one number is copied from the device
        return float(logits.float().log_softmax(0)[token].exp())
    scores = logits.float().numpy()  # torch would wake threads that then compete with those of the compiled kernels
    weights = np.exp(scores - scores.max())
    return float(weights[token] / weights.sum())

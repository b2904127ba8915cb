"""A smaller model drafts a chain (2211.17192, 2302.01318): drawn, by argmax, or with the target's own noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.law import PointMass, ProposalLaw, Sampled
from foretoken.core.sampling import Law, Rows
from foretoken.core.streams import Purpose, Stream
from foretoken.models.base import Handle, Model
from foretoken.propose.base import Observation, Proposer


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """temperature: the draft's own; None takes the request's, 0 drafts by argmax.

    vocab_size: the target's; logits of another width (padded vocabularies of one family) are cut or filled.
    """

    temperature: float | None = None
    vocab_size: int | None = None


@dataclass(slots=True)
class _Chain:
    """One sequence's draft while it grows."""

    context: Context
    handle: Handle
    budget: int
    law: Law
    stream: Stream
    drawn: bool  # the tokens are draws whose law the verifier needs
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    def extend(self, logits: Tensor) -> None:
        """Draw the next token from the newest row of logits [1, V]."""
        rows = Rows(self.law, logits, lambda row: self.context.history(self.tokens))
        certain = rows.certain(0)
        if certain is not None:
            self.tokens.append(certain)
            return
        self.tokens.append(self.stream.categorical(rows[0], len(self.tokens)))
        if self.drawn:
            self.rows.append(rows[0])

    def draft(self) -> Draft:
        law: ProposalLaw = Sampled(torch.stack(self.rows)) if self.rows else PointMass()
        return Draft.chain(self.tokens, law)


class DraftModel(Proposer):
    """Drafts with ``model``, all sequences of a round in one pass per depth.

    In the distribution grade tokens are drawn from the draft's law under the request's own parameters and the
    rows travel with them. In the trajectory grade they are drawn with the noise the target will use
    (2408.07978), so that both pick the same token wherever their laws agree.
    """

    name = "draft_model"

    def __init__(self, model: Model, config: DraftModelConfig | None = None) -> None:
        self.model = model
        self.config = config or DraftModelConfig()
        self._handles: dict[int, Handle] = {}

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        chains = {
            i: self._chain(context, budget)
            for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True))
            if budget > 0 and len(context.tokens) + budget <= self.model.max_length
        }
        for depth in range(max((c.budget for c in chains.values()), default=0)):
            active = [c for c in chains.values() if c.budget > depth]
            scores = self.model.score([c.handle for c in active], [Draft.chain(c.tokens) for c in active])
            for chain, score in zip(active, scores, strict=True):
                chain.extend(self._fit(score.logits[-1:]))
        return [chains[i].draft() if i in chains else Draft.empty() for i in range(len(contexts))]

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        known = [(self._handles[c.id], o.step.tokens) for c, o in zip(contexts, observations, strict=True)
                 if c.id in self._handles]  # fmt: skip
        if known:
            handles, tokens = zip(*known, strict=True)
            self.model.commit(handles, tokens)

    def forget(self, context: Context) -> None:
        handle = self._handles.pop(context.id, None)
        if handle is not None:
            self.model.close(handle)

    def _fit(self, logits: Tensor) -> Tensor:
        """[1, V] of the draft to the target's V: ids beyond either vocabulary are never drafted."""
        missing = (self.config.vocab_size or logits.shape[-1]) - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _chain(self, context: Context, budget: int) -> _Chain:
        if context.id not in self._handles:
            self._handles[context.id] = self.model.open(context.tokens)
        law = context.law
        if self.config.temperature is not None and not law.greedy:
            law = law.with_temperature(self.config.temperature)
        shared = context.exactness is Exactness.TRAJECTORY
        streams, position = context.streams, context.generated
        return _Chain(
            context=context,
            handle=self._handles[context.id],
            budget=budget,
            law=law,
            stream=streams.shared(position) if shared else streams.private(Purpose.DRAFT, position),
            drawn=not shared and not law.greedy,
        )

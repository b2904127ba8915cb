"""A draft model, and beside it what drafts for free, each node where it pays.

It is a mixture whose members are named here. The draft model grows a tree where its candidates are fixed and a chain
where its tokens are drawn, as far as it expects them to pay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.part import DraftPart
from foretoken.costs.model import CostModel
from foretoken.propose.base import BuildContext, Method, Proposer
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.mixture import Mixture, build_members
from foretoken.propose.mixture_members import Member

AUTO = "auto"
FREE: tuple[Mapping[str, Any], ...] = (
    {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    {"method": "prediction"},
)
"""No request is drafted from what another one wrote, which its speed could show. Token recycling is left out: reading
and writing its table took 1 ms of every step of 57 ms (0.74 B target on a Zen 4)."""

DRAFT: Mapping[str, Any] = {"method": "draft_model", "tree": "ranked"}


class Auto(Mixture):
    """The mixture, whose model also drafts alone, a chain: for requests that ask for a draft length, and on targets so
    fast that the arithmetic of a mixture would show.

    Args:
        members: What drafts for free, and one ``DraftModel``.
        costs: The cost model, if it is shared with others.
    """

    name = AUTO

    def __init__(self, members: Sequence[Member], costs: CostModel | None = None) -> None:
        super().__init__(members, costs)
        model = self.costly[0].proposer
        assert isinstance(model, DraftModel)
        self.chain = model.as_chain()

    @property
    def alone(self) -> dict[str, Proposer]:
        """What drafts alone, by name."""
        return {self.costly[0].name: self.chain}

    def parts(self, context: Context) -> Collection[DraftPart]:
        return tuple(DraftPart)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        alone = [budget if c.part is DraftPart.MODEL else 0 for c, budget in zip(contexts, budgets, strict=True)]
        if not any(alone):
            return super().propose(contexts, budgets)
        chains = self.chain.propose(contexts, alone)
        others = super().propose(contexts, [b - own for b, own in zip(budgets, alone, strict=True)])
        return [chain if own else other for chain, own, other in zip(chains, alone, others, strict=True)]

    @property
    def timed_part(self) -> Proposer:
        return self.chain


@dataclass(frozen=True, slots=True)
class AutoConfig:
    """The method has no keys: other members or options are those of a mixture."""


def build(config: AutoConfig, build_context: BuildContext) -> Mixture:
    """Builds the mixture around the draft that "model" names. Raises InvalidRequest if there is none."""
    if build_context.model is None:
        raise InvalidRequest("method 'auto' needs a draft: pass draft_model= or 'model' in speculative_config")
    members = (*FREE, {**DRAFT, "model": str(build_context.model)})
    return Auto(build_members(members, build_context), build_context.costs)


METHOD = Method(AutoConfig, build, tokens=8, drafts_trees=True, takes_draft_model=True)

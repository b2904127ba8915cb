"""A draft model, and beside it what drafts for free, each node where it pays.

It is a mixture whose members are named here. The draft model grows a tree where its candidates are fixed and a chain
where its tokens are drawn, as far as it expects them to pay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.propose.base import BuildContext, Method, Proposer
from foretoken.propose.mixture import Mixture, build_members

AUTO = "auto"
FREE: tuple[Mapping[str, Any], ...] = (
    {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    {"method": "prediction"},
)
"""No request is drafted from what another one wrote, which its speed could show. Token recycling is left out: reading
and writing its table took 1 ms of every step of 57 ms (0.74 B target on a Zen 4)."""

DRAFT: Mapping[str, Any] = {"method": "draft_model", "tree": "ranked"}


class Auto(Mixture):
    """The mixture, whose model also drafts alone for requests that ask for a draft length."""

    name = AUTO

    @property
    def parts(self) -> dict[str, Proposer]:
        """The members that draft alone, by name."""
        return {member.name: member.proposer for member in self.costly}


@dataclass(frozen=True, slots=True)
class AutoConfig:
    """The method has no keys: other members or options are those of a mixture."""


def build(config: AutoConfig, build_context: BuildContext) -> Mixture:
    """Builds the mixture around the draft that "model" names. Raises InvalidRequest if there is none."""
    if build_context.model is None:
        raise InvalidRequest("method 'auto' needs a draft: pass draft_model= or 'model' in speculative_config")
    members = (*FREE, {**DRAFT, "model": str(build_context.model)})
    return Auto(build_members(members, build_context), build_context.costs)


METHOD = Method(AutoConfig, build, tokens=8, drafts_trees=True)

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
"""No request is drafted from what another one wrote, which its speed could show. Beside a model, token
recycling adds less than its time: its table is read and written at every step."""

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
    """The method has no keys. Who wants to choose, configures a method or a mixture."""


def build(config: AutoConfig, build_context: BuildContext) -> Mixture:
    """Builds the mixture around the draft that "model" names."""
    if build_context.model is None:
        raise InvalidRequest("method 'auto' needs a draft: pass draft_model= or 'model' in speculative_config")
    members = (*FREE, {**DRAFT, "model": str(build_context.model)})
    return Auto(build_members(members, build_context), build_context.costs)


METHOD = Method(AutoConfig, build, tokens=8, drafts_trees=True)

"""The default method: the union of the sources that need no model, and the draft or heads if there are any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.core.artifacts import heads_method
from foretoken.models.formats.checkpoint import load_config, resolve
from foretoken.propose.base import BuildContext, Method, Proposer
from foretoken.propose.union import Union, UnionMember, build_sources

AUTO = "auto"
COPIES: tuple[Mapping[str, Any], ...] = (
    {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    {"method": "prediction"},
)
"""No request is drafted from what another one wrote, which its speed could show."""


class Auto(Union):
    """The union whose model may also draft alone, for requests that choose its method."""

    @property
    def alone(self) -> dict[str, Proposer]:
        """The model's own proposer, by the name of its method."""
        return {self.model.name: Union([self.model], self.policy, self.model.name)} if self.model else {}


@dataclass(frozen=True, slots=True)
class AutoConfig:
    """The method has no keys: other members or options are those of a mixture."""


def around(model: UnionMember | None, build_context: BuildContext) -> Auto:
    """Returns the union of copied text and ``model``."""
    members = [*build_sources(COPIES, build_context), *([model] if model else [])]
    return Auto(members, build_context.policy, AUTO)


def build(config: AutoConfig, build_context: BuildContext) -> Auto:
    """Builds the union, around the draft or heads that "model" names if it names any."""
    if (name := build_context.model) is None:
        return around(None, build_context)
    method = heads_method(load_config(resolve(name))) or "draft_model"
    return around(UnionMember(method, build_context.member({"method": method, "model": str(name)})), build_context)


METHOD = Method(AutoConfig, build, tokens=8, drafts_trees=True, takes_draft_model=True)

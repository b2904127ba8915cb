"""The method "mixture": a union of any sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.core.checks import integer
from foretoken.core.errors import InvalidRequest
from foretoken.propose.base import BuildContext, Method
from foretoken.propose.union import Union, build_sources

_DEFAULT = ({"method": "suffix"}, {"method": "recycling"})


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """Members of the mixture.

    Attributes:
        members: Configurations as in ``speculative_config``, one per member, at most one of which is a model.
            "num_speculative_tokens" bounds a member's nodes; without it they are bounded by the step's budget.
    """

    members: Sequence[Mapping[str, Any]] = _DEFAULT

    def __post_init__(self) -> None:
        if isinstance(self.members, str | Mapping) or not self.members:
            raise InvalidRequest("members must be a list of speculative configurations, one at least")
        for member in self.members:
            if not isinstance(member, Mapping) or not isinstance(member.get("method"), str):
                raise InvalidRequest(f"a member is a speculative configuration with a 'method', got {member!r}")
            if member["method"] in ("auto", "mixture"):
                raise InvalidRequest("a mixture cannot be a member of a mixture; list its members instead")
            integer("num_speculative_tokens of a member", member.get("num_speculative_tokens"), 1, optional=True)


def build(config: MixtureConfig, build_context: BuildContext) -> Union:
    """Builds the union of the members."""
    return Union(build_sources(config.members, build_context), build_context.policy, "mixture")


METHOD = Method(MixtureConfig, build, tokens=16, drafts_trees=True)

"""How to speculate, as users write it, and the methods there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch

from foretoken.control.base import Controller
from foretoken.control.controls import Control, ControlConfig, build, most, parse
from foretoken.control.passes import Passes
from foretoken.control.tempo import Tempo
from foretoken.core.checks import integer
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Model
from foretoken.params import MAX_SPECULATIVE_TOKENS
from foretoken.propose.base import Method, Proposer, Workshop
from foretoken.propose.methods import METHODS as METHODS
from foretoken.propose.methods import NONE as NONE
from foretoken.propose.methods import check_method
from foretoken.propose.selection import Selection

_REJECTIONS = ("block", "token")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to speculate, by vLLM's names.

    method: one of ``METHODS`` or "none"; None infers it (a model: draft_model).
    model: the draft, the heads or the datastore that the method needs.
    num_speculative_tokens: drafted tokens a round, in a tree all its nodes; None takes the method's.
    rejection: ``"block"`` or ``"token"``, for drawn drafts in the distribution grade.
    control: who decides how much to draft each round: "fixed", the same number always; "goodput", what pays by
    measured time, none included; or a mapping with "name" and the controller's keys. None is "fixed" where
    num_speculative_tokens is given, else "goodput", which takes that number, if given, as the most.
    options: the method's own keys; ``of`` takes them beside the others.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    rejection: str = "block"
    control: Control | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method is not None:
            check_method(self.method)
        integer("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS, optional=True)
        if self.rejection not in _REJECTIONS:
            raise InvalidRequest(f"rejection must be 'block' or 'token', got {self.rejection!r}")
        self.own()
        if self.control is not None:
            parse(self.control)

    @classmethod
    def of(cls, value: Mapping[str, Any] | SpeculativeConfig | None) -> Self:
        """From a dict as users write it; unknown keys are an error that lists the known ones."""
        if isinstance(value, SpeculativeConfig):
            return value  # type: ignore[return-value]
        common = _common()
        given = dict(value or {})
        own = {key: given.pop(key) for key in list(given) if key not in common}
        return cls(**given, options=own)

    @property
    def method_in_force(self) -> str:
        """What ``method`` says, or what follows where it says nothing: keys or a model are a draft model's."""
        return self.method or ("draft_model" if self.model is not None or self.options else NONE)

    def own(self) -> Any:
        """The method's own configuration, None for plain decoding. Raises InvalidRequest for keys it does not have."""
        method = find(self.method_in_force)
        known = [f.name for f in fields(method.config)] if method else []
        unknown = sorted(set(self.options) - set(known))
        if unknown:
            raise InvalidRequest(
                f"unknown key(s) in speculative_config: {', '.join(unknown)}; known: {', '.join([*_common(), *known])} "
                f"(method {self.method_in_force!r})"
            )
        return method.config(**self.options) if method else None

    @property
    def control_in_force(self) -> ControlConfig:
        """What ``control`` says, or what follows where it says nothing."""
        fixed = self.num_speculative_tokens is not None or self.method_in_force == NONE
        return parse(("fixed" if fixed else "goodput") if self.control is None else self.control)

    @property
    def tokens(self) -> int:
        """Drafted tokens a round, where nothing makes it vary."""
        method = find(self.method_in_force)
        default = method.tokens if method else 0
        return default if self.num_speculative_tokens is None else self.num_speculative_tokens

    @property
    def most(self) -> int:
        """Drafted tokens of any round."""
        return most(self.control_in_force, self.tokens, self.num_speculative_tokens is not None)

    def controller(self, device: torch.device, tempo: Tempo) -> Controller:
        """What decides how much to draft, by the times in ``tempo``."""
        return build(self.control_in_force, self.most, device, tempo)


def find(name: str) -> Method | None:
    """The method with that name, None for "none"."""
    if name == NONE:
        return None
    method: Method = import_module(f"foretoken.propose.{METHODS[name]}").METHOD
    return method


@dataclass(frozen=True)
class Builder:
    """Makes proposers for one target. See ``Workshop``. passes: for the engine's ``Tempo`` as well."""

    target: Model
    tokenizer: Any
    path: Path | None
    load: Callable[[str | Path], Model]
    passes: Passes = field(default_factory=Passes)

    def build(self, config: SpeculativeConfig) -> Proposer:
        """Raises InvalidRequest or ModelLoadError for what the method cannot be made of."""
        method = find(config.method_in_force)
        if method is None:
            return Proposer()
        workshop = Workshop(self.target, self.tokenizer, self.path, config.model, self.load, self.member, self.passes)
        return method.build(config.own(), workshop)

    def member(self, config: Mapping[str, Any]) -> Proposer:
        """From a configuration as users write it."""
        return self.build(SpeculativeConfig.of(config))


def selection(
    builder: Builder, config: SpeculativeConfig, usual: Proposer, others: Sequence[str | Mapping[str, Any]]
) -> Proposer:
    """``usual`` and what else requests may choose, by the methods' names. Raises InvalidRequest for a name twice."""
    if not others:
        return usual
    members = {config.method_in_force: usual}
    for other in others:
        own = SpeculativeConfig.of({"method": other} if isinstance(other, str) else other)
        if own.method_in_force in members:
            raise InvalidRequest(f"two ways to speculate are named {own.method_in_force!r}; leave one of them out")
        members[own.method_in_force] = builder.build(own)
    return Selection(members)


def with_draft(config: SpeculativeConfig, draft_model: str | Path | None) -> SpeculativeConfig:
    """``config`` with the draft of ``draft_model=``. Raises InvalidRequest where the two disagree."""
    if draft_model is None:
        return config
    if config.model is not None and str(draft_model) != config.model:
        raise InvalidRequest(
            f"two drafts were given, draft_model={draft_model} and speculative_config's {config.model}"
        )
    if config.method not in (None, "draft_model", "vocabulary"):
        raise InvalidRequest(f"method {config.method!r} takes no draft model, but {draft_model!s} was given")
    return replace(config, method=config.method or "draft_model", model=str(draft_model))


def _common() -> list[str]:
    return [f.name for f in fields(SpeculativeConfig) if f.name != "options"]

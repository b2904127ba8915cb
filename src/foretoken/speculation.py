"""Speculative configurations as users write them, and the construction of proposers from them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import torch

from foretoken import zoo
from foretoken.control.base import Controller
from foretoken.control.config import Control, FixedConfig, GoodputConfig, build, max_tokens, parse
from foretoken.control.per_method import MethodLength, PerMethod
from foretoken.control.policy import DraftPolicy
from foretoken.core.artifacts import heads_method
from foretoken.core.checks import check_keys, integer
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.costs.model import CostModel
from foretoken.models.base import Model
from foretoken.models.formats.checkpoint import load_config, resolve
from foretoken.models.heads.published import default_drafters, known_drafters, published_drafters
from foretoken.params import MAX_SPECULATIVE_TOKENS
from foretoken.propose.adaptive import Adapt, adaptive
from foretoken.propose.base import BuildContext, Proposer
from foretoken.propose.methods import METHODS as METHODS
from foretoken.propose.methods import NONE as NONE
from foretoken.propose.methods import check_method
from foretoken.propose.methods import find as find
from foretoken.propose.per_request import PerRequestProposer
from foretoken.propose.union import AUTO as AUTO
from foretoken.propose.union import Auto, Union, UnionMember, around

_log = logging.getLogger(__name__)
_REJECTIONS = ("block", "token")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """A speculative configuration, by vLLM's names.

    Args:
        method: One of ``METHODS``, a method added by ``propose.methods.register``, or "none". None infers it: see
            ``method_in_force``, ``with_method`` and ``Builder``.
        model: The draft model, heads or datastore of the method.
        num_speculative_tokens: Draft tokens per step, all nodes of a tree included. None takes the method's default.
        rejection: ``"block"`` or ``"token"``, for sampled drafts in the distribution grade.
        control: How the draft length is chosen. "fixed" is constant. "goodput" maximizes tokens per measured second,
            and may choose 0. A mapping has "name" and the controller's keys. None is "fixed" where
            num_speculative_tokens is given, else "goodput". A given number is the maximum of "goodput".
        adapt: Whether, or in which share of the idle time, the draft model or head learns from verified tokens; or keys
            of ``AdaptConfig``.
        options: The method's own keys. ``of`` accepts them beside the others.

    Raises:
        InvalidRequest: A value or key is not valid.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    rejection: str = "block"
    control: Control | None = None
    adapt: Adapt = False
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
    def of(cls, value: "Mapping[str, Any] | SpeculativeConfig | None") -> Self:
        """Returns a configuration from a dict. Unknown keys raise InvalidRequest, which lists the known ones."""
        if isinstance(value, SpeculativeConfig):
            return value  # type: ignore[return-value]
        common = _common()
        keys = dict(value or {})
        own = {key: keys.pop(key) for key in list(keys) if key not in common}
        return cls(**keys, options=own)

    @property
    def method_in_force(self) -> str:
        """``method``, or its inferred value: "draft_model" for a draft model with other keys, else "auto"."""
        if self.method is not None:
            return self.method
        if self.options:
            return "draft_model"
        adapts = self.num_speculative_tokens is None and self._adapts
        return AUTO if self.model is None or adapts else "draft_model"

    @property
    def unmixed(self) -> Self:
        """The same where no mixture can be: a draft model without a method drafts by "draft_model"."""
        return replace(self, method="draft_model") if self.method is None and self.model is not None else self

    @property
    def _adapts(self) -> bool:
        """Whether ``control``, where it is given, chooses the draft length."""
        return self.control is None or isinstance(parse(self.control), GoodputConfig)

    def own(self) -> Any:
        """Returns the method's own configuration, None for plain decoding. Raises InvalidRequest for unknown keys."""
        method = find(self.method_in_force)
        known = [f.name for f in fields(method.config)] if method else []
        note = f" (method {self.method_in_force!r})"
        check_keys("speculative_config", self.options, known, common=_common(), note=note)
        return method.config(**self.options) if method else None

    @property
    def control_in_force(self) -> FixedConfig:
        """``control``, or its default."""
        fixed = self.num_speculative_tokens is not None or self.method_in_force == NONE
        return parse(("fixed" if fixed else "goodput") if self.control is None else self.control)

    @property
    def has_constant_length(self) -> bool:
        """Whether every draft has the configured length, which no controller shortens."""
        control = self.control_in_force
        return not (isinstance(control, GoodputConfig) or control.guard)

    @property
    def tokens(self) -> int:
        """Draft tokens per step of a fixed draft length."""
        method = find(self.method_in_force)
        default = method.tokens if method else 0
        return default if self.num_speculative_tokens is None else self.num_speculative_tokens

    @property
    def max_tokens(self) -> int:
        """Largest number of draft tokens per step."""
        return max_tokens(self.control_in_force, self.tokens, self.num_speculative_tokens is not None)


@dataclass(frozen=True)
class Builder:
    """Makes proposers for one target, see ``BuildContext``, and the controller of its engine."""

    target: Model
    tokenizer: Any
    path: Path | None
    load: Callable[..., Model]
    policy: DraftPolicy = field(default_factory=DraftPolicy)

    @property
    def costs(self) -> CostModel:
        """The cost model of the policy."""
        return self.policy.costs

    def build(self, config: SpeculativeConfig) -> Proposer:
        """Returns the proposer of a configuration. Raises InvalidRequest or ModelLoadError."""
        method = find(config.method_in_force)
        proposer = Proposer() if method is None else method.build(config.own(), self._context(config.model))
        return proposer if config.adapt is False else adaptive(proposer, config.model, config.adapt)

    def build_default(self, config: SpeculativeConfig) -> tuple[SpeculativeConfig, Proposer, str]:
        """Returns ``build`` and its configuration; if nothing is configured, with the target's default heads.

        These are heads that the target ships, or a bundled head of that target, which the last value names in a line;
        else it is "". Heads that do not load are skipped.
        """
        if config.method is None and config.model is None and not config.options and self.path is not None:
            for default in default_drafters(self.path):
                own = replace(config, method=default.method, model=default.model)
                try:
                    head = self.build(own)
                    if config.has_constant_length:
                        return own, head, default.line
                    return config, around(UnionMember(default.method, head), self._context(None)), default.line
                except (InvalidRequest, ModelLoadError) as reason:
                    _log.warning("%s has heads of the method %r, which are skipped: %s", self.path, own.method, reason)
        return config, self.build(config), ""

    def _context(self, model: str | None) -> BuildContext:
        return BuildContext(self.target, self.tokenizer, self.path, model, self.load, self.member, self.policy)

    def member(self, config: Mapping[str, Any]) -> Proposer:
        """Returns the proposer of a configuration in the form of a dict."""
        return self.build(SpeculativeConfig.of(config))


@dataclass(frozen=True)
class LoadedMethods:
    """The methods that requests may choose among."""

    proposer: Proposer  # drafts for every request
    configs: Mapping[str, SpeculativeConfig]  # configuration of each method by its name, the default first

    @property
    def adaptive(self) -> str | None:
        """The first method whose draft length is chosen by measured seconds; None if there is none."""
        return next((n for n, c in self.configs.items() if isinstance(c.control_in_force, GoodputConfig)), None)

    def member(self, name: str) -> Proposer:
        """Returns the proposer of one method."""
        return self.proposer.members[name] if isinstance(self.proposer, PerRequestProposer) else self.proposer

    def controller(self, device: torch.device, policy: DraftPolicy) -> Controller:
        """Returns the controller, which gives each request the draft length of its method."""
        chosen, configs = self.proposer, list(self.configs.values())
        charged = next((config for config in configs if config.control_in_force.guard), configs[0])
        config = charged if self.adaptive is None else self.configs[self.adaptive]
        inner = build(config.control_in_force, max(c.max_tokens for c in configs), device, policy)
        if not isinstance(chosen, PerRequestProposer):
            return inner
        lengths = {
            name: MethodLength(config.max_tokens, config.has_constant_length) for name, config in self.configs.items()
        }
        return PerMethod(inner, lengths, chosen.of, lambda: chosen.usual)


def load_methods(
    builder: Builder,
    config: SpeculativeConfig,
    default: Proposer,
    others: Sequence[str | Mapping[str, Any]],
    guard: Callable[[Proposer], Proposer] = lambda proposer: proposer,
) -> LoadedMethods:
    """Builds further methods, so that each request may choose between ``default`` and them by their names.

    Args:
        builder: Builds the other proposers.
        config: Configuration of ``default``. Methods that set neither a draft length nor a control have the one that it
            sets.
        default: The proposer of requests that choose none. Requests may also choose the model of an ``Auto`` alone.
        others: Names or configurations of other methods. A name alone of what is loaded adds nothing: which one the
            default is may depend on how long a pass takes.
        guard: Is applied to every proposer.

    Raises:
        InvalidRequest: Two methods have the same name.
    """

    def joined(proposer: Proposer, config: SpeculativeConfig) -> Proposer:
        """Returns a proposer whose drafts the policy bounds, if it decides their length."""
        plain = config.method_in_force == NONE or config.has_constant_length
        return proposer if plain else Union.of(proposer, builder.policy)

    members, configs = {config.method_in_force: joined(default, config)}, {config.method_in_force: config}
    parts = default.alone if isinstance(default, Auto) else {}
    configs |= {name: replace(config, method=name) for name in parts}
    for other in others:
        own = SpeculativeConfig.of({"method": other} if isinstance(other, str) else other)
        name = own.method_in_force
        if name not in configs:
            inherits = own.num_speculative_tokens is None and own.control is None
            tokens, control = config.num_speculative_tokens, config.control
            configs[name] = replace(own, num_speculative_tokens=tokens, control=control) if inherits else own
            members[name] = joined(builder.build(own), configs[name])
        elif own != SpeculativeConfig(method=name):
            raise InvalidRequest(f"two ways to speculate are named {name!r}; leave one of them out")
    if not others and not parts:
        return LoadedMethods(guard(members[config.method_in_force]), configs)
    guarded = {name: guard(member) for name, member in members.items()}
    proposer = PerRequestProposer(guarded, {name: guard(part) for name, part in parts.items()})
    return LoadedMethods(proposer, {name: configs[name] for name in proposer.members})


def with_draft(config: SpeculativeConfig, draft_model: str | Path | None) -> SpeculativeConfig:
    """Returns ``config`` with the model of ``draft_model=``. Raises InvalidRequest where the two disagree."""
    if draft_model is None:
        return config
    if config.model is not None and str(draft_model) != config.model:
        raise InvalidRequest(
            f"two drafts were given, draft_model={draft_model} and speculative_config's {config.model}"
        )
    method = None if config.method is None else find(config.method)
    if method is not None and not method.takes_draft_model:
        raise InvalidRequest(f"method {config.method!r} takes no draft model, but {draft_model!s} was given")
    return replace(config, model=str(draft_model))


def with_published(config: SpeculativeConfig, target: str | Path) -> tuple[SpeculativeConfig, str]:
    """Returns ``config`` with the best published drafter on this machine in the place of the model "auto".

    Args:
        config: A configuration. Its method, if it names one, restricts the drafters. The name of a bundled model is
            replaced by its folder.
        target: Folder or GGUF file of the target.

    Returns:
        The configuration, and a line on the choice, if any. Without a drafter on this machine there is no model, and a
        warning says which drafters there are and how to download one. Raises ModelLoadError for a damaged target.
    """
    if config.model is None or Path(config.model).exists():
        return config, ""
    if config.model != AUTO:
        bundled = {model.name: str(model.path) for model in zoo.list_models()}
        return replace(config, model=bundled.get(config.model, config.model)), ""
    found = published_drafters(target, None if config.method == AUTO else config.method)
    chosen = next((drafter for drafter in found if drafter.path is not None), None)
    if chosen is None:
        _log.warning("no drafter of %s is bundled or in the hub's cache; %s", target, known_drafters(found))
        return replace(config, model=None), ""
    if not chosen.row.in_target:
        return replace(config, model=str(chosen.path)), chosen.line
    fixed = config.options or config.method == chosen.row.method
    return replace(config, model=None, method=chosen.row.method if fixed else None), chosen.line


def with_method(config: SpeculativeConfig) -> SpeculativeConfig:
    """Returns ``config`` with the method of the heads that it names, if it names heads, no method, and a draft length.

    Heads that adapt have a method, too. Raises ModelLoadError if there is no such model.
    """
    mixed = config.method_in_force == AUTO and not config.options and config.adapt is False
    if config.method is not None or config.model is None or mixed:
        return config
    return replace(config, method=heads_method(load_config(resolve(config.model))))


def _common() -> list[str]:
    return [f.name for f in fields(SpeculativeConfig) if f.name != "options"]

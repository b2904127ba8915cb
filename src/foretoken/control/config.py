"""The controllers by the names that users write, and their configurations."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from foretoken.control.base import Controller
from foretoken.control.fixed import Fixed
from foretoken.control.ledger import Ledger
from foretoken.control.memory import MemoryWatch
from foretoken.control.policy import DraftPolicy
from foretoken.core.checks import check_keys, integer, number
from foretoken.core.devices import FreeMemory
from foretoken.core.errors import InvalidRequest
from foretoken.params import MAX_SPECULATIVE_TOKENS

Control = str | Mapping[str, Any]
_MAX_TOKENS = 16  # default maximum of goodput


@dataclass(frozen=True, slots=True)
class FixedConfig:
    """A constant draft length.

    Attributes:
        allowance: Share of all time that drafting may lose under the guard.
        guard: Keep a ledger, so that drafting is never slower than plain decoding beyond the allowance.
        memory: Shorten drafts while memory is short.
    """

    allowance: float = 0.01
    guard: bool = False
    memory: bool = True

    def __post_init__(self) -> None:
        number("allowance", self.allowance, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class GoodputConfig(FixedConfig):
    """The draft length with the most expected tokens per second.

    Attributes:
        max_tokens: Largest draft length. None is 16, or the method's default if that is more.
    """

    max_tokens: int | None = None
    guard: bool = True

    def __post_init__(self) -> None:
        FixedConfig.__post_init__(self)
        integer("max_tokens of control", self.max_tokens, 1, MAX_SPECULATIVE_TOKENS, optional=True)


CONTROLS: dict[str, type[FixedConfig]] = {"fixed": FixedConfig, "goodput": GoodputConfig}


def parse(control: Control) -> FixedConfig:
    """Returns the configuration of a name, or of a mapping with ``name`` and the controller's keys.

    Raises:
        InvalidRequest: The name or a key is unknown, or a value is not valid.
    """
    given = {"name": control} if isinstance(control, str) else dict(control) if isinstance(control, Mapping) else {}
    name = given.pop("name", None)
    if not isinstance(name, str) or name not in CONTROLS:
        raise InvalidRequest(f"control must be, or have as its 'name', one of {', '.join(CONTROLS)}, got {control!r}")
    config = CONTROLS[name]
    check_keys("control", given, [f.name for f in fields(config)], common=["name"])
    for key in ("guard", "memory"):
        if not isinstance(given.get(key, True), bool):
            raise InvalidRequest(f"{key} of control must be true or false, got {given[key]!r}")
    return config(**given)


def max_tokens(config: FixedConfig, tokens: int, given: bool) -> int:
    """Returns the largest number of draft tokens per step.

    Args:
        config: The controller's configuration.
        tokens: The configured number where ``given``, else the method's default.
        given: Whether the user configured the number.
    """
    if not isinstance(config, GoodputConfig) or given:
        return tokens
    return config.max_tokens or max(tokens, _MAX_TOKENS if tokens else 0)


def build(config: FixedConfig, tokens: int, device: torch.device, policy: DraftPolicy) -> Controller:
    """Returns the controller of a configuration: ``policy`` within its bounds, or a constant draft length.

    Args:
        config: Its configuration.
        tokens: Draft tokens per step, at most.
        device: Device of the models, whose memory is watched.
        policy: The draft policy.
    """
    memory = MemoryWatch(tokens, FreeMemory(device)) if config.memory else None
    ledger = Ledger(config.allowance) if config.guard else None
    adaptive = isinstance(config, GoodputConfig)
    policy.bound(tokens, ledger, memory, constant=not adaptive)
    return policy if adaptive or ledger else Fixed(tokens, memory)

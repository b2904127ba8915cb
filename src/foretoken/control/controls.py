"""The controllers by the names that users write, each with its own small configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from foretoken.control.base import Controller
from foretoken.control.doze import Doze
from foretoken.control.fixed import Fixed
from foretoken.control.goodput import Goodput
from foretoken.control.guard import Guard, GuardConfig
from foretoken.control.memory import Free, MemoryWatch
from foretoken.control.tempo import Tempo
from foretoken.core.checks import integer
from foretoken.core.errors import InvalidRequest
from foretoken.params import MAX_SPECULATIVE_TOKENS

Control = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FixedConfig(GuardConfig):
    """The same number of nodes every round. guard: never slower. memory: drafting gives way when memory is short."""

    guard: bool = False
    memory: bool = True


@dataclass(frozen=True, slots=True)
class GoodputConfig(GuardConfig):
    """As many nodes as pay, ``max_tokens`` at most; guard, memory: as for a fixed number."""

    max_tokens: int | None = None
    guard: bool = True
    memory: bool = True

    def __post_init__(self) -> None:
        GuardConfig.__post_init__(self)
        integer("max_tokens of control", self.max_tokens, 1, MAX_SPECULATIVE_TOKENS, optional=True)


ControlConfig = FixedConfig | GoodputConfig
CONTROLS: dict[str, type[FixedConfig] | type[GoodputConfig]] = {"fixed": FixedConfig, "goodput": GoodputConfig}
_MOST = 16  # nodes that are tried where nobody says how many


def parse(control: Control) -> ControlConfig:
    """A name, or a mapping with ``name`` and the controller's own keys. Raises InvalidRequest."""
    given = {"name": control} if isinstance(control, str) else dict(control) if isinstance(control, Mapping) else {}
    name = given.pop("name", None)
    if not isinstance(name, str) or name not in CONTROLS:
        raise InvalidRequest(f"control must be, or have as its 'name', one of {', '.join(CONTROLS)}, got {control!r}")
    config = CONTROLS[name]
    known = [f.name for f in fields(config)]
    if unknown := sorted(map(str, set(given) - set(known))):
        raise InvalidRequest(f"unknown key(s) in control: {', '.join(unknown)}; known: {', '.join(['name', *known])}")
    for key in ("guard", "memory"):
        if not isinstance(given.get(key, True), bool):
            raise InvalidRequest(f"{key} of control must be true or false, got {given[key]!r}")
    return config(**given)


def most(config: ControlConfig, tokens: int, given: bool) -> int:
    """Nodes a round at most. tokens: the configured number where ``given``, else the method's own."""
    if isinstance(config, FixedConfig) or given:
        return tokens
    return config.max_tokens or max(tokens, _MOST if tokens else 0)


def build(config: ControlConfig, nodes: int, device: torch.device, tempo: Tempo) -> Controller:
    """nodes: a round's, or the most of it."""
    controller: Controller = Fixed(nodes) if isinstance(config, FixedConfig) else Goodput(nodes, tempo)
    if config.guard:
        controller = Guard(controller, tempo, config)
    if config.memory:
        controller = MemoryWatch(controller, Free(device))
    return Doze(controller) if config.guard or isinstance(config, GoodputConfig) else controller

"""The target's own first layers draft (LayerSkip, 2404.16710): no second model, and no second copy of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.core.checks import integer
from foretoken.core.errors import InvalidRequest
from foretoken.models.checkpoint import resolve
from foretoken.models.decoder import Decoder
from foretoken.models.early_exit import EarlyExit, Exit
from foretoken.propose.base import Method, Workshop
from foretoken.propose.draft_model import DraftModel, DraftModelConfig


@dataclass(frozen=True, slots=True)
class EarlyExitConfig(DraftModelConfig):
    """As a draft model's.

    exit_layer: layers of the draft; None takes those that the trained exit under "model" has, or half of the target's.
    """

    exit_layer: int | None = None

    def __post_init__(self) -> None:
        DraftModelConfig.__post_init__(self)
        integer("exit_layer", self.exit_layer, 1, optional=True)


def build(config: EarlyExitConfig, workshop: Workshop) -> DraftModel:
    """The target's first layers, with the trained exit that "model" names or the target's own norm and head."""
    target = workshop.target
    if not isinstance(target, Decoder):
        raise InvalidRequest(
            "method 'early_exit' shares weights with the target inside our own runtime, which does not compute this "
            "target; use another method"
        )
    leaving = Exit(config.exit_layer or max(1, target.num_layers // 2))
    if workshop.model is not None:
        leaving = Exit.load(resolve(workshop.model))
        if config.exit_layer not in (None, leaving.layers):
            raise InvalidRequest(
                f"exit_layer is {config.exit_layer}, but {workshop.model} was trained for {leaving.layers}; "
                "leave it out"
            )
    proposer = DraftModel(EarlyExit(target, leaving), config)
    proposer.name = "early_exit"
    return proposer


METHOD = Method(EarlyExitConfig, build)

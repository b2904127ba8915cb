"""The target's own first layers draft (LayerSkip, 2404.16710), with no second model and no copy of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.core.checks import integer
from foretoken.core.errors import InvalidRequest
from foretoken.models.decoder import Decoder
from foretoken.models.early_exit import EarlyExit, Exit
from foretoken.models.formats.checkpoint import resolve
from foretoken.propose.base import BuildContext, Method
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.growers import refuse_window


@dataclass(frozen=True, slots=True)
class EarlyExitConfig(DraftModelConfig):
    """The keys of a draft model, and the exit layer.

    Attributes:
        exit_layer: Number of layers of the draft. None takes that of the trained exit under "model", or half of the
            target's.
    """

    exit_layer: int | None = None

    def __post_init__(self) -> None:
        DraftModelConfig.__post_init__(self)
        refuse_window(self.draft_window)
        integer("exit_layer", self.exit_layer, 1, optional=True)


def build(config: EarlyExitConfig, build_context: BuildContext) -> DraftModel:
    """Builds the proposer from the trained exit that "model" names, or the target's own norm and head."""
    target = build_context.target
    if not isinstance(target, Decoder):
        raise InvalidRequest(
            "method 'early_exit' shares weights with the target inside our own runtime, which does not compute this "
            "target; use another method"
        )
    exit_head = Exit(config.exit_layer or max(1, target.num_layers // 2))
    if build_context.model is not None:
        exit_head = Exit.load(resolve(build_context.model))
        if config.exit_layer not in (None, exit_head.layers):
            raise InvalidRequest(
                f"exit_layer is {config.exit_layer}, but {build_context.model} was trained for {exit_head.layers}; "
                "leave it out"
            )
    proposer = DraftModel(EarlyExit(target, exit_head), config)
    proposer.name = "early_exit"
    return proposer


METHOD = Method(EarlyExitConfig, build, takes_draft_model=True)

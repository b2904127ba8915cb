"""Assistants of Gemma 4: a small stack of layers that reads the target's keys and values drafts a chain or a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.context import Context
from foretoken.models.base import Scores
from foretoken.models.heads.assistant_loading import load_assistant
from foretoken.models.heads.assistant_net import AssistantHandle, AssistantNet
from foretoken.propose.base import BuildContext, Method
from foretoken.propose.growers import GrowthConfig, TreeKind, refuse_window
from foretoken.propose.hidden_states import HiddenStateProposer


@dataclass(frozen=True, slots=True)
class AssistantGrowth(GrowthConfig):
    """Growth of the assistant's drafts, as of EAGLE's."""

    tree: TreeKind = "sampled"
    top_k: int = 8

    def __post_init__(self) -> None:
        GrowthConfig.__post_init__(self)
        refuse_window(self.draft_window)


class Assistant(HiddenStateProposer):
    """Drafts with an assistant from the target's last hidden state and its KV cache.

    Args:
        layers: Number of layers of the target, whose normed output is tapped.
    """

    def __init__(self, net: AssistantNet, layers: int, config: AssistantGrowth | None = None) -> None:
        super().__init__("assistant", net, (layers,), config or AssistantGrowth())

    def _keep(self, context: Context, scores: Scores, rows: Sequence[int]) -> None:
        """Keeps the states at committed tokens, and where the target has their keys and values."""
        super()._keep(context, scores, rows)
        handle = self._handles.get(context.id)
        if isinstance(handle, AssistantHandle):
            handle.slot, handle.place = scores.slot, len(context.tokens) - 1


def build(config: AssistantGrowth, build_context: BuildContext) -> Assistant:
    """Builds the proposer from the assistant that "model" names, or the one that comes with the target."""
    target = build_context.target
    return Assistant(load_assistant(target, build_context.model, build_context.path), target.num_layers, config)


METHOD = Method(AssistantGrowth, build, tokens=8, drafts_trees=True, takes_draft_model=True)

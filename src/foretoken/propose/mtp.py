"""Layers that read the target's last hidden state and the next token's embedding, chained for further tokens.

Multi-token prediction (DeepSeek-V3, 2412.19437): layers that ship inside the target's checkpoint. Assistants of Gemma 4
also read the target's keys and values. Trees grow as EAGLE's do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.context import Context
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Scores
from foretoken.models.heads.assistant import AssistantHandle, AssistantNet
from foretoken.models.heads.feature_net import DraftNet
from foretoken.models.heads.loading import load_assistant, load_mtp
from foretoken.propose.base import BuildContext, Method
from foretoken.propose.growers import GrowthConfig, TreeKind, refuse_window
from foretoken.propose.hidden_states import HeadGrowth, HiddenStateProposer

_PLACES = {None: None, "after_norm": True, "before_norm": False}


@dataclass(frozen=True, slots=True)
class MtpConfig(HeadGrowth):
    """Growth of the drafts, and which hidden states the layer reads."""

    # the target's last hidden states: "after_norm" or "before_norm"; None measures both on loading
    hidden_states: str | None = None
    chained_states: str | None = None  # the layer's own output where it is chained: the same

    def __post_init__(self) -> None:
        HeadGrowth.__post_init__(self)
        for name in ("hidden_states", "chained_states"):
            if getattr(self, name) not in _PLACES:
                raise InvalidRequest(f"{name} must be 'after_norm' or 'before_norm', got {getattr(self, name)!r}")


class Mtp(HiddenStateProposer):
    """Drafts with MTP layers."""

    def __init__(self, net: DraftNet, taps: Sequence[int], config: MtpConfig | None = None) -> None:
        super().__init__("mtp", net, taps, config or MtpConfig())


def build(config: MtpConfig, build_context: BuildContext) -> Mtp:
    loaded = load_mtp(
        build_context.target,
        build_context.tokenizer,
        build_context.model,
        build_context.path,
        _PLACES[config.hidden_states],
        _PLACES[config.chained_states],
        config.draft_window,
    )
    return Mtp(loaded.net, loaded.taps, config)


METHOD = Method(MtpConfig, build, tokens=8, drafts_trees=True, takes_draft_model=True)


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


def build_assistant(config: AssistantGrowth, build_context: BuildContext) -> Assistant:
    target = build_context.target
    return Assistant(load_assistant(target, build_context.model, build_context.path), target.num_layers, config)


ASSISTANT = Method(AssistantGrowth, build_assistant, tokens=8, drafts_trees=True, takes_draft_model=True)

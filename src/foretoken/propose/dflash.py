"""DFlash (2602.06036): one pass of a small network on the target's hidden states predicts a block of tokens.

Its distributions are independent by position. A chain or a tree sampled from them is verified with the distribution
of each token, so the output is exact; but tokens sampled independently often do not follow each other, so by default
the likeliest paths are drafted as fixed candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from foretoken.core.context import Context
from foretoken.models.heads.block_net import BlockNet
from foretoken.models.heads.loading import load_block
from foretoken.propose.base import BuildContext, Method
from foretoken.propose.growers import GrowthConfig, TreeKind
from foretoken.propose.hidden_states import HiddenStateProposer


@dataclass(frozen=True, slots=True)
class DFlashConfig(GrowthConfig):
    """Growth of the head's drafts, at most as deep as its block."""

    tree: TreeKind = "top_k"
    top_k: int = 8


class BlockProposer(HiddenStateProposer):
    """Drafts with a block drafter: one pass for each draft, whatever its depth."""

    net: BlockNet

    def __init__(self, name: str, net: BlockNet, taps: Sequence[int], config: GrowthConfig) -> None:
        steps = net.head.depth if config.num_steps is None else min(config.num_steps, net.head.depth)
        super().__init__(name, net, taps, replace(config, num_steps=steps))

    def _ready(self, context: Context, budget: int) -> bool:
        fits = len(context.tokens) + self.net.head.block <= self.net.max_length
        return fits and super()._ready(context, budget)


def build(role: str, config: DFlashConfig, build_context: BuildContext) -> BlockProposer:
    """Builds the proposer of a "dflash" or "jetspec" head: the one that "model" names, or the target's."""
    model, path = build_context.model, build_context.path
    loaded = load_block(role, build_context.target, model, path, config.draft_window)
    return BlockProposer(role, loaded.net, loaded.taps, config)


METHOD = Method(DFlashConfig, partial(build, "dflash"), tokens=8, drafts_trees=True, takes_draft_model=True)

"""Block drafters: one pass of a small network on the target's hidden states predicts a block of tokens.

DFlash (2602.06036): distributions are independent by position. A chain or a tree sampled from them is verified with the
distribution of each token, so the output is exact; but tokens sampled independently often do not follow each other, so
by default the likeliest paths are drafted as fixed candidates.

JetSpec (2606.18394): rows see no later rows of their block, trained with forward KL. As in the published code, a row
reads mask tokens in the place of the tokens drafted before it, so a draft is made as DFlash's.

DSpark (2607.05147): a Markov head makes each token depend on the one drafted before it. A draft costs one pass and
small products. The confidence head estimates the acceptance of each token before it is sampled, so a chain can end
where it would hardly be accepted, and the output stays exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from foretoken.core.checks import number
from foretoken.core.context import Context
from foretoken.core.errors import InvalidRequest
from foretoken.models.chains import DraftStop
from foretoken.models.heads.block_net import BlockHandle, BlockNet
from foretoken.models.heads.feature_net import HeadHandle
from foretoken.models.heads.loading import load_block
from foretoken.propose.base import BuildContext, Method
from foretoken.propose.growers import Grower, GrowthConfig, TreeKind
from foretoken.propose.hidden_states import HeadGrowth, HiddenStateProposer


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


JETSPEC = replace(METHOD, build=partial(build, "jetspec"))


@dataclass(frozen=True, slots=True)
class DSparkConfig(HeadGrowth):
    """Growth of the head's drafts, at most as deep as its block."""

    # a chain ends where the estimated probability that it is accepted so far is below this; 0 never ends it
    confidence_threshold: float = 0.0

    def __post_init__(self) -> None:
        HeadGrowth.__post_init__(self)
        number("confidence_threshold", self.confidence_threshold, 0.0, 1.0)
        if self.confidence_threshold and self.tree != "chain":
            raise InvalidRequest(f"confidence_threshold ends chains, and tree is {self.tree!r}; leave one of them out")


class DSpark(BlockProposer):
    """Drafts with a DSpark head.

    A chain ends by the product of the head's confidences. An estimate reads the block's states and the token before,
    never the token that will be sampled (non-anticipation).
    """

    config: DSparkConfig

    def __init__(self, net: BlockNet, taps: Sequence[int], config: DSparkConfig | None = None) -> None:
        super().__init__("dspark", net, taps, config or DSparkConfig())
        threshold = self.config.confidence_threshold
        self._stop = DraftStop(net.confidence, threshold, hidden=True) if threshold else None

    def ends_early(self, context: Context) -> bool:
        return super().ends_early(context) or (self._stop is not None and self.net.adapts_levels)

    def _grower(self, context: Context, budget: int, stop: DraftStop | None = None) -> Grower:
        return super()._grower(context, budget, stop or self._stop)

    def _hidden(self, handle: HeadHandle) -> Tensor | None:
        if self._stop is None:
            return None
        assert isinstance(handle, BlockHandle) and handle.states is not None
        return handle.states[len(handle.nodes)][None]


def build_dspark(config: DSparkConfig, build_context: BuildContext) -> DSpark:
    model, path = build_context.model, build_context.path
    loaded = load_block("dspark", build_context.target, model, path, config.draft_window)
    if config.confidence_threshold and not loaded.net.head.confident:
        raise InvalidRequest("confidence_threshold needs a head with confidence_head.proj, and this one has none")
    return DSpark(loaded.net, loaded.taps, config)


DSPARK = Method(DSparkConfig, build_dspark, tokens=8, drafts_trees=True, takes_draft_model=True)

"""Blockwise parallel decoding (1811.03115): each head predicts one of the next positions, together a chain."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.models.heads.blockwise import read_blockwise
from foretoken.models.heads.files import find_head
from foretoken.models.heads.loading import check_width
from foretoken.models.heads.parallel import BlockwiseNet
from foretoken.propose.base import BuildContext, Method
from foretoken.propose.medusa import MedusaConfig, Parallel


@dataclass(frozen=True, slots=True)
class BlockwiseConfig(MedusaConfig):
    """As ``MedusaConfig``; by default the paper's chain, with a larger ``top_k`` a tree."""

    top_k: int = 1


def build(config: BlockwiseConfig, build_context: BuildContext) -> Parallel:
    """Builds the proposer from the heads that "model" names, or those that come with the target."""
    target = build_context.target
    folder = find_head("blockwise", build_context.model, build_context.path)
    heads = read_blockwise(folder)
    check_width("blockwise checkpoint", folder, heads.hidden, target)
    net = BlockwiseNet(heads, target.dtype, target.device, target.unembed)
    return Parallel("blockwise", net, target.num_layers, config)


METHOD = Method(BlockwiseConfig, build, drafts_trees=True, takes_draft_model=True)

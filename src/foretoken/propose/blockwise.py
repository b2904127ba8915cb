"""Blockwise parallel decoding (1811.03115): heads guess one of the next places each, together a chain."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.models.heads.blockwise import read_blockwise
from foretoken.models.heads.files import find_head
from foretoken.models.heads.loading import check_width
from foretoken.models.heads.parallel import BlockwiseNet
from foretoken.propose.base import Method, Workshop
from foretoken.propose.medusa import MedusaConfig, Parallel


@dataclass(frozen=True, slots=True)
class BlockwiseConfig(MedusaConfig):
    """As ``MedusaConfig``; the chain of the paper unless ``top_k`` asks for a tree."""

    top_k: int = 1


def build(config: BlockwiseConfig, workshop: Workshop) -> Parallel:
    """The heads that "model" names, or those that come with the target."""
    target = workshop.target
    folder = find_head("blockwise", workshop.model, workshop.path)
    heads = read_blockwise(folder)
    check_width("blockwise checkpoint", folder, heads.hidden, target)
    net = BlockwiseNet(heads, target.dtype, target.device, target.unembed)
    return Parallel("blockwise", net, target.num_layers, config)


METHOD = Method(BlockwiseConfig, build)

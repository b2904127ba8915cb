"""EAGLE (2401.15077, 2406.16858, 2503.01840): a small head on the target's hidden states drafts a dynamic tree.

Candidates are ranked as in EAGLE-2. For requests that sample, they are drawn, so that verification can use the
distribution that they were drawn from. In the trajectory grade they lead the race with the noise that the target will
use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.models.heads.eagle_net import EagleNet
from foretoken.models.heads.loading import load_eagle
from foretoken.models.heads.taps import TapConvention
from foretoken.propose.base import BuildContext, Method
from foretoken.propose.growers import GrowthConfig, TreeKind
from foretoken.propose.hidden_states import HiddenStateProposer


@dataclass(frozen=True, slots=True)
class EagleConfig(GrowthConfig):
    """Growth of the head's drafts: by default trees with drawn siblings, which had the highest acceptance for sampled
    requests.
    """

    tree: TreeKind = "sampled"
    top_k: int = 8


class Eagle(HiddenStateProposer):
    """Drafts with an EAGLE head.

    Args:
        reading: How the head's layer ids were interpreted, if that had to be measured.
    """

    def __init__(
        self,
        net: EagleNet,
        taps: Sequence[int],
        config: EagleConfig | None = None,
        reading: TapConvention | None = None,
    ) -> None:
        super().__init__("eagle3" if net.joined else "eagle", net, taps, config or EagleConfig())
        self.reading = reading


def build(config: EagleConfig, build_context: BuildContext) -> Eagle:
    """Builds the proposer from the head that "model" names, or the one that comes with the target."""
    loaded = load_eagle(build_context.target, build_context.tokenizer, build_context.model, build_context.path)
    return Eagle(loaded.net, loaded.taps, config, loaded.convention)


METHOD = Method(EagleConfig, build, tokens=8, drafts_trees=True)

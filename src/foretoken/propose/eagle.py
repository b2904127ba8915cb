"""EAGLE (2401.15077, 2406.16858, 2503.01840): a small head on the target's hidden states drafts a dynamic tree.

Candidates are ranked as in EAGLE-2. For requests that sample, they are sampled, so that verification can use the
distribution that they were sampled from. In the trajectory grade they lead the race with the noise that the target will
use.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.heads.eagle import EagleNet
from foretoken.models.heads.feature_net import HeadHandle
from foretoken.models.heads.loading import load_eagle
from foretoken.propose.base import BuildContext, Method
from foretoken.propose.chain import draft_at_once
from foretoken.propose.growers import Grower, grow_at_once
from foretoken.propose.hidden_states import HeadGrowth, HiddenStateProposer


@dataclass(frozen=True, slots=True)
class EagleConfig(HeadGrowth):
    """Growth of the head's drafts."""

    # whether the head predicts all positions in one pass; None for heads that were trained for it
    parallel_drafting: bool | None = None


class Eagle(HiddenStateProposer):
    """Drafts with an EAGLE head."""

    net: EagleNet

    def __init__(self, net: EagleNet, taps: Sequence[int], config: EagleConfig | None = None) -> None:
        super().__init__("eagle3" if net.joined else "eagle", net, taps, config or EagleConfig())


class ParallelEagle(Eagle):
    """Drafts all levels in one pass (P-EAGLE): mask tokens with a learned feature stand for those not drafted yet."""

    def __init__(self, net: EagleNet, taps: Sequence[int], config: EagleConfig | None = None) -> None:
        net.mask = net.mask_row()
        net.foresees = True
        super().__init__(net, taps, config)

    def _grow(self, active: Sequence[tuple[HeadHandle, Grower]], levels: Iterable[int]) -> list[Draft]:
        assert self.net.mask is not None
        drafts = draft_at_once(self.net, active, self.net.vocab_size)
        left = [(*pair, depth) for pair, depth, draft in zip(active, levels, drafts, strict=True) if draft is None]
        if left:
            masks = [Draft.chain([self.net.mask.token] * (depth - 1)) for *_, depth in left]
            rows = self.net.look_ahead([handle for handle, *_ in left], masks)
            for (_, grower, _), logits in zip(left, rows, strict=True):
                grow_at_once(grower, logits)
        return [grower.draft() if draft is None else draft for draft, (_, grower) in zip(drafts, active, strict=True)]


def build(config: EagleConfig, build_context: BuildContext) -> Eagle:
    target, model = build_context.target, build_context.model
    loaded = load_eagle(target, build_context.tokenizer, model, build_context.path, config.draft_window)
    able = loaded.net.head.mask_token is not None
    if config.parallel_drafting and not able:
        raise InvalidRequest(
            "parallel_drafting needs an EAGLE-3 head that was trained for it (P-EAGLE), with the tensor 'mask_hidden' "
            "and a pard_token in its config.json; leave it out, or take another head"
        )
    kind = ParallelEagle if able and config.parallel_drafting is not False else Eagle
    return kind(loaded.net, loaded.taps, config)


METHOD = Method(EagleConfig, build, tokens=8, drafts_trees=True, takes_draft_model=True)

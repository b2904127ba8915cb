"""Typical acceptance (Medusa, 2401.10774, section 2.3.1). LOSSY: the output does not follow the target's distribution.

It is used only for requests that name it, and their outputs are labelled with it.
"""

import torch

from foretoken.core.draft import Draft
from foretoken.core.streams import Stream
from foretoken.core.verdict import Verdict
from foretoken.verify.rows import Probs, dense, reached

EPSILON = 0.09
DELTA = 0.3


def verify(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
    """Accepts nodes with p(x) > min(EPSILON, DELTA exp(-H(p))), H in nats, and keeps the longest accepted path.

    The target's token is then sampled from the row at the end of the path. With greedy sampling only the argmax passes,
    and the result is exact. probs: [n+1, V].
    """
    rows = dense(probs)
    threshold = (DELTA * torch.exp(-torch.special.entr(rows).sum(-1))).clamp(max=EPSILON)  # [n+1]
    above = [parent + 1 for parent in draft.parents]
    likely = (rows[above, draft.ids] > threshold[above]).tolist() if above else []
    alive: list[bool] = []
    best, depth = -1, 0
    for node, parent in enumerate(draft.parents):
        alive.append(likely[node] and (parent < 0 or alive[parent]))
        if alive[node] and draft.depths[node] > depth:
            best, depth = node, draft.depths[node]
    return Verdict(draft.path(best), stream.categorical(reached(probs, best + 1), index=depth))

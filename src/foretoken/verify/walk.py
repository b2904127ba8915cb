"""Walk down the tree with the target's own draws: exact for fixed candidates, however they were made.

E[accepted] is the sum over nodes of the target's path probability, the best possible for a fixed tree. EAGLE-2
and EAGLE-3 (2406.16858, 2503.01840) verify by this rule.
"""

from __future__ import annotations

from foretoken.core.draft import Draft
from foretoken.core.streams import Stream
from foretoken.core.verdict import Verdict
from foretoken.verify.rows import Probs, draw


def verify(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
    """Draw y ~ p at a node; if y is a child go there, else emit it and stop.

    probs: [n+1, V], row 0 at the root, row i + 1 at node i. One draw per depth, addressed by the depth.
    """
    nodes: tuple[int, ...] = (-1,)  # every node that spells the accepted prefix: duplicate children are one
    depth = 0
    while True:
        token = draw(probs, nodes[0] + 1, stream, index=depth)
        below = tuple(c for node in nodes for c in draft.children[node + 1] if draft.ids[c] == token)
        if not below:
            return Verdict(draft.path(nodes[0]), token)
        nodes = below
        depth += 1

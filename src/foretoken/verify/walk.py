"""Walks down the tree with the target's draws: exact for any fixed candidates.

E[accepted] is the sum over nodes of the target's path probability, the optimum for a fixed tree. EAGLE-2 and EAGLE-3
(2406.16858, 2503.01840) verify in this way.
"""

from foretoken.core.draft import Draft
from foretoken.core.streams import Stream
from foretoken.core.verdict import Verdict
from foretoken.verify.rows import Probs, draw


def verify(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
    """Draws y ~ p at a node. If y is a child, continues there; otherwise emits y and stops.

    There is one draw per depth, addressed by the depth. probs: [n+1, V], row 0 at the root, row i + 1 at node i.
    """
    nodes: tuple[int, ...] = (-1,)  # all nodes with the accepted prefix: duplicate children count as one
    depth = 0
    while True:
        token = draw(probs, nodes[0] + 1, stream, index=depth)
        below = tuple(c for node in nodes for c in draft.children[node + 1] if draft.ids[c] == token)
        if not below:
            return Verdict(draft.path(nodes[0]), token)
        nodes = below
        depth += 1

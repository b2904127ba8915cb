"""The trajectory grade (2408.07978): the emitted token is argmax(log p + G[seed, position]) for every draft."""

from foretoken.core.draft import Draft
from foretoken.core.streams import Stream
from foretoken.core.verdict import Verdict
from foretoken.verify import walk
from foretoken.verify.rows import Probs


def verify(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
    """Walks the tree with the noise of ``Streams.shared(position)``.

    The walk addresses its draw at depth d by d, which the shared stream maps to position + d, the address of that token
    in plain decoding. So the same seed gives the same text for every proposer, draft length and batch, and drafts made
    from the same noise are mostly accepted.
    """
    return walk.verify(draft, probs, stream)

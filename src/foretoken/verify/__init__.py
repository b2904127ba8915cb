"""Verification: pure functions of a draft, the target's rows and random numbers. Nothing else can reach them.

Which rule is exact follows from how the draft was made and from what the request was promised:

| law of the draft | distribution | trajectory |
|---|---|---|
| fixed candidates | walk | coupled |
| drawn chain | block (or token) | coupled |
| drawn tree, siblings i.i.d. or without replacement | traversal (or recursive) | coupled |
| top k-1 plus one drawn | greedy multi-draft | coupled |

The lossy rules, like ``typical``, are had only by their own name; so is ``continuous``, for real values in the place of
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from foretoken.core.context import Exactness
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.law import PointMass, ProposalLaw, Sampled, TopPlusSampled, WithoutReplacement
from foretoken.core.streams import Purpose, Stream, Streams
from foretoken.core.verdict import Verdict
from foretoken.verify import block, coupled, token, tree, typical, walk
from foretoken.verify.rows import Probs

__all__ = ["VERIFIERS", "Rule", "Verifier", "choose", "stream_for"]

Verifier = Callable[[Draft, Probs, Stream], Verdict]
"""(draft, probs [n+1, V], stream) -> verdict. Row 0 is the target's law at the root, row i + 1 at node i; ``Rows``
are computed as they are read."""

Rule = Callable[[ProposalLaw, Exactness], Verifier]
"""Which verifier judges drafts of a law in a request of a grade; ``choose`` is the exact one."""


def _by_shape(chain: Verifier, drawn_tree: Verifier) -> Verifier:
    """A rule for drawn chains, and its kin for drawn trees."""

    def verify(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
        return chain(draft, probs, stream) if draft.is_chain else drawn_tree(draft, probs, stream)

    return verify


VERIFIERS: dict[str, Verifier] = {
    "walk": walk.verify,
    "token": _by_shape(token.verify, tree.recursive),
    "block": _by_shape(block.verify, tree.traversal),
    "recursive": tree.recursive,
    "traversal": tree.traversal,
    "greedy-multi": tree.greedy_multi,
    "coupled": coupled.verify,
    "typical": typical.verify,
}


def choose(law: ProposalLaw, exactness: Exactness = Exactness.DISTRIBUTION, rejection: str = "block") -> Verifier:
    """The rule that keeps the promise ``exactness`` for drafts made by ``law``.

    rejection: for drawn tokens in the distribution grade: ``"block"`` judges paths as wholes (block verification,
    traversal), ``"token"`` every token by itself (token and recursive rejection), which accepts less.
    """
    if rejection not in ("block", "token"):
        raise InvalidRequest(f"rejection must be 'block' or 'token', got {rejection!r}")
    if exactness is Exactness.TRAJECTORY:
        return VERIFIERS["coupled"]
    if exactness is Exactness.TYPICAL:
        return VERIFIERS["typical"]
    match law:
        case PointMass():
            return VERIFIERS["walk"]
        case Sampled():
            return VERIFIERS[rejection]
        case WithoutReplacement():
            return VERIFIERS["traversal" if rejection == "block" else "recursive"]
        case TopPlusSampled():
            return VERIFIERS["greedy-multi"]
        case _:
            assert_never(law)


def stream_for(exactness: Exactness, streams: Streams, position: int) -> Stream:
    """The random numbers for verifying the round that begins after ``position`` generated tokens.

    The trajectory grade verifies with the noise that drafting may share; every other grade with its own.
    """
    if exactness is Exactness.TRAJECTORY:
        return streams.shared(position)
    return streams.private(Purpose.VERIFY, position)

"""Verification: pure functions of a draft, the target's distributions and random numbers.

The exact verifier follows from the draft's distribution and the grade of exactness:

| the draft (``ProposalLaw``) | distribution | trajectory |
|---|---|---|
| fixed candidates | walk | coupled |
| sampled chain | block (or token) | coupled |
| sampled tree, siblings i.i.d. or without replacement | traversal (or recursive) | coupled |
| top k-1 plus one sampled | greedy multi-draft | coupled |

Lossy verifiers, like ``typical``, are used only by name.
"""

from collections.abc import Callable
from typing import assert_never

from foretoken.core.context import Exactness
from foretoken.core.draft import Draft, PointMass, ProposalLaw, Sampled, TopPlusSampled, WithoutReplacement
from foretoken.core.errors import InvalidRequest
from foretoken.core.streams import Purpose, Stream, Streams
from foretoken.core.verdict import Verdict
from foretoken.verify import block, coupled, token, tree, typical, walk
from foretoken.verify.rows import Probs

__all__ = ["DRAWING", "VERIFIERS", "Rule", "Verifier", "choose", "stream_for"]

Verifier = Callable[[Draft, Probs, Stream], Verdict]
"""(draft, probs [n+1, V], stream) -> verdict. Row 0 is the target's distribution at the root, row i + 1 at node i."""

Rule = Callable[[ProposalLaw, Exactness], Verifier]
"""Chooses the verifier for a draft's law and a request's grade. ``choose`` is the exact one."""

VERIFIERS: dict[str, Verifier] = {
    "walk": walk.verify,
    "token": token.verify,
    "block": block.verify,
    "recursive": tree.recursive,
    "traversal": tree.traversal,
    "greedy-multi": tree.greedy_multi,
    "coupled": coupled.verify,
    "typical": typical.verify,
}


DRAWING = {VERIFIERS["walk"], VERIFIERS["coupled"]}
"""Verifiers whose verdict on an empty draft is one draw from the root's row, at index 0."""


def choose(law: ProposalLaw, exactness: Exactness = Exactness.DISTRIBUTION, rejection: str = "block") -> Verifier:
    """Returns the verifier that is exact for drafts of ``law`` in the grade ``exactness``.

    Args:
        law: Distribution of the draft tokens.
        exactness: Grade of the request.
        rejection: For sampled tokens in the distribution grade. ``"block"`` verifies whole paths (block verification,
            traversal). ``"token"`` verifies token by token (token and recursive rejection), which accepts less.

    Raises:
        InvalidRequest: ``rejection`` is neither.
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
    """Returns the random numbers for verifying the step that begins after ``position`` generated tokens.

    The trajectory grade verifies with the noise that drafting may share. All other grades use separate numbers.
    """
    if exactness is Exactness.TRAJECTORY:
        return streams.shared(position)
    return streams.private(Purpose.VERIFY, position)

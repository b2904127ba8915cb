"""``return_steps``: every round as the playground draws it."""

from __future__ import annotations

from typing import Any

from foretoken.outputs import StreamPiece
from foretoken.serve.token_text import TokenText


def step_record(piece: StreamPiece, index: int, spelling: TokenText) -> dict[str, Any]:
    """One round of one choice.

    draft: what was drafted, parents before children; a parent is an index into it, -1 the last committed token. p is
    the target's law at the token, q what it was drafted with, null for a fixed candidate.
    tokens: what was emitted, and whether it was an accepted guess or the target's own.
    """
    step, explained = piece.step, piece.explained
    accepted = set(step.verdict.path[: step.accepted])
    nodes = range(len(step.draft))
    return {
        "index": index,
        "position": step.position,
        "batch": step.timings.batch,
        "draft": [
            {
                "token": step.draft.ids[node],
                "text": spelling.text(step.draft.ids[node]),
                "parent": step.draft.parents[node],
                "accepted": node in accepted,
                "p": explained.p[node] if explained else None,
                "q": explained.q[node] if explained else None,
            }
            for node in nodes
        ],
        "tokens": [
            {
                "token": token,
                "text": spelling.text(token),
                "origin": "accepted" if place < step.accepted else "target",
                "p": explained.emitted_prob[place] if explained else None,
            }
            for place, token in enumerate(step.tokens)
        ],
        "seconds": {
            "propose": step.timings.propose,
            "score": step.timings.score,
            "verify": step.timings.verify,
            "commit": step.timings.commit,
        },
        "finish_reason": step.finish_reason,
    }

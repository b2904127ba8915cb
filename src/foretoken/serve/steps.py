"""The records of ``return_steps``, from which the playground draws every step."""

from __future__ import annotations

from typing import Any

from foretoken.outputs import StreamPiece
from foretoken.serve.token_text import TokenText


def step_record(piece: StreamPiece, index: int, token_text: TokenText) -> dict[str, Any]:
    """Returns one decode step of one choice.

    ``draft`` has the draft tokens, parents before children. A parent is an index into it; -1 is the last committed
    token. p is the target's probability of the token, q the draft's, null for a fixed candidate. ``tokens`` has the
    emitted tokens, each an accepted draft token or the target's own.
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
                "text": token_text.text(step.draft.ids[node]),
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
                "text": token_text.text(token),
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

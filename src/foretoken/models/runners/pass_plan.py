"""The plan of one forward pass as plain lists on the host, the same for every runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.base import Handle
from foretoken.models.state.replay import ReplayPlan


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's rows in a pass: their position in its slot, and the draft tree of the last rows.

    The rows of a ``mutual`` part, which has no draft, see each other besides the rows before them.
    """

    slot: int
    first: int  # the cache row of the first new row
    count: int
    nodes_at: int  # the cache row of draft node 0
    draft: Draft
    mutual: bool = False

    @property
    def end(self) -> int:
        """The cache row after the last row."""
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class PassPlan:
    """The rows of all sequences, one sequence after another.

    Attributes:
        tokens: the token of each row.
        positions: the position of each row; a draft node's follows from its depth.
        parts: the rows of each sequence.
        outputs: the rows whose logits are needed, ascending.
        output_counts: number of outputs of each sequence.
        reach: the highest cache row in use, plus one.
        features: [rows, H], for a model whose inputs are features; see ``weights.Entry``.
        replay: the steps of recurrent layers, which the CUDA runner adds; None without them.
        argmax_only: whether a runner may return the argmax of each output instead of its logits.
        ranks: number of the likeliest tokens of each output that it may return with the argmax; 0 for none.
    """

    tokens: list[int]
    positions: list[int]
    parts: list[Part]
    outputs: list[int]
    output_counts: list[int]
    reach: int
    features: Tensor | None = None
    replay: ReplayPlan | None = None
    argmax_only: bool = False
    ranks: int = 0

    @property
    def output_rows(self) -> slice | Tensor:
        """The outputs as an index of rows: a slice if they are neighbours, which takes a fraction of a list's time."""
        first, count = self.outputs[0], len(self.outputs)
        if self.outputs[-1] - first + 1 == count:
            return slice(first, first + count)
        return torch.tensor(self.outputs)

    @staticmethod
    def of(handles: Sequence[Handle], drafts: Sequence[Draft], scored: Sequence[int]) -> PassPlan:
        """Returns the pass over all pending tokens and the draft nodes from ``scored[i]`` on.

        Logits are computed from the root on. Raises ValueError if a sequence has neither a pending token nor a new
        draft node.
        """
        tokens: list[int] = []
        positions: list[int] = []
        parts: list[Part] = []
        outputs: list[int] = []
        counts: list[int] = []
        for handle, draft, done in zip(handles, drafts, scored, strict=True):
            pending, length = handle.pending, len(handle.tokens)
            start = len(tokens)
            tokens += [*pending, *draft.ids[done:]]
            positions += [*range(handle.cached, length), *(length - 1 + d for d in draft.depths[done:])]
            count = len(tokens) - start
            if not count:
                raise ValueError("nothing to score: no pending token and no new draft node")
            output_count = len(draft) - done + (1 if pending else 0)
            outputs += range(len(tokens) - output_count, len(tokens))
            counts.append(output_count)
            first = handle.cached if pending else length + done
            parts.append(Part(handle.slot, first, count, length, draft))
        reach = max(part.end for part in parts)
        argmax_only = all(handle.argmax_only for handle in handles)
        ranks = max(handle.ranks for handle in handles)
        return PassPlan(tokens, positions, parts, outputs, counts, reach, argmax_only=argmax_only, ranks=ranks)

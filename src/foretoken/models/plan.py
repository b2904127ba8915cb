"""What one pass computes, as plain lists on the host: every runner reads the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.base import Handle


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's rows in a pass: where they lie in its slot, and the tree among the last of them."""

    slot: int
    first: int  # the cache row of the first new row
    count: int
    nodes_at: int  # the cache row of draft node 0
    draft: Draft


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of every sequence one after another; ``outputs`` are the rows whose logits are wanted."""

    tokens: list[int]
    positions: list[int]
    parts: list[Part]
    outputs: list[int]
    output_counts: list[int]
    reach: int  # the highest cache row in use, plus one
    features: Tensor | None = None  # [rows, H], of a model that is given features; see ``weights.Entry``

    @staticmethod
    def of(handles: Sequence[Handle], drafts: Sequence[Draft], scored: Sequence[int]) -> Plan:
        """Everything pending, then the draft nodes from ``scored[i]`` on; logits from the root down."""
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
            wanted = len(draft) - done + (1 if pending else 0)
            outputs += range(len(tokens) - wanted, len(tokens))
            counts.append(wanted)
            first = handle.cached if pending else length + done
            parts.append(Part(handle.slot, first, count, length, draft))
        reach = max(part.first + part.count for part in parts)
        return Plan(tokens, positions, parts, outputs, counts, reach)

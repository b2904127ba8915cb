"""One sequence in work, and the counts over its rounds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.step import Step
from foretoken.core.verdict import Verdict
from foretoken.engine.stopping import Stopping
from foretoken.models.base import Handle
from foretoken.outputs import SpeculationStats


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The emitted token's log-probability under the target's softmax, its rank, and the likeliest alternatives."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False, slots=True)
class Sequence:
    """What the engine keeps of one sequence. ``logprobs``: alternatives to record for each token, None for none."""

    context: Context
    handle: Handle
    stopping: Stopping
    logprobs: int | None = None
    finish_reason: str | None = None
    counts: Counts = field(default_factory=lambda: Counts())
    recorded: list[TokenLogprobs] = field(default_factory=list)

    def room(self, max_length: int) -> int:
        """Draft nodes worth having: the target adds one token itself, and the model's length is finite."""
        return min(self.stopping.room, max_length - len(self.context.tokens)) - 1

    def emit(self, draft: Draft, verdict: Verdict, logits: Tensor, max_length: int) -> tuple[int, ...]:
        """The verdict's tokens, cut where the sequence ends; records log-probabilities of what is kept."""
        tokens = [*(draft.ids[node] for node in verdict.path), verdict.token]
        rows = [0, *(node + 1 for node in verdict.path)]
        for count, (token, row) in enumerate(zip(tokens, rows, strict=True), start=1):
            if self.logprobs is not None:
                self.recorded.append(token_logprobs(logits[row], token, self.logprobs))
            self.finish_reason = self.stopping.push(token)
            if self.finish_reason is None and len(self.context.tokens) + count >= max_length:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return tuple(tokens[:count])
        return tuple(tokens)


@dataclass(slots=True)
class Counts:
    """Statistics as they grow; a reader of ``Step`` like any other."""

    rounds: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)
    finished: float | None = None
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, step: Step) -> None:
        depth = max(step.draft.depths, default=0)
        self.rounds += 1
        self.drafts += bool(len(step.draft))
        self.drafted += len(step.draft)
        self.accepted += step.accepted
        self.tokens += len(step.tokens)
        for counts, reached in ((self.drafted_at, depth), (self.accepted_at, step.accepted)):
            counts.extend([0] * (max(depth, len(self.drafted_at)) - len(counts)))
            for position in range(reached):
                counts[position] += 1
        if step.finish_reason is not None:
            self.finished = time.monotonic()

    def freeze(self) -> SpeculationStats:
        return SpeculationStats(
            rounds=self.rounds,
            drafts=self.drafts,
            drafted=self.drafted,
            accepted=self.accepted,
            tokens=self.tokens,
            seconds=(self.finished or time.monotonic()) - self.started,
            drafted_per_position=tuple(self.drafted_at),
            accepted_per_position=tuple(self.accepted_at),
        )


def token_logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """One row's log-softmax at ``token`` and at the ``count`` likeliest tokens. logits [V]"""
    row = torch.log_softmax(logits.float(), -1)
    top = row.topk(min(count, row.shape[0]))
    value = row[token]
    alternatives = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprobs(token, float(value), int((row > value).sum()) + 1, alternatives)

"""One sequence in work, and the counts over its rounds."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.sampling import Rows
from foretoken.core.step import Step
from foretoken.core.verdict import Verdict
from foretoken.engine.stopping import Stopping
from foretoken.models.base import Handle
from foretoken.outputs import Explained, SpeculationStats


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The emitted token's log-probability under the target's softmax, its rank, and the likeliest alternatives."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be recorded. logprobs, prompt_logprobs: alternatives for each token, None for none at all.

    explain: what the target's law says of every drafted and every emitted token.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    explain: bool = False


@dataclass(eq=False, slots=True)
class Sequence:
    """What the engine keeps of one sequence.

    priority, arrival: lower ones go first. handle: its place in the target, closed (slot -1) while it waits.
    recorded, of_prompt: log-probabilities of the output's and the prompt's tokens, where wanted; explained: of rounds.
    error: why it ended with the reason "error".
    """

    context: Context
    stopping: Stopping
    wanted: Wanted = field(default_factory=Wanted)
    priority: int = 0
    arrival: int = 0
    handle: Handle = field(default_factory=lambda: Handle(-1, []))
    finish_reason: str | None = None
    error: Exception | None = None
    counts: Counts = field(default_factory=lambda: Counts())
    recorded: list[TokenLogprobs] = field(default_factory=list)
    of_prompt: list[TokenLogprobs] = field(default_factory=list)
    explained: list[Explained] = field(default_factory=list)

    @property
    def turn(self) -> tuple[int, int]:
        """What decides who goes first."""
        return self.priority, self.arrival

    @property
    def unread(self) -> int:
        """Tokens that the target has not been given yet."""
        return len(self.context.tokens) - len(self.handle.tokens)

    @property
    def reads_aloud(self) -> bool:
        """Whether the target is still to say what it thinks of the prompt's tokens."""
        wanted = self.wanted.prompt_logprobs is not None
        return wanted and len(self.of_prompt) < self.context.prompt_length - 1

    @property
    def ready(self) -> bool:
        """Whether the target has all of its text, or will have it with the next pass."""
        return not self.unread and not self.reads_aloud

    def fail(self, error: Exception) -> None:
        """It ends here, for that reason."""
        self.error, self.finish_reason = error, "error"

    def room(self, max_length: int) -> int:
        """Draft nodes worth having: the target adds one token itself, and the model's length is finite."""
        return min(self.stopping.room, max_length - len(self.context.tokens)) - 1

    def emit(self, draft: Draft, verdict: Verdict, logits: Tensor, max_length: int) -> tuple[int, ...]:
        """The verdict's tokens, cut where the sequence ends; records log-probabilities of what is kept."""
        tokens = [*(draft.ids[node] for node in verdict.path), verdict.token]
        rows = [0, *(node + 1 for node in verdict.path)]
        if self.wanted.explain:
            self.explained.append(explain(self.context, draft, rows, tokens, logits))
        for count, (token, row) in enumerate(zip(tokens, rows, strict=True), start=1):
            if self.wanted.logprobs is not None:
                self.recorded.append(token_logprobs(logits[row], token, self.wanted.logprobs))
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
    cached: int = 0
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
            cached=self.cached,
        )


def explain(context: Context, draft: Draft, rows: list[int], tokens: list[int], logits: Tensor) -> Explained:
    """What the laws say of a round's tokens. rows: where each of ``tokens`` was drawn, as in ``logits`` [n+1, V]."""
    laws = Rows(context.law, logits, partial(context.history_at, draft))
    return Explained(
        p=tuple(_known(float(laws[parent + 1][token])) for parent, token in zip(draft.parents, draft.ids, strict=True)),
        q=tuple(draft.chance(node) for node in range(len(draft))),
        came=tuple(float(laws[row][token]) for row, token in zip(rows, tokens, strict=True)),
    )


def _known(chance: float) -> float:
    """``chance``, 0 below a node where no token can come."""
    return 0.0 if math.isnan(chance) else chance


def token_logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """One row's log-softmax at ``token`` and at the ``count`` likeliest tokens. logits [V]"""
    row = torch.log_softmax(logits.float(), -1)
    top = row.topk(min(count, row.shape[0]))
    value = row[token]
    alternatives = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprobs(token, float(value), int((row > value).sum()) + 1, alternatives)

"""One sequence in the engine: its tokens, the statistics of its steps, and log-probabilities of its prompt."""

import math
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.distributions import NodeDistributions
from foretoken.core.draft import Draft
from foretoken.core.native import sampling as native
from foretoken.core.step import PositionCounts, StepOutput
from foretoken.core.verdict import AcceptanceRun, Verdict
from foretoken.engine.stopping import Stopping
from foretoken.models.base import Handle, Scores
from foretoken.outputs import SPAN, Explained, SpeculationStats


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability under the target's softmax, its rank, and the most probable alternatives."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]

    @staticmethod
    def of(row: native.TokenRow) -> "TokenLogprobs":
        """Returns the log-probabilities that the kernels computed of a row."""
        return TokenLogprobs(row.token, row.logprob, row.rank, row.top)


class ComputedTokens(NamedTuple):
    """Results of the kernels for a step of a sequence."""

    path: tuple[int, ...]  # accepted nodes of the draft
    rows: tuple[native.TokenRow, ...]  # the rows of its tokens: the root's, then those of ``path``


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Records beside the tokens."""

    logprobs: int | None = None  # number of alternatives for each output token, or None to record no log-probabilities
    prompt_logprobs: int | None = None  # the same for each prompt token
    explain: bool = False  # whether to record target and draft probabilities of every draft token and emitted token

    @property
    def reads_logits(self) -> bool:
        """Whether recording them takes the logits."""
        return self.logprobs is not None or self.prompt_logprobs is not None or self.explain


@dataclass(eq=False, slots=True)
class Sequence:
    """The engine's state of one sequence."""

    context: Context  # tokens, sampling law and random numbers
    stopping: Stopping  # decides when the sequence ends
    options: OutputOptions = field(default_factory=OutputOptions)  # what to record
    priority: int = 0  # lower priorities run first
    arrival: int = 0  # number of the sequence in order of arrival; lower ones run first
    # the sequence's handle in the target, closed (slot -1) while it waits
    handle: Handle = field(default_factory=lambda: Handle(-1, []))
    finish_reason: str | None = None  # as in ``StepOutput``
    error: Exception | None = None  # the reason of the finish reason "error"
    counts: "Counts" = field(default_factory=lambda: Counts())  # statistics
    run: AcceptanceRun = field(default_factory=AcceptanceRun)  # its run of acceptance
    alarm: str | None = None  # as in ``StepOutput``, of the last step
    recorded: list[TokenLogprobs] = field(default_factory=list)  # log-probabilities of the output tokens
    prompt_recorded: list[TokenLogprobs] = field(default_factory=list)  # log-probabilities of the prompt tokens
    explained: list[Explained] = field(default_factory=list)  # probabilities of each step
    argmax_only: bool = False  # see ``Handle``
    ranks: int = 0  # see ``Handle``
    # emitted tokens whose text ``read_text`` has to read; None if ``emit`` reads it
    unread: list[int] | None = None

    @property
    def turn(self) -> tuple[int, int]:
        """Sort key of the scheduling order."""
        return self.priority, self.arrival

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens that the target has not been given yet."""
        return len(self.context.tokens) - len(self.handle.tokens)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        requested = self.options.prompt_logprobs is not None
        return requested and len(self.prompt_recorded) < self.context.prompt_length - 1

    @property
    def ready(self) -> bool:
        """Whether the target has all tokens, or will have them after the next forward pass."""
        return not self.num_uncomputed and not self.needs_prompt_logprobs

    @property
    def continues(self) -> bool:
        """Whether the next forward pass computes the row of its newest token, and nothing else but a draft."""
        handle, count = self.handle, len(self.context.tokens)
        return handle.cached == count - 1 and len(handle.tokens) == count and not self.needs_prompt_logprobs

    def fail(self, error: Exception) -> None:
        self.error, self.finish_reason, self.alarm = error, "error", None

    def max_draft_tokens(self, max_length: int) -> int:
        """Returns the largest useful number of draft tokens: the target adds one token, and the length is limited."""
        return min(self.stopping.tokens_left, max_length - len(self.context.tokens)) - 1

    def emit(
        self, draft: Draft, verdict: Verdict, scores: Scores, max_length: int, computed: ComputedTokens | None = None
    ) -> tuple[int, ...]:
        """Returns the verdict's tokens, cut where the sequence ends. Records what ``options`` ask for.

        Args:
            draft: The step's draft.
            scores: The target's.
            max_length: The target's context length.
            computed: What the kernels have computed of the verdict's rows, if they have chosen its tokens.
        """
        self.alarm = None
        tokens = [*map(draft.ids.__getitem__, verdict.path), verdict.token]
        rows = [0, *(node + 1 for node in verdict.path)]
        if self.options.explain:
            self.explained.append(explain(self.context, draft, rows, tokens, scores.logits))
        for count, (token, row) in enumerate(zip(tokens, rows, strict=True), start=1):
            if self.options.logprobs is not None:
                known = computed and TokenLogprobs.of(computed.rows[count - 1])
                self.recorded.append(known or token_logprobs(scores.logits[row], token, self.options.logprobs))
            self.finish_reason = self.stopping.push(token)
            if self.unread is None:
                self.finish_reason = self.stopping.read(token) or self.finish_reason
            if self.finish_reason is None and len(self.context.tokens) + count >= max_length:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return tuple(tokens[:count])
        self.alarm = self.run.add(draft, verdict, self.context.tokens)
        if self.alarm is not None and self.unread is None:
            self.finish_reason = self.stopping.alarmed(self.alarm)
        return tuple(tokens)

    def read_text(self, step: StepOutput) -> StepOutput:
        """Reads the text of tokens that ``emit`` left unread, of which any may end the sequence.

        Returns the output without tokens behind the end. An error in the text ends the sequence with none of them.
        """
        tokens, self.unread = self.unread or [], []
        count, reason, alarm = 0, None, None
        try:
            while reason is None and count < len(tokens):
                reason, count = self.stopping.read(tokens[count]), count + 1
            if reason is None and step.finish_reason is None and step.alarm is not None:
                reason, alarm = self.stopping.alarmed(step.alarm), step.alarm
        except Exception as error:
            self.fail(error)
            count, reason = 0, self.finish_reason
        if reason is None:
            return step
        self.finish_reason = reason
        del self.context.tokens[len(self.context.tokens) - len(tokens) + count :]
        del self.recorded[self.context.generated :]
        left = max(0, self.context.generated - step.position)
        return replace(step, tokens=step.tokens[:left], finish_reason=reason, alarm=alarm)


@dataclass(slots=True)
class Counts:
    """Running statistics of one sequence. See ``SpeculationStats``."""

    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    cached: int = 0
    started: float = field(default_factory=time.monotonic)
    finished: float | None = None
    positions: PositionCounts = field(default_factory=PositionCounts)
    by_output: list[tuple[int, int]] = field(default_factory=list)

    def add(self, step: StepOutput) -> None:
        self.steps += 1
        self.tokens += len(step.tokens)
        if drafted := len(step.draft):
            self.drafts += 1
            self.drafted += drafted
            self.accepted += step.accepted
            self.positions.add(max(step.draft.depths), step.accepted)
            at = step.position // SPAN
            self.by_output += [(0, 0)] * (at + 1 - len(self.by_output))
            drafts, accepted = self.by_output[at]
            self.by_output[at] = drafts + 1, accepted + step.accepted
        if step.finish_reason is not None:
            self.finished = time.monotonic()

    def freeze(self) -> SpeculationStats:
        return SpeculationStats(
            steps=self.steps,
            drafts=self.drafts,
            drafted=self.drafted,
            accepted=self.accepted,
            tokens=self.tokens,
            seconds=(self.finished or time.monotonic()) - self.started,
            drafted_per_position=tuple(map(int, self.positions.drafted)),
            accepted_per_position=tuple(map(int, self.positions.accepted)),
            cached=self.cached,
            by_output=tuple(self.by_output),
        )


def explain(context: Context, draft: Draft, rows: list[int], tokens: list[int], logits: Tensor) -> Explained:
    """Returns the probabilities of a step's tokens.

    Args:
        context: The sequence.
        draft: The step's draft.
        rows: The row of ``logits`` that each of ``tokens`` was sampled from.
        tokens: The accepted tokens and the target's token.
        logits: [n+1, V].
    """
    distributions = NodeDistributions(context.law, logits, partial(context.history_at, draft))
    return Explained(
        p=tuple(
            _known(float(distributions[parent + 1][token]))
            for parent, token in zip(draft.parents, draft.ids, strict=True)
        ),
        q=tuple(draft.chance(node) for node in range(len(draft))),
        emitted_prob=tuple(float(distributions[row][token]) for row, token in zip(rows, tokens, strict=True)),
    )


def _known(chance: float) -> float:
    """Returns ``chance``, 0 below a node where no token is possible."""
    return 0.0 if math.isnan(chance) else chance


def token_logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Returns one row's log-softmax at ``token`` and at the ``count`` most probable tokens. logits: [V]"""
    (result,) = logprobs_of_rows(logits[None], [token], count)
    return result


def logprobs_of_rows(logits: Tensor, tokens: Many[int], count: int) -> list[TokenLogprobs]:
    """Returns the log-softmax of each row at its token and at its ``count`` most probable tokens.

    Args:
        logits: [rows, V].
        count: Number of most probable tokens.
    """
    logits = logits.float()
    count = min(count, logits.shape[1])
    if kernels := native.for_rows(logits):
        rows = [native.TokenRow.of(logits[i : i + 1], native.TokenSource.GIVEN) for i in range(len(logits))]
        for row, token in zip(rows, tokens, strict=True):
            row.token = token
            row.list_top(count)
        kernels.choose_tokens(rows, logits.shape[1])
        return [TokenLogprobs.of(row) for row in rows]
    return [_torch_logprobs(row, token, count) for row, token in zip(logits, tokens, strict=True)]


def _torch_logprobs(row: Tensor, token: int, count: int) -> TokenLogprobs:
    """Returns the log-probabilities of one row [V] by torch operators."""
    row = torch.log_softmax(row, -1)
    top = row.topk(count)
    value = row[token]
    alternatives = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprobs(token, float(value), int((row > value).sum()) + 1, alternatives)


CHUNK = 128  # rows of logits at once


def prompt_logprob_drafts(prefilling: Many[Sequence]) -> list[Draft]:
    """Returns the next chunk of each prompt as a draft; empty for sequences without prompt log-probabilities."""
    return [
        Draft.chain(_chunk(sequence)) if sequence.needs_prompt_logprobs else Draft.empty() for sequence in prefilling
    ]


def record_prompt_logprobs(sequence: Sequence, scores: Scores) -> tuple[int, ...]:
    """Records the log-probabilities of a sequence's chunk. Returns the chunk's tokens, which are to be committed."""
    if not sequence.needs_prompt_logprobs:
        return ()
    chunk, count = _chunk(sequence), sequence.options.prompt_logprobs or 0
    sequence.prompt_recorded += logprobs_of_rows(scores.logits[: len(chunk)], chunk, count)
    return chunk


def _chunk(sequence: Sequence) -> tuple[int, ...]:
    start = len(sequence.handle.tokens)
    return tuple(sequence.context.tokens[start : min(start + CHUNK, sequence.context.prompt_length)])

"""Continuous batching: selects the requests and prefill chunks of the next step.

Requests are ordered by priority, then by arrival. When the KV cache is full, the last request in that order is
preempted; it later resumes at the same token after recomputing its KV cache.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from foretoken.core.context import Context
from foretoken.engine.prefill_pace import PrefillPacer
from foretoken.engine.sequence import Sequence
from foretoken.models.base import Model
from foretoken.models.state.pages import PAGE

PREFILL_CHUNK = 256  # tokens; a fixed size for models in which the chunk size may change the last bits of a row


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The sequences of one step."""

    ready: list[Sequence]  # sequences that emit tokens; the last chunk of their prefill runs in the same forward pass
    # maximum number of draft tokens of each sequence in ``ready``: what could be emitted, what fits, and none if a
    # short prompt takes their place
    max_draft_tokens: list[int]
    prefilling: list[Sequence]  # sequences with a prefill chunk in this step, and no output
    prompt_rows: int = 0  # number of rows of the step's pass beside the newest token's of each sequence in ``ready``


@dataclass(frozen=True, slots=True)
class SchedulerUsage:
    """Load of the scheduler."""

    running: int = 0  # number of running sequences
    waiting: int = 0  # number of waiting sequences
    kv_tokens: int = 0  # number of tokens in the KV cache, rounded up to whole pages
    kv_capacity: int = 0  # number of tokens whose KV cache fits; 0 is no limit
    kv_bytes_per_token: int = 0  # bytes of one token in the target's KV cache; 0 is unknown
    prefix_hits: int = 0  # number of prompt tokens found in the prefix cache since the start
    prefix_queries: int = 0  # number of prompt tokens looked up in the prefix cache since the start
    preemptions: int = 0  # number of preemptions since the start


class Scheduler:
    """Admits, orders and preempts sequences. See the module."""

    def __init__(
        self,
        target: Model,  # the model whose KV cache is scheduled
        max_sequences: int,  # number of sequences in one forward pass
        pace: PrefillPacer,  # limits the prefill of a step
        capacity: int | None,  # number of tokens whose KV cache fits, or None for no limit
        # called with a context before its prefill; returns the number of leading tokens whose hidden states the
        # proposer does not need
        on_admit: Callable[[Context], int],
        on_preempt: Callable[[Context], None],  # called with a context that is preempted
        # number of tokens whose KV cache takes as much memory as the recurrent states of one sequence
        state_tokens: int = 0,
    ) -> None:
        self.target, self.max_sequences, self.pace, self.capacity = target, max_sequences, pace, capacity
        self._on_admit, self._on_preempt, self._state_tokens = on_admit, on_preempt, state_tokens
        self.waiting: list[Sequence] = []
        self.running: dict[int, Sequence] = {}
        self._arrivals = self._hits = self._queries = self._preemptions = 0

    @property
    def usage(self) -> SchedulerUsage:
        held = sum(_paged(len(s.context.tokens)) + _paged(len(s.context.source)) for s in list(self.running.values()))
        capacity = self.capacity or 0
        return SchedulerUsage(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_tokens=held,
            kv_capacity=capacity,
            kv_bytes_per_token=self.target.kv_bytes_per_token,
            prefix_hits=self._hits,
            prefix_queries=self._queries,
            preemptions=self._preemptions,
        )

    def add(self, sequence: Sequence) -> None:
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._queue(sequence)

    def remove(self, identifier: int) -> Sequence | None:
        """Removes a running or waiting sequence and returns it; None for unknown identifiers."""
        sequence = self.running.pop(identifier, None)
        if sequence is not None:
            self.target.close(sequence.handle)
            return sequence
        queued = next((s for s in self.waiting if s.context.id == identifier), None)
        if queued is not None:
            self.waiting.remove(queued)
        return queued

    def schedule(self) -> ScheduledBatch:
        """Selects the sequences of the next step and gives the target their prefill chunks."""
        if self.capacity is not None:
            self._preempt_until_fit()
        if not self.waiting and all(sequence.continues for sequence in self.running.values()):
            ready = list(self.running.values())
            return ScheduledBatch(ready, self._max_draft_tokens(ready), [])
        in_order = sorted(self.running.values(), key=lambda s: s.turn)
        decoding = sum(sequence.ready for sequence in in_order)
        waiting = len(in_order) - decoding + min(len(self.waiting), self.max_sequences - len(in_order))
        limit = self.pace.next_step(decoding, waiting, self._next_prompt(in_order))
        left = limit.rows
        for sequence in in_order:
            left = self._prefill(sequence, left)
        while self.waiting and (left is None or left > limit.spare) and self._admit():
            left = self._prefill(self._open(self.waiting.pop(0)), left)
        ready = [s for s in self.running.values() if s.ready]
        prefilling = [s for s in self.running.values() if not s.ready and s.handle.pending]
        drafts = limit.drafts or not (prefilling or any(len(s.handle.pending) > 1 for s in ready))
        rows = sum(s.handle.num_pending for s in (*ready, *prefilling)) - len(ready)
        limits = self._max_draft_tokens(ready) if drafts else [0] * len(ready)
        return ScheduledBatch(ready, limits, prefilling, rows)

    def check_integrity(self) -> None:
        """Raises AssertionError where the records of sequences and slots are inconsistent."""
        slots = [sequence.handle.slot for sequence in self.running.values()]
        assert len(set(slots)) == len(slots) and min(slots, default=0) >= 0, (
            "two sequences share a slot, or one has none"
        )
        assert all(s.handle.slot < 0 for s in self.waiting), "a waiting sequence holds a slot"
        for sequence in self.running.values():
            known = sequence.handle.tokens
            assert sequence.context.tokens[: len(known)] == known, "the target holds other tokens"
        assert self.waiting == sorted(self.waiting, key=lambda s: s.turn), "the queue is out of order"
        self.target.check()

    # prefill

    def _next_prompt(self, in_order: list[Sequence]) -> int:
        """Returns the number of tokens to prefill in the next sequence, cached ones included if it was not opened."""
        queued = (len(sequence.context.tokens) for sequence in self.waiting[:1])
        return next((s.num_uncomputed for s in in_order if not s.ready), next(queued, 0))

    def _prefill(self, sequence: Sequence, left: int | None) -> int | None:
        """Gives the target the next prefill chunk of a sequence. Returns the rows left for other sequences."""
        handle, num_uncomputed = sequence.handle, sequence.num_uncomputed
        if sequence.needs_prompt_logprobs or (
            not num_uncomputed and sequence.context.generated and len(handle.pending) <= 1
        ):
            return left
        if num_uncomputed and (left is None or left > 0):
            count = num_uncomputed
            if not self.target.chunk_invariant and left is not None:
                count = PREFILL_CHUNK if num_uncomputed > PREFILL_CHUNK else num_uncomputed
            elif left is not None:
                count = min(num_uncomputed, left)
            tokens = sequence.context.tokens
            self.target.commit([handle], [tokens[len(handle.tokens) : len(handle.tokens) + count]])
        return None if left is None else left - len(handle.pending)

    def _open(self, sequence: Sequence) -> Sequence:
        """Opens a sequence in the target, with the tokens that need no prefill and one more."""
        context, tokens = sequence.context, sequence.context.tokens
        if sequence.needs_prompt_logprobs:
            sequence.prompt_recorded.clear()
        opened = tokens[:1] if sequence.needs_prompt_logprobs else tokens
        handle = sequence.handle = self.target.open(opened, context.source, context.cache_salt, context.adapter)
        handle.argmax_only, handle.ranks = sequence.argmax_only, sequence.ranks
        self.running[context.id] = sequence
        handle.truncate(min(handle.cached, self._on_admit(context)) + 1)
        if not sequence.counts.steps:
            sequence.counts.started, sequence.counts.cached = monotonic(), handle.cached
        self._hits += handle.cached
        self._queries += len(tokens)
        return sequence

    # capacity

    def _admit(self) -> bool:
        """Returns whether the first waiting sequence can run. Preempts sequences of lower priority for it."""
        first = self.waiting[0]
        last = sorted(self.running.values(), key=lambda s: s.turn, reverse=True)
        after = [s for s in last if s.priority > first.priority]
        for count in range(len(after) + 1):
            others = last[count:]
            if len(others) < self.max_sequences and self._fit([*others, first], spare=PAGE * len(others)):
                for sequence in after[:count]:
                    self._preempt(sequence)
                return True
        return False

    def _preempt_until_fit(self) -> None:
        """Preempts the last sequences until the others fit, each with one more token."""
        while len(self.running) > 1 and not self._fit(list(self.running.values())):
            self._preempt(max(self.running.values(), key=lambda s: s.turn))

    def _fit(self, sequences: list[Sequence], spare: int = 0) -> bool:
        return self.capacity is None or len(sequences) == 1 or sum(map(self._need, sequences)) + spare <= self.capacity

    def _max_draft_tokens(self, ready: list[Sequence]) -> list[int]:
        """Returns the maximum number of draft tokens of each sequence: what could be emitted, and what fits."""
        max_draft_tokens = [sequence.max_draft_tokens(self.target.max_length) for sequence in ready]
        if self.capacity is None or not ready:
            return max_draft_tokens
        spare = max(0, self.capacity - sum(map(self._need, self.running.values()))) // len(ready) // PAGE * PAGE
        lengths = [len(sequence.context.tokens) + 1 for sequence in ready]
        fitting = [_paged(length) - length + spare for length in lengths]
        return [min(limit, fits) for limit, fits in zip(max_draft_tokens, fitting, strict=True)]

    def _need(self, sequence: Sequence) -> int:
        """Returns the rows that a sequence holds at its next token, those of its encoder input and state included."""
        return _paged(len(sequence.context.tokens) + 1) + _paged(len(sequence.context.source)) + self._state_tokens

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence.context.id]
        self.target.close(sequence.handle)
        self._preemptions += 1
        self._queue(sequence)
        self._on_preempt(sequence.context)

    def _queue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.turn)


def _paged(rows: int) -> int:
    return -(-rows // PAGE) * PAGE

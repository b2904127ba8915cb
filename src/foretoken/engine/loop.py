"""The loop: budgets, propose, score, law, verify, commit, observe. One screen, the same for every pairing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from foretoken.control.base import Controller
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import Rows
from foretoken.core.step import Step, Timings
from foretoken.core.verdict import Verdict
from foretoken.engine.sequence import Sequence
from foretoken.engine.stopping import Stopping
from foretoken.models.base import Model, Scores
from foretoken.propose.base import Observation, Proposer
from foretoken.verify import Rule, choose, stream_for


class Engine:
    """Runs any number of sequences, up to ``max_sequences`` in one pass; a single one is a batch of one.

    rule: the verifier for drafts of a law in a request of a grade; an audit plants wrong ones.
    """

    def __init__(
        self,
        target: Model,
        proposer: Proposer,
        controller: Controller,
        *,
        rule: Rule = choose,
        max_sequences: int = 16,
    ) -> None:
        self.target, self.proposer, self.controller = target, proposer, controller
        self.rule, self.max_sequences = rule, max_sequences
        self.waiting: deque[tuple[Context, Stopping, int | None]] = deque()
        self.running: dict[int, Sequence] = {}
        self.finished: dict[int, Sequence] = {}

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, context: Context, stopping: Stopping, logprobs: int | None = None) -> None:
        """Queue a sequence; it joins when there is room."""
        self.check(context)
        self.waiting.append((context, stopping, logprobs))

    def check(self, context: Context) -> None:
        """Refuse a prompt that could never run."""
        if not context.tokens:
            raise InvalidRequest("the prompt is empty; at least one token is needed to continue from")
        if len(context.tokens) >= self.target.max_length:
            raise InvalidRequest(
                f"the prompt has {len(context.tokens)} tokens and the model was opened with room for "
                f"{self.target.max_length}, prompt and output together; shorten it or raise max_model_len"
            )

    def abort(self, identifier: int) -> None:
        """Drop a sequence wherever it is; unknown ones are ignored."""
        self.waiting = deque(entry for entry in self.waiting if entry[0].id != identifier)
        if identifier in self.running:
            self.running[identifier].finish_reason = "abort"
            self._retire(self.running[identifier])

    @torch.inference_mode()
    def step(self) -> list[Step]:
        """One round of every running sequence. -> what each emitted, in order of admission"""
        self._admit()
        batch = list(self.running.values())
        if not batch:
            return []
        contexts = [sequence.context for sequence in batch]
        clock = _Clock()
        with self._abandoning(batch):
            rooms = [sequence.room(self.target.max_length) for sequence in batch]
            drafts = self.proposer.propose(contexts, self.controller.budgets(contexts, rooms))
            clock.lap()
            scores = self.target.score([s.handle for s in batch], drafts, self.proposer.needs.taps)
            clock.lap()
            verdicts = [self._judge(c, d, s) for c, d, s in zip(contexts, drafts, scores, strict=True)]
        rounds = list(zip(batch, drafts, verdicts, scores, strict=True))
        emitted = [s.emit(d, v, score.logits, self.target.max_length) for s, d, v, score in rounds]
        clock.lap()
        self.target.commit([s.handle for s in batch], emitted)
        positions = [context.generated for context in contexts]
        for context, tokens in zip(contexts, emitted, strict=True):
            context.tokens.extend(tokens)
        timings = clock.timings(len(batch))
        steps = [
            Step(s.context.id, position, draft, verdict, tokens, timings, s.finish_reason)
            for (s, draft, verdict, _), position, tokens in zip(rounds, positions, emitted, strict=True)
        ]
        self.proposer.observe(contexts, [Observation(t, s) for t, s in zip(steps, scores, strict=True)])
        self._settle(batch, steps)
        return steps

    def take(self, identifier: int) -> Sequence:
        """Hand over a finished sequence."""
        return self.finished.pop(identifier)

    def _judge(self, context: Context, draft: Draft, scores: Scores) -> Verdict:
        """The law at every node, then the rule that the draft's own law and the request's grade call for."""
        probs = Rows(context.law, scores.logits, partial(context.history_at, draft))
        stream = stream_for(context.exactness, context.streams, context.generated)
        return self.rule(draft.law, context.exactness)(draft, probs, stream)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_sequences:
            context, stopping, logprobs = self.waiting.popleft()
            handle = self.target.open(context.tokens)
            self.running[context.id] = Sequence(context, handle, stopping, logprobs)

    def _settle(self, batch: list[Sequence], steps: list[Step]) -> None:
        self.controller.observe(steps)
        for sequence, step in zip(batch, steps, strict=True):
            sequence.counts.add(step)
            if step.finish_reason is not None:
                self._retire(sequence)

    @contextmanager
    def _abandoning(self, batch: list[Sequence]) -> Iterator[None]:
        """If a round fails before anything is emitted, every cache goes back to where the round began."""
        try:
            yield
        except BaseException:
            self.target.commit([sequence.handle for sequence in batch], [()] * len(batch))
            for sequence in batch:
                self.proposer.forget(sequence.context)
            raise

    def _retire(self, sequence: Sequence) -> None:
        self.running.pop(sequence.context.id, None)
        self.target.close(sequence.handle)
        self.proposer.forget(sequence.context)
        self.controller.forget(sequence.context)
        self.finished[sequence.context.id] = sequence


@contextmanager
def draining(engine: Engine, identifiers: list[int]) -> Iterator[None]:
    """Whatever happens inside, a consumer walking away included, leave no sequence of ours behind."""
    try:
        yield
    finally:
        for identifier in identifiers:
            engine.abort(identifier)
            engine.finished.pop(identifier, None)


class _Clock:
    """Laps of one round, in seconds."""

    def __init__(self) -> None:
        self.laps: list[float] = []
        self._last = time.perf_counter()

    def lap(self) -> None:
        now = time.perf_counter()
        self.laps.append(now - self._last)
        self._last = now

    def timings(self, batch: int) -> Timings:
        self.lap()
        propose, score, verify, commit = self.laps
        return Timings(propose, score, verify, commit, batch)

"""The loop: budgets, propose, score, law, verify, commit, observe. One screen, the same for every pairing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from foretoken.control.base import Controller
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, NoTokenAllowed
from foretoken.core.sampling import Rows
from foretoken.core.step import Step, Timings
from foretoken.core.verdict import Verdict
from foretoken.engine.pace import Pace, PromptRows
from foretoken.engine.reading import drafts_aloud, note_aloud
from foretoken.engine.scheduler import Scheduler, Usage
from foretoken.engine.sequence import Sequence, Wanted
from foretoken.engine.stopping import Stopping
from foretoken.models.base import Model, Scores
from foretoken.propose.base import Observation, Proposer
from foretoken.verify import Rule, choose, stream_for


class Engine:
    """Runs any number of sequences, up to ``max_sequences`` in one pass; a single one is a batch of one.

    rule: the verifier for drafts of a law in a request of a grade; an audit plants wrong ones.
    prompt_rows: rows of prompts that one round may read. capacity: tokens whose keys and values fit.
    """

    def __init__(
        self,
        target: Model,
        proposer: Proposer,
        controller: Controller,
        *,
        rule: Rule = choose,
        max_sequences: int = 16,
        prompt_rows: PromptRows = None,
        capacity: int | None = None,
    ) -> None:
        self.target, self.proposer, self.controller, self.rule = target, proposer, controller, rule
        self.pace = Pace(prompt_rows)
        self.scheduler = Scheduler(target, max_sequences, self.pace, capacity, self._join, self._set_aside)
        self.finished: dict[int, Sequence] = {}
        self._alone = threading.Lock()

    @property
    def max_sequences(self) -> int:
        return self.scheduler.max_sequences

    @property
    def running(self) -> dict[int, Sequence]:
        return self.scheduler.running

    @property
    def waiting(self) -> list[Sequence]:
        return self.scheduler.waiting

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def usage(self) -> Usage:
        return self.scheduler.usage

    def add(
        self, context: Context, stopping: Stopping, logprobs: int | None = None, *, prompt_logprobs: int | None = None,
        explain: bool = False, priority: int = 0,
    ) -> None:  # fmt: skip
        """Queue a sequence; it joins when there is room, the lowest priority first. The others: see ``Wanted``."""
        self.check(context)
        self.scheduler.add(Sequence(context, stopping, Wanted(logprobs, prompt_logprobs, explain), priority))

    def check(self, context: Context) -> None:
        """Refuse a prompt that could never run."""
        if not context.tokens:
            raise InvalidRequest("the prompt is empty; at least one token is needed to continue from")
        self.target.admit(context.tokens, context.source)

    def abort(self, identifier: int) -> None:
        """Drop a sequence wherever it is; unknown ones are ignored."""
        sequence = self.scheduler.remove(identifier)
        if sequence is not None:
            sequence.finish_reason = "abort"
            self._retire(sequence)

    def clear(self) -> None:
        """Drop every sequence."""
        for sequence in [*self.running.values(), *self.waiting]:
            self.abort(sequence.context.id)
        self.finished.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError where sequences, places and rows do not add up."""
        self.scheduler.check_integrity()

    @torch.inference_mode()
    def step(self) -> list[Step]:
        """One decode step of every running sequence.

        What fails in a sequence's own work (law, verdict, text, log-probabilities) ends that sequence alone, with the
        finish reason "error".

        Returns:
            What each sequence emitted, in order of admission; nothing from those whose prefill goes on.
        """
        if not self._alone.acquire(blocking=False):
            raise InvalidRequest("another thread runs this engine, a server perhaps; give each user an LLM of its own")
        try:
            return self._round()
        finally:
            self._alone.release()

    def step_or_raise(self) -> list[Step]:
        """``step``, for callers that cannot go on without a sequence that failed. Raises the error that ended it."""
        steps = self.step()
        for step in steps:
            if step.finish_reason == "error" and (error := self.take(step.sequence).error) is not None:
                raise error
        return steps

    def _round(self) -> list[Step]:
        plan = self.scheduler.round()
        batch = [*plan.ready, *plan.reading]
        if not batch:
            return []
        contexts = [sequence.context for sequence in plan.ready]
        clock = _Clock(len(contexts), sum(len(s.handle.pending) for s in batch) - len(plan.ready))
        with self._abandoning(batch):
            drafts = [*self._propose(contexts, plan.rooms), *drafts_aloud(plan.reading)]
            clock.lap()
            scores = self.target.score([s.handle for s in batch], drafts, self.proposer.needs.taps)
            clock.lap()
            own = slice(len(plan.ready))
            verdicts = [self._judge(*each) for each in zip(plan.ready, drafts[own], scores[own], strict=True)]
        failed = self._read(plan.reading, scores[len(plan.ready) :])
        steps = self._settle(plan.ready, drafts[own], verdicts, scores[own], clock) if plan.ready else []
        return [*steps, *(self._end(sequence) for sequence in failed)]

    def take(self, identifier: int) -> Sequence:
        """Hand over a finished sequence."""
        return self.finished.pop(identifier)

    def _propose(self, contexts: list[Context], rooms: list[int]) -> list[Draft]:
        return self.proposer.propose(contexts, self.controller.budgets(contexts, rooms)) if contexts else []

    def _judge(self, sequence: Sequence, draft: Draft, scores: Scores) -> Verdict | None:
        """The law at every node, then the rule that the draft's own law and the request's grade call for.

        Where the verdict reaches a node at which no token can come, the accepted tokens are emitted all the same, the
        last of them as the target's own, and the next step ends the sequence. None where it ends in this one.
        """
        context = sequence.context
        probs = Rows(context.law, scores.logits, partial(context.history_at, draft))
        try:
            stream = stream_for(context.exactness, context.streams, context.generated)
            return self.rule(draft.law, context.exactness)(draft, probs, stream)
        except NoTokenAllowed as end:
            if path := draft.path(end.row - 1):
                return Verdict(path[:-1], draft.ids[path[-1]])
            sequence.fail(probs.refusal(end.row))
        except Exception as error:
            sequence.fail(error)
        return None

    def _read(self, reading: list[Sequence], scores: list[Scores]) -> list[Sequence]:
        """Record prompt log-probabilities, and hand the proposer the target's states. Returns sequences that failed."""
        for sequence, score in zip(reading, scores, strict=True):
            try:
                piece = note_aloud(sequence, score)
            except Exception as error:
                sequence.fail(error)
                piece = ()
            if piece:
                self.target.commit([sequence.handle], [piece])
        self.proposer.read([sequence.context for sequence in reading], scores)
        return [sequence for sequence in reading if sequence.error is not None]

    def _settle(
        self, ready: list[Sequence], drafts: list[Draft], verdicts: list[Verdict | None], scores: list[Scores],
        clock: _Clock,
    ) -> list[Step]:  # fmt: skip
        """Commit, observe, and tell what happened."""
        emitted = [
            self._emit(sequence, draft, verdict, score)
            for sequence, draft, verdict, score in zip(ready, drafts, verdicts, scores, strict=True)
        ]
        clock.lap()
        self.target.commit([s.handle for s in ready], emitted)
        positions = [sequence.context.generated for sequence in ready]
        for sequence, tokens in zip(ready, emitted, strict=True):
            sequence.context.tokens.extend(tokens)
        timings = clock.timings()
        self.pace.observe(timings)
        steps = [
            Step(s.context.id, position, draft, verdict or Verdict((), -1), tokens, timings, s.finish_reason)
            for s, position, draft, verdict, tokens in zip(ready, positions, drafts, verdicts, emitted, strict=True)
        ]
        whole = [(s, t, score) for s, t, score in zip(ready, steps, scores, strict=True) if s.error is None]
        if whole:
            self.proposer.observe([s.context for s, _, _ in whole], [Observation(t, score) for _, t, score in whole])
            self.controller.observe([step for _, step, _ in whole])
        for sequence, step in zip(ready, steps, strict=True):
            sequence.counts.add(step)
            if step.finish_reason is not None:
                self._retire(sequence)
        return steps

    def _emit(self, sequence: Sequence, draft: Draft, verdict: Verdict | None, scores: Scores) -> tuple[int, ...]:
        """The tokens that the sequence adds; none where it fails."""
        try:
            return () if verdict is None else sequence.emit(draft, verdict, scores.logits, self.target.max_length)
        except Exception as error:
            sequence.fail(error)
            return ()

    def _end(self, sequence: Sequence) -> Step:
        """The last step of a sequence that failed before it emitted anything."""
        context, timings = sequence.context, Timings(0.0, 0.0, 0.0, 0.0, 1)
        verdict = Verdict((), -1)
        step = Step(context.id, context.generated, Draft.empty(), verdict, (), timings, sequence.finish_reason)
        sequence.counts.add(step)
        self._retire(sequence)
        return step

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

    def _join(self, context: Context) -> int:
        return self.proposer.join(context)

    def _set_aside(self, context: Context) -> None:
        self.proposer.forget(context)
        self.controller.forget(context)

    def _retire(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence.context.id)
        self._set_aside(sequence.context)
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

    def __init__(self, batch: int, prompt_rows: int) -> None:
        self.batch, self.prompt_rows = batch, prompt_rows
        self.laps: list[float] = []
        self._last = time.perf_counter()

    def lap(self) -> None:
        now = time.perf_counter()
        self.laps.append(now - self._last)
        self._last = now

    def timings(self) -> Timings:
        self.lap()
        propose, score, verify, commit = self.laps
        return Timings(propose, score, verify, commit, self.batch, self.prompt_rows)

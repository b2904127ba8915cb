"""The engine: budgets, draft, forward pass, distributions, verify, commit, observe. The same for every pairing."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from foretoken.control.base import Controller
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.step import StepOutput, Timings
from foretoken.engine.clock import StepClock
from foretoken.engine.footprint import state_tokens
from foretoken.engine.prefill_pace import PrefillPacer, PromptRows
from foretoken.engine.scheduler import ScheduledBatch, Scheduler, SchedulerUsage
from foretoken.engine.sequence import (
    ComputedTokens,
    OutputOptions,
    Sequence,
    prompt_logprob_drafts,
    record_prompt_logprobs,
)
from foretoken.engine.step_rows import StepRows
from foretoken.engine.stopping import Stopping
from foretoken.engine.verified import NO_VERDICT, VerifiedDraft, readable
from foretoken.models.base import Model, Scores
from foretoken.propose.base import Observation, Proposer
from foretoken.verify import Rule, choose

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose tokens a device may still compute."""

    plan: ScheduledBatch
    budgets: Many[int]  # numbers of draft tokens that the proposer was asked for, of the plan's ready sequences
    drafts: Many[Draft]  # drafts of these
    scores: Many[Scores]  # scores of these
    prefilled: Many[Scores]  # scores of the sequences whose prefill continues
    rows: Callable[[], Many[ComputedTokens | None]]  # waits for the tokens; see ``StepRows.choose``


class Engine:
    """Runs any number of sequences by continuous batching, up to ``max_sequences`` in one forward pass."""

    def __init__(
        self,
        target: Model,  # the model whose distribution the output follows
        proposer: Proposer,  # drafts tokens
        controller: Controller,  # decides the size of each draft
        *,
        rule: Rule = choose,  # chooses the verifier; audits pass wrong ones on purpose
        max_sequences: int = 16,  # number of sequences in one forward pass
        prompt_rows: PromptRows = None,  # number of prompt tokens that one step may prefill
        capacity: int | None = None,  # number of tokens whose KV cache fits, or None for no limit
        ahead: bool = False,  # whether a step is launched before the text of the step before it is read
    ) -> None:
        self.target, self.proposer, self.controller, self.rule = target, proposer, controller, rule
        self._step_rows = StepRows(rule)
        self.pace = PrefillPacer(prompt_rows)
        callbacks = self._reusable_prefix_len, self._forget
        state = state_tokens(target, proposer)
        self.scheduler = Scheduler(target, max_sequences, self.pace, capacity, *callbacks, state)
        self.finished: dict[int, Sequence] = {}
        self.ahead = ahead
        self._launched: LaunchedStep | None = None
        self._clock = StepClock(target.device)
        self._alone = threading.Lock()

    @property
    def max_sequences(self) -> int:
        return self.scheduler.max_sequences

    @property
    def running(self) -> dict[int, Sequence]:
        """Admitted sequences by identifier."""
        return self.scheduler.running

    @property
    def waiting(self) -> list[Sequence]:
        """Queued and preempted sequences, the next to be admitted first."""
        return self.scheduler.waiting

    @property
    def adapters_in_use(self) -> set[str | None]:
        """LoRA adapters of the unfinished sequences; None is of those without one."""
        return {sequence.context.adapter for sequence in (*self.running.values(), *self.waiting)}

    @property
    def busy(self) -> bool:
        """Whether any sequence is running or waiting."""
        return bool(self.waiting or self.running)

    @property
    def usage(self) -> SchedulerUsage:
        return self.scheduler.usage

    def add(
        self, context: Context, stopping: Stopping, options: OutputOptions | None = None, *, priority: int = 0
    ) -> None:
        """Queues a sequence.

        Args:
            context: The sequence.
            stopping: Decides when it ends.
            options: What to record beside the tokens.
            priority: Lower priorities are admitted first.

        Raises:
            InvalidRequest: The prompt is empty, the model cannot take it, or its adapter is not loaded.
        """
        self.check(context)
        self.controller.admit(context)
        sequence = Sequence(context, stopping, options or OutputOptions(), priority)
        needs = self.proposer.needs_of(context)
        sequence.argmax_only = context.law.takes_argmax and not (sequence.options.reads_logits or needs.logits)
        sequence.ranks = needs.ranks
        sequence.unread = [] if self.ahead else None
        self.scheduler.add(sequence)

    def check(self, context: Context) -> None:
        """Raises InvalidRequest for a prompt that is empty or that the model cannot take, or an unknown adapter."""
        if not context.tokens:
            raise InvalidRequest("the prompt is empty; at least one token is needed to continue from", param="prompt")
        if context.adapter is not None and context.adapter not in self.target.adapters:
            raise InvalidRequest("the request's LoRA adapter was unloaded before it began; send it again", param="lora")
        self.target.admit(context.tokens, context.source)

    def abort(self, identifier: int) -> None:
        """Ends a waiting or running sequence. Unknown identifiers are ignored."""
        sequence = self.scheduler.remove(identifier)
        if sequence is not None:
            sequence.finish_reason = "abort"
            self._retire(sequence)

    def clear(self) -> None:
        """Ends every sequence and drops the finished ones."""
        with ExitStack() as stack:  # all of them, also where a proposer fails to forget one
            stack.callback(self.finished.clear)
            for sequence in reversed([*self.running.values(), *self.waiting]):
                stack.callback(self.abort, sequence.context.id)

    def check_integrity(self) -> None:
        """Raises AssertionError where the scheduler's and the target's records are inconsistent."""
        self.scheduler.check_integrity()

    def step(self) -> list[StepOutput]:
        """Runs one decode step of every running sequence.

        An engine that runs ahead launches the next step before it reads the text of the step before, so that a device
        computes meanwhile. The first call then only launches. A sequence that its text ends leaves the launched step.

        An error in one sequence's own part (law, verdict, text, log-probabilities) ends that sequence alone, with the
        finish reason "error". Returns the output of each sequence, in order of admission. Sequences whose prefill
        continues have none. Raises InvalidRequest if another thread is running a step of this engine.
        """
        if not self._alone.acquire(blocking=False):
            raise InvalidRequest("another thread runs this engine, a server perhaps; give each user an LLM of its own")
        try:
            settled = self._settle()
            try:
                self._launched = self._launch()
            except Exception:
                if not settled:
                    raise
                _log.warning("a step failed to launch; the next call tries it again", exc_info=True)
            if not self.ahead:
                settled = self._settle()
            return [self._finish(sequence, step) for sequence, step in settled]
        finally:
            self._alone.release()

    def step_or_raise(self) -> list[StepOutput]:
        """Runs ``step``. Raises the error that ended a sequence, for callers that need every sequence to succeed."""
        steps = self.step()
        for step in steps:
            if step.finish_reason == "error" and (error := self.take(step.sequence).error) is not None:
                raise error
        return steps

    def run(self, sequences: Iterable[tuple[Context, Stopping]]) -> Iterator[StepOutput]:
        """Runs sequences to their end on an engine that nothing else uses.

        Whatever ends the iteration, none of the sequences stays in the engine. Yields the output of each step of each
        sequence.

        Raises:
            InvalidRequest: A prompt is empty, or the model cannot take it.
            Exception: The error that ended a sequence.
        """
        queued = list(sequences)
        with draining(self, [context.id for context, _ in queued]):
            for context, stopping in queued:
                self.add(context, stopping)
            while self.busy:
                yield from self.step_or_raise()

    def unfinished(self, identifier: int) -> Sequence:
        """Returns a running or waiting sequence; one whose output was just returned may have been preempted since."""
        return self.running.get(identifier) or next(s for s in self.waiting if s.context.id == identifier)

    def take(self, identifier: int) -> Sequence:
        return self.finished.pop(identifier)

    def _launch(self) -> LaunchedStep | None:
        """Schedules a step, drafts, and starts the forward pass and the choice of tokens. Returns None without work."""
        plan, clock = self.scheduler.schedule(), self._clock
        ready, batch = plan.ready, [*plan.ready, *plan.prefilling]
        if not batch:
            return None
        budgets, drafts, count = list[int](), list[Draft](), len(ready)
        clock.start()
        try:
            if ready:
                contexts = [sequence.context for sequence in ready]
                budgets = self.controller.budgets(contexts, plan.max_draft_tokens)
                drafts = readable(self.proposer.propose(contexts, budgets), self.target, self.proposer.name)
            if plan.prefilling:
                drafts += prompt_logprob_drafts(plan.prefilling)
            clock.lap()
            scores = self.target.score([s.handle for s in batch], drafts, self.proposer.needs.taps)
            clock.lap()
            rows = self._step_rows.choose(ready, drafts[:count], scores[:count])
            clock.lap()
        except BaseException:
            self._abandon(batch)
            raise
        return LaunchedStep(plan, budgets, drafts[:count], scores[:count], scores[count:], rows)

    def _settle(self) -> list[tuple[Sequence, StepOutput]]:
        """Reads and commits the tokens of the launched step, and passes it to all parts that learn from it."""
        step, self._launched = self._launched, None
        if step is None:
            return []
        self._clock.lap()
        try:
            verified = self._verify(step)
        except BaseException:
            self._abandon([*step.plan.ready, *step.plan.prefilling])
            raise
        failed = self._prefill(step) if step.plan.prefilling else []
        settled = self._commit(verified, step.plan.prompt_rows) if verified else []
        return [*settled, *map(self._failure, failed)] if failed else settled

    def _runs(self, sequence: Sequence) -> bool:
        """Returns whether a sequence of the launched step still runs: its text or an abort may have ended it."""
        return self.running.get(sequence.context.id) is sequence

    def _verify(self, step: LaunchedStep) -> list[VerifiedDraft]:
        """Waits for a step. Returns the verdicts on the drafts of its sequences that still run."""
        parts = zip(step.plan.ready, step.budgets, step.drafts, step.scores, step.rows(), strict=True)
        verified = [
            VerifiedDraft.of(sequence, budget, draft, scores.read(), computed, self.rule)
            for sequence, budget, draft, scores, computed in parts
            if self._runs(sequence)
        ]
        self._clock.missed_tokens = sum(
            each.sequence.context.missed_tokens for each in verified if each.budget and each.draft.levels != 0
        )
        return verified

    def _prefill(self, step: LaunchedStep) -> list[Sequence]:
        """Records prompt log-probabilities and passes the target's states to the proposer. Returns failed sequences."""
        parts = zip(step.plan.prefilling, step.prefilled, strict=True)
        prefilled = [(sequence, scores) for sequence, scores in parts if self._runs(sequence)]
        for sequence, score in prefilled:
            try:
                chunk = record_prompt_logprobs(sequence, score)
            except Exception as error:
                sequence.fail(error)
                chunk = ()
            if chunk:
                self.target.commit([sequence.handle], [chunk])
        self.proposer.prefill([sequence.context for sequence, _ in prefilled], [scores for _, scores in prefilled])
        return [sequence for sequence, _ in prefilled if sequence.error is not None]

    def _commit(self, verified: list[VerifiedDraft], prompt_rows: int) -> list[tuple[Sequence, StepOutput]]:
        """Emits and commits tokens. Returns the outputs of the sequences, of which those that ended are retired."""
        max_length = self.target.max_length
        emitted = [each.emit(max_length) for each in verified]
        self._clock.lap()
        self.target.commit([each.sequence.handle for each in verified], emitted)
        positions = list[int]()
        for each, tokens in zip(verified, emitted, strict=True):
            positions.append(each.sequence.context.generated)
            each.sequence.context.tokens.extend(tokens)
            if each.sequence.unread is not None:
                each.sequence.unread.extend(tokens)
        timings = self._clock.timings(len(verified), prompt_rows)
        self.pace.observe(timings, sum([len(each.draft.ids) for each in verified]))
        steps = [
            each.output(position, tokens, timings)
            for each, position, tokens in zip(verified, positions, emitted, strict=True)
        ]
        self._observe(verified, steps)
        sequences = [each.sequence for each in verified]
        if ended := [sequence for sequence in sequences if sequence.finish_reason is not None]:
            with ExitStack() as stack:
                for sequence in reversed(ended):
                    stack.callback(self._retire, sequence)
        return [*zip(sequences, steps, strict=True)]

    def _finish(self, sequence: Sequence, step: StepOutput) -> StepOutput:
        """Counts an output, and ends the sequence if a text that is only read now does."""
        if sequence.unread:
            step = sequence.read_text(step)
            if step.finish_reason is not None and sequence.context.finish_reason is None:
                self._retire(sequence)
        sequence.counts.add(step)
        return step

    def _observe(self, verified: list[VerifiedDraft], outputs: list[StepOutput]) -> None:
        """Passes the step of the sequences that did not fail to the proposer, the controller and the cost models."""
        contexts, steps, observations = list[Context](), list[StepOutput](), list[Observation]()
        for each, step in zip(verified, outputs, strict=True):
            if each.sequence.error is None:
                contexts.append(each.sequence.context)
                steps.append(step)
                observations.append(Observation(step, each.scores))
        if not steps:
            return
        self.proposer.observe(contexts, observations)
        if not self.controller.resting:
            self.controller.observe(contexts, steps)
            if self.controller.costs is not None:
                self.controller.costs.observe(steps)
        for context, step in zip(contexts, steps, strict=True):
            if step.levels and (step.position or len(step.draft)):
                context.num_proposer_tokens = len(context.tokens)

    def _failure(self, sequence: Sequence) -> tuple[Sequence, StepOutput]:
        """Ends a sequence that failed before it emitted anything. Returns it with its last output."""
        context, timings = sequence.context, Timings(0.0, 0.0, 0.0, 0.0, 1)
        self._retire(sequence)
        return sequence, StepOutput(context.id, context.generated, Draft.empty(), NO_VERDICT, (), timings, "error")

    def _abandon(self, batch: list[Sequence]) -> None:
        """Restores every cache to the start of a step that failed before anything was emitted."""
        left = [sequence for sequence in batch if self._runs(sequence)]
        self.target.commit([sequence.handle for sequence in left], [()] * len(left))
        with ExitStack() as stack:
            for sequence in reversed(left):
                sequence.context.num_proposer_tokens = 0
                stack.callback(self.proposer.forget, sequence.context)

    def _reusable_prefix_len(self, context: Context) -> int:
        return self.proposer.reusable_prefix_len(context)

    def _forget(self, context: Context) -> None:
        context.num_proposer_tokens = 0
        self.controller.forget(context)
        self.proposer.forget(context)

    def _retire(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence.context.id)
        self.finished[sequence.context.id] = sequence
        self._step_rows.forget(sequence.context.id)
        if not self.busy:
            self._launched = None
        sequence.context.finish_reason = sequence.finish_reason
        self._forget(sequence.context)


@contextmanager
def draining(engine: Engine, identifiers: list[int]) -> Iterator[None]:
    """Aborts the sequences ``identifiers`` and drops their results when the block is left, in whatever way."""
    try:
        yield
    finally:
        with ExitStack() as stack:  # all of them, also where a proposer fails to forget one
            for identifier in reversed(identifiers):
                stack.callback(engine.finished.pop, identifier, None)
                stack.callback(engine.abort, identifier)

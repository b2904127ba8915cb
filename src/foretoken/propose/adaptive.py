"""Online adaptation: a drafter learns from every row that its target verifies (2310.07177, 2310.08461, 2605.09329).

The target's logits for the text that it emits are free training data, those at rejected positions above all. Samples
wait in a bounded buffer in memory. A thread trains a copy of the draft model or head on them (``Learner``) in a share
of the idle time; a finished version replaces the drafter between two steps. Within a step the drafter is constant, and
the distribution that travels with its tokens is the one they were sampled from, so exactness is not affected. Some
samples are held out: a version that does worse on them is rolled back.

One drafter serves all requests, so requests with a ``cache_salt`` are not learned from: it could repeat their text to
others.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from foretoken.core.checks import check_keys, integer, number
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.learner import Learner, TargetSpan
from foretoken.models.runners.pass_plan import tapped_rows
from foretoken.models.student import HeadStudent, Student
from foretoken.propose.base import Needs, Observation, Proposer, Wrapper
from foretoken.propose.draft_model import DraftModel, ParallelDraftModel
from foretoken.propose.eagle import Eagle, ParallelEagle
from foretoken.propose.union import Union

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdaptConfig:
    """When and how a drafter learns."""

    every: int = 4096  # verified rows between two updates
    buffer: int = 65536  # number of rows kept, the newest
    megabytes: int = 256  # memory of these rows, at most
    window: int = 256  # tokens before and among them that the draft sees
    top: int = 32  # likeliest tokens kept of each distribution
    held_out: int = 8  # one sample in this many is for validation
    steps: int = 12  # optimizer steps of one update
    batch: int = 32  # samples in one optimizer step
    learning_rate: float = 1e-4  # learning rate
    share: float = 1.0  # fraction of the time in which a thread of the lowest priority may train

    def __post_init__(self) -> None:
        minimums = {"buffer": self.every, "window": 2, "held_out": 2}
        for name in ("every", "buffer", "megabytes", "window", "top", "held_out", "steps", "batch"):
            integer(f"{name} of adapt", getattr(self, name), minimums.get(name, 1))
        number("share of adapt", self.share, 1e-3, 1.0)
        if not 0 < self.learning_rate < 1:
            raise InvalidRequest(f"learning_rate of adapt must lie between 0 and 1, got {self.learning_rate!r}")

    @classmethod
    def of(cls, value: Adapt, usual: Self | None = None) -> Self:
        """Returns the configuration of a value as users write it: True, a share such as 0.1 or "10%", or keys.

        Raises InvalidRequest if a key is unknown, or a value not valid.
        usual: Values of other keys.
        """
        keys = dict(value) if isinstance(value, Mapping) else {} if value is True else {"share": _share(value)}
        check_keys("adapt", keys, [f.name for f in fields(cls)])
        return replace(usual or cls(), **keys)


Adapt = bool | float | str | Mapping[str, Any]
"""``adapt`` as users write it."""

HEADS = AdaptConfig(every=1024, window=192, steps=12, batch=8, learning_rate=3e-4)
"""Defaults of heads, which are small."""


def _share(value: Any) -> Any:
    """Returns a percentage as a fraction, and other values unchanged."""
    try:
        return float(value[:-1]) / 100 if isinstance(value, str) and value.endswith("%") else value
    except ValueError:
        return value


@dataclass(frozen=True, slots=True)
class Update:
    """Outcome of one update."""

    before: float  # acceptance on held-out samples before it
    after: float  # acceptance on held-out samples after it
    taken: bool  # whether the new version is used


@dataclass(slots=True)
class _Rows:
    """Rows of one sequence that are not a sample yet."""

    ids: list[np.ndarray[Any, Any]] = field(default_factory=list)  # each [rows, k]
    log_p: list[np.ndarray[Any, Any]] = field(default_factory=list)
    rows: int = 0
    states: list[np.ndarray[Any, Any]] = field(default_factory=list)  # each [n, F], of neighbouring tokens
    next: int = 0  # the position of the first token without states


class Adaptive(Wrapper):
    """Drafts with ``inner`` while a learner learns to do better. history: Outcome of each update."""

    learns = True

    def __init__(self, inner: DraftModel | Eagle, student: Learner, config: AdaptConfig) -> None:
        super().__init__(inner)
        self.inner: DraftModel | Eagle = inner
        student.pause = self._pause
        self.student, self.config = student, config
        self.history: list[Update] = []
        self._open_rows: dict[int, _Rows] = {}
        self._samples: deque[tuple[TargetSpan, bool]] = deque()  # the oldest first, with whether it is held out
        self._num_samples, self._rows, self._bytes, self._rows_since_update = 0, 0, 0, 0
        self._thread: threading.Thread | None = None
        self._hurry, self._training = threading.Event(), threading.Lock()
        self._finished: tuple[Update, Any] | None = None
        self._broken, self._taken = False, 0

    @property
    def samples(self) -> tuple[tuple[TargetSpan, bool], ...]:
        """The buffered samples, the oldest first, with whether each is held out."""
        return tuple(self._samples)

    @property
    def num_rows(self) -> int:
        return self._rows

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        self._take_over()
        return self.inner.propose(contexts, budgets)

    def needs_of(self, context: Context) -> Needs:
        needs = self.inner.needs_of(context)
        return replace(needs, logits=True) if self.student.reads_logits else needs

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for context, observation in zip(contexts, observations, strict=True):
            if context.cache_salt is None:
                self._note(context, observation)
        self.inner.observe(contexts, observations)
        if self._rows_since_update >= self.config.every and self._thread is None and not self._broken:
            samples = [sample for sample, held_out in self._samples if not held_out]
            held_out = [sample for sample, held_out in self._samples if held_out]
            if samples and held_out:
                self._rows_since_update = 0
                work = (samples, held_out)
                self._thread = threading.Thread(target=self._learn, args=work, name="foretoken-adapt", daemon=True)
                self._thread.start()

    def forget(self, context: Context) -> None:
        self._close(context)
        self._open_rows.pop(context.id, None)
        self.inner.forget(context)

    def wait(self) -> None:
        """Waits until an update in progress is finished and in force."""
        if self._thread is not None:
            self._hurry.set()
            self._thread.join()
            self._hurry.clear()
        self._take_over()

    def save(self, folder: Path) -> int:
        """Writes the newest version as an ordinary checkpoint into an existing empty ``folder``, in any thread.

        An update in progress is finished first. Returns the number of updates that were taken.
        """
        self._hurry.set()
        with self._training:
            self._hurry.clear()
            self.student.save(folder)
            return self._taken

    # samples

    def _note(self, context: Context, observation: Observation) -> None:
        """Records the distributions of what was emitted: the root's row and those of the accepted nodes."""
        step, open_rows = observation.step, self._open_rows.setdefault(context.id, _Rows())
        if self.student.taps:
            self._note_states(open_rows, observation)
        rows = [0, *(node + 1 for node in step.verdict.path)][: len(step.tokens)]
        if self.student.reads_logits:
            log_p = torch.log_softmax(observation.scores.logits[rows].float(), -1)
            best = log_p.topk(min(self.config.top, log_p.shape[-1]), dim=-1, sorted=False)
            open_rows.ids.append(best.indices.cpu().numpy())
            open_rows.log_p.append(best.values.cpu().numpy())
        else:
            open_rows.ids.append(np.array(step.tokens, dtype=np.int64)[:, None])
            open_rows.log_p.append(np.zeros((len(rows), 1), np.float32))
        open_rows.rows += len(rows)
        self._rows_since_update += len(rows)
        if open_rows.rows >= self.config.window // 2:
            self._close(context)

    def _close(self, context: Context) -> None:
        """Makes a sample of a sequence's rows. The text's newest token has no row yet."""
        open_rows = self._open_rows.get(context.id)
        if open_rows is None or not open_rows.rows:
            return
        states = np.concatenate(open_rows.states) if open_rows.states else None
        window = min(self.config.window, len(context.tokens) - 1 if states is None else len(states))
        rows = min(open_rows.rows, window)
        tokens = np.array(context.tokens[-window - 1 : -1], dtype=np.int64)
        ids, log_p = np.concatenate(open_rows.ids)[-rows:], np.concatenate(open_rows.log_p)[-rows:]
        sample = TargetSpan(tokens, ids, log_p, None if states is None else states[-window:])
        kept = [] if states is None else [states[-(window - window // 2) :].copy()]
        self._open_rows[context.id] = _Rows(states=kept, next=open_rows.next)
        self._samples.append((sample, self._num_samples % self.config.held_out == 0))
        self._num_samples += 1
        self._rows += len(sample)
        self._bytes += sample.nbytes
        while self._rows > self.config.buffer or self._bytes > self.config.megabytes * 2**20:
            oldest = self._samples.popleft()[0]
            self._rows -= len(oldest)
            self._bytes -= oldest.nbytes

    def _note_states(self, open_rows: _Rows, observation: Observation) -> None:
        """Records the target's states at committed tokens, for samples without a gap."""
        step, scores = observation.step, observation.scores
        known = tapped_rows(scores.taps) - len(step.draft)
        path = step.verdict.path[: max(0, len(step.tokens) - 1)]
        rows = [*range(known), *(known + node for node in path)]
        # numpy, since torch's threads would compete with those of the compiled kernels
        layers = [scores.taps[layer].float().numpy()[rows[-self.config.window :]] for layer in self.student.taps]
        states = np.concatenate(layers, axis=-1)
        if open_rows.next != scores.first:
            open_rows.states.clear()
        open_rows.states.append(((states.view(np.uint32) + 0x8000) >> 16).astype(np.uint16))
        open_rows.next = scores.first + len(rows)

    # training

    def _learn(self, samples: list[TargetSpan], held_out: list[TargetSpan]) -> None:
        """Runs one update in a thread of its own, on one core. The version in use is not modified."""
        try:
            torch.set_num_threads(1)
            if sys.platform == "linux":  # where threads have priorities
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            with self._training:
                before, old = self.student.acceptance(held_out), self.student.snapshot()
                self.student.learn(samples, self.config.steps)
                after = self.student.acceptance(held_out)
                taken = after >= before
                if not taken:
                    self.student.restore(old)
                self._taken += taken
                self._finished = Update(before, after, taken), self.student.version() if taken else None
        except Exception as error:  # an unchanged draft still works
            self._broken = True
            _log.warning("the draft stops learning: %s: %s", type(error).__name__, error)

    def _pause(self, seconds: float) -> None:
        """Rests after ``seconds`` of work, unless ``wait`` is called."""
        self._hurry.wait(seconds * (1 / self.config.share - 1))

    def _take_over(self) -> None:
        """Puts a finished version in force, between two steps."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread.join()
        self._thread = None
        finished, self._finished = self._finished, None
        if finished is None:
            return
        update, model = finished
        self.history.append(update)
        if model is not None:
            self.inner.replace(model)


def adaptive(proposer: Proposer, draft: str | Path | None, adapt: Adapt) -> Adaptive:
    """Returns ``proposer`` with a learner of its draft model in ``draft``, or of its EAGLE-3 head.

    Raises InvalidRequest if it cannot learn.
    """
    if isinstance(proposer, ParallelDraftModel | ParallelEagle):
        raise InvalidRequest(
            "adapt=True teaches a draft the next token, and this one predicts all positions in one pass; set "
            "parallel_drafting to false, or leave adapt out"
        )
    if isinstance(proposer, Eagle):
        if proposer.net.device.type != "cpu":
            raise InvalidRequest("adapt trains heads on a CPU only; leave adapt out, or take a draft model")
        config = AdaptConfig.of(adapt, HEADS)
        head = HeadStudent(proposer.net, proposer.taps, config.learning_rate, config.batch)
        return Adaptive(proposer, head, config)
    if not isinstance(proposer, DraftModel) or draft is None:
        raise InvalidRequest(
            "adapt=True needs method 'draft_model' with a draft from a folder, or 'eagle3' with a head, not "
            f"{proposer.name!r}"
        )
    from foretoken.models.formats.checkpoint import resolve

    config = AdaptConfig.of(adapt)
    return Adaptive(proposer, Student(resolve(draft), proposer.model, config.learning_rate, config.batch), config)


def learner_in(proposer: Proposer) -> Adaptive | None:
    """Returns the member of ``proposer`` that learns, None if there is none."""
    members = [source.proposer for source in proposer.sources] if isinstance(proposer, Union) else [proposer]
    return next((member for member in members if isinstance(member, Adaptive)), None)

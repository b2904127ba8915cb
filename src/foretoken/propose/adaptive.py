"""Online adaptation: a draft that learns from every row that its target verifies (2310.07177, 2310.08461).

The target's logits for the text that it emits are free training data. Samples wait in a bounded buffer. A thread trains
a copy of the draft on them; a finished version replaces the draft between two steps. Within a step the
draft is constant, and the distribution that travels with its tokens is the one they were sampled from, so exactness is
not affected. Some samples are held out: a version that does worse on them is rolled back.

One draft serves all requests, so requests with a ``cache_salt`` are not learned from: the draft could repeat their text
to others.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretoken.core.checks import check_keys, integer
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.student import Student, TargetSpan
from foretoken.propose.base import Needs, Observation, Proposer, Wrapper
from foretoken.propose.draft_model import DraftModel, ParallelDraftModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdaptConfig:
    """When and how a draft learns.

    Attributes:
        every: Verified rows between two updates.
        buffer: Number of rows kept, the newest.
        window: Tokens before and among them that the draft sees.
        top: Likeliest tokens kept of each distribution.
        held_out: One sample in this many is for validation.
        steps: Optimizer steps of one update.
        batch: Samples in one optimizer step.
        learning_rate: Learning rate.
    """

    every: int = 4096
    buffer: int = 65536
    window: int = 256
    top: int = 32
    held_out: int = 8
    steps: int = 12
    batch: int = 32
    learning_rate: float = 1e-4

    def __post_init__(self) -> None:
        minimums = {"buffer": self.every, "window": 2, "held_out": 2}
        for name in ("every", "buffer", "window", "top", "held_out", "steps", "batch"):
            integer(f"{name} of adapt", getattr(self, name), minimums.get(name, 1))
        if not 0 < self.learning_rate < 1:
            raise InvalidRequest(f"learning_rate of adapt must lie between 0 and 1, got {self.learning_rate!r}")

    @classmethod
    def of(cls, value: bool | Mapping[str, Any] | AdaptConfig) -> AdaptConfig:
        """Returns the configuration of a value as users write it; True is the default. Unknown keys raise
        InvalidRequest.
        """
        if isinstance(value, AdaptConfig):
            return value
        keys = dict(value) if isinstance(value, Mapping) else {}
        check_keys("adapt", keys, [f.name for f in fields(cls)])
        return cls(**keys)


@dataclass(frozen=True, slots=True)
class Update:
    """Outcome of one update.

    Attributes:
        before: Acceptance on held-out samples before it.
        after: Acceptance on held-out samples after it.
        taken: Whether the new version is used.
    """

    before: float
    after: float
    taken: bool


@dataclass(slots=True)
class _Rows:
    """Rows of one sequence that are not a sample yet."""

    ids: list[np.ndarray[Any, Any]] = field(default_factory=list)  # each [rows, k]
    log_p: list[np.ndarray[Any, Any]] = field(default_factory=list)
    rows: int = 0


class Adaptive(Wrapper):
    """Drafts with ``inner`` while ``student`` learns to do better.

    Attributes:
        history: Outcome of each update.
    """

    learns = True

    def __init__(self, inner: DraftModel, student: Student, config: AdaptConfig) -> None:
        super().__init__(inner)
        self.inner: DraftModel = inner
        self.student, self.config = student, config
        self.history: list[Update] = []
        self._open_rows: dict[int, _Rows] = {}
        self._samples: deque[tuple[TargetSpan, bool]] = deque()  # the oldest first, with whether it is held out
        self._num_samples, self._rows, self._rows_since_update = 0, 0, 0
        self._thread: threading.Thread | None = None
        self._finished: tuple[Update, Any] | None = None
        self._broken = False

    @property
    def samples(self) -> tuple[tuple[TargetSpan, bool], ...]:
        """The buffered samples, the oldest first, with whether each is held out."""
        return tuple(self._samples)

    @property
    def num_rows(self) -> int:
        """Number of buffered rows."""
        return self._rows

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        self._take_over()
        return self.inner.propose(contexts, budgets)

    def needs_of(self, context: Context) -> Needs:
        return replace(self.inner.needs_of(context), logits=True)

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
            self._thread.join()
        self._take_over()

    def save(self, folder: Path) -> None:
        """Writes the current draft as an ordinary checkpoint into an existing empty ``folder``."""
        self.wait()
        self.student.save(folder)

    # samples

    def _note(self, context: Context, observation: Observation) -> None:
        """Records the distributions of what was emitted: the root's row and those of the accepted nodes."""
        step, logits = observation.step, observation.scores.logits
        rows = [0, *(node + 1 for node in step.verdict.path)][: len(step.tokens)]
        log_p = torch.log_softmax(logits[rows].float(), -1)
        best = log_p.topk(min(self.config.top, log_p.shape[-1]), dim=-1, sorted=False)
        open_rows = self._open_rows.setdefault(context.id, _Rows())
        open_rows.ids.append(best.indices.cpu().numpy())
        open_rows.log_p.append(best.values.cpu().numpy())
        open_rows.rows += len(rows)
        self._rows_since_update += len(rows)
        if open_rows.rows >= self.config.window // 2:
            self._close(context)

    def _close(self, context: Context) -> None:
        """Makes a sample of a sequence's rows. The text's newest token has no row yet."""
        open_rows = self._open_rows.get(context.id)
        if open_rows is None or not open_rows.rows:
            return
        window = min(self.config.window, len(context.tokens) - 1)
        rows = min(open_rows.rows, window)
        tokens = np.array(context.tokens[-window - 1 : -1], dtype=np.int64)
        sample = TargetSpan(tokens, np.concatenate(open_rows.ids)[-rows:], np.concatenate(open_rows.log_p)[-rows:])
        self._open_rows[context.id] = _Rows()
        self._samples.append((sample, self._num_samples % self.config.held_out == 0))
        self._num_samples += 1
        self._rows += len(sample)
        while self._rows > self.config.buffer:
            self._rows -= len(self._samples.popleft()[0])

    # training

    def _learn(self, samples: list[TargetSpan], held_out: list[TargetSpan]) -> None:
        """Runs one update in a thread of its own, on one core. The version in use is not modified."""
        try:
            torch.set_num_threads(1)
            before, old = self.student.acceptance(held_out), self.student.snapshot()
            self.student.learn(samples, self.config.steps)
            after = self.student.acceptance(held_out)
            taken = after >= before
            if not taken:
                self.student.restore(old)
            self._finished = Update(before, after, taken), self.student.model() if taken else None
        except Exception as error:  # an unchanged draft still works
            self._broken = True
            _log.warning("the draft stops learning: %s: %s", type(error).__name__, error)

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


def adaptive(proposer: Proposer, draft: str | Path | None, config: AdaptConfig) -> Adaptive:
    """Returns ``proposer`` with a student of the draft in ``draft``. Raises InvalidRequest if it cannot learn."""
    if not isinstance(proposer, DraftModel) or draft is None:
        raise InvalidRequest(f"adapt=True needs method 'draft_model' with a draft from a folder, not {proposer.name!r}")
    if isinstance(proposer, ParallelDraftModel):
        raise InvalidRequest(
            "adapt=True teaches a draft the next token, and this one predicts all positions in one pass; set "
            "parallel_drafting to false, or leave adapt out"
        )
    from foretoken.models.formats.checkpoint import resolve

    return Adaptive(proposer, Student(resolve(draft), proposer.model, config.learning_rate, config.batch), config)

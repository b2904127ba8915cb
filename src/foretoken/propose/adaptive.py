"""Online re-alignment: a draft that learns from every row its target verifies (2310.07177, 2310.08461).

What the target said about the text it has just emitted is a free lesson. Lessons wait in a bounded buffer; a thread
trains a twin of the draft on them and hands over a finished version, which takes over between two rounds. Within a
round the draft is one and the same, and the law that travels with its tokens is the one they were drawn from, so
nothing about exactness changes. Some lessons are held out: a version that does worse on them is rolled back.

One draft serves all requests, so requests with a ``cache_salt`` teach it nothing: it could repeat their text to others.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretoken.core.checks import integer
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.student import Lesson, Student
from foretoken.propose.base import Observation, Proposer, Wrapper
from foretoken.propose.draft_model import DraftModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdaptConfig:
    """When and how a draft learns.

    every: verified rows between two updates. buffer: rows that are kept, the newest. window: tokens before and among
    them that the draft sees. top: likeliest tokens kept of each law. held_out: one lesson in so many is for judging.
    steps, batch, learning_rate: of one update.
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
        for name, least in (("every", 1), ("buffer", self.every), ("window", 2), ("top", 1), ("held_out", 2),
                            ("steps", 1), ("batch", 1)):  # fmt: skip
            integer(f"{name} of adapt", getattr(self, name), least)
        if not 0 < self.learning_rate < 1:
            raise InvalidRequest(f"learning_rate of adapt must lie between 0 and 1, got {self.learning_rate!r}")

    @classmethod
    def of(cls, value: bool | Mapping[str, Any] | AdaptConfig) -> AdaptConfig:
        """True is the default; unknown keys are an error that lists the known ones."""
        if isinstance(value, AdaptConfig):
            return value
        given = dict(value) if isinstance(value, Mapping) else {}
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise InvalidRequest(f"unknown key(s) in adapt: {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(**given)


@dataclass(frozen=True, slots=True)
class Update:
    """What became of one update: acceptance on held-out lessons before and after, and whether it was taken."""

    before: float
    after: float
    taken: bool


@dataclass(slots=True)
class _Notes:
    """Rows of one sequence that are not a lesson yet."""

    ids: list[np.ndarray[Any, Any]] = field(default_factory=list)  # each [rows, k]
    log_p: list[np.ndarray[Any, Any]] = field(default_factory=list)
    rows: int = 0


class Adaptive(Wrapper):
    """``inner``, and a ``student`` that learns to do better. ``history`` says what became of each update."""

    def __init__(self, inner: DraftModel, student: Student, config: AdaptConfig) -> None:
        super().__init__(inner)
        self.inner: DraftModel = inner
        self.learns, self.student, self.config = True, student, config
        self.history: list[Update] = []
        self._notes: dict[int, _Notes] = {}
        self._lessons: deque[tuple[Lesson, bool]] = deque()  # the oldest first, and whether it is held out
        self._made, self._rows, self._since = 0, 0, 0
        self._thread: threading.Thread | None = None
        self._finished: tuple[Update, Any] | None = None
        self._broken = False

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        self._take_over()
        return self.inner.propose(contexts, budgets)

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for context, observation in zip(contexts, observations, strict=True):
            if context.cache_salt is None:
                self._note(context, observation)
        self.inner.observe(contexts, observations)
        if self._since >= self.config.every and self._thread is None and not self._broken:
            lessons = [lesson for lesson, held_out in self._lessons if not held_out]
            held_out = [lesson for lesson, held_out in self._lessons if held_out]
            if lessons and held_out:
                self._since = 0
                work = (lessons, held_out)
                self._thread = threading.Thread(target=self._learn, args=work, name="foretoken-adapt", daemon=True)
                self._thread.start()

    def forget(self, context: Context) -> None:
        self._close(context)
        self._notes.pop(context.id, None)
        self.inner.forget(context)

    def wait(self) -> None:
        """Until the update that is under way, if any, is finished and in force."""
        if self._thread is not None:
            self._thread.join()
        self._take_over()

    def save(self, folder: Path) -> None:
        """The draft as it is now, an ordinary checkpoint in an existing empty ``folder``."""
        self.wait()
        self.student.save(folder)

    # lessons

    def _note(self, context: Context, observation: Observation) -> None:
        """The laws of what was emitted: the root's row and those of the accepted nodes."""
        step, logits = observation.step, observation.scores.logits
        rows = [0, *(node + 1 for node in step.verdict.path)][: len(step.tokens)]
        log_p = torch.log_softmax(logits[rows].float(), -1)
        best = log_p.topk(min(self.config.top, log_p.shape[-1]), dim=-1, sorted=False)
        notes = self._notes.setdefault(context.id, _Notes())
        notes.ids.append(best.indices.cpu().numpy())
        notes.log_p.append(best.values.cpu().numpy())
        notes.rows += len(rows)
        self._since += len(rows)
        if notes.rows >= self.config.window // 2:
            self._close(context)

    def _close(self, context: Context) -> None:
        """Make a lesson of a sequence's rows. The text's newest token has no row yet."""
        notes = self._notes.get(context.id)
        if notes is None or not notes.rows:
            return
        window = min(self.config.window, len(context.tokens) - 1)
        rows = min(notes.rows, window)
        tokens = np.array(context.tokens[-window - 1 : -1], dtype=np.int64)
        lesson = Lesson(tokens, np.concatenate(notes.ids)[-rows:], np.concatenate(notes.log_p)[-rows:])
        self._notes[context.id] = _Notes()
        self._lessons.append((lesson, self._made % self.config.held_out == 0))
        self._made += 1
        self._rows += len(lesson)
        while self._rows > self.config.buffer:
            self._rows -= len(self._lessons.popleft()[0])

    # updates

    def _learn(self, lessons: list[Lesson], held_out: list[Lesson]) -> None:
        """One update, in a thread of its own on one core; the version that serves is not touched."""
        try:
            torch.set_num_threads(1)
            before, old = self.student.acceptance(held_out), self.student.snapshot()
            self.student.learn(lessons, self.config.steps)
            after = self.student.acceptance(held_out)
            taken = after >= before
            if not taken:
                self.student.restore(old)
            self._finished = Update(before, after, taken), self.student.model() if taken else None
        except Exception as error:  # a draft that stays as it is harms nobody
            self._broken = True
            _log.warning("the draft stops learning: %s: %s", type(error).__name__, error)

    def _take_over(self) -> None:
        """Between two rounds, put a finished version in force."""
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
    """``proposer`` with a student of the draft in ``draft``. Raises InvalidRequest for what cannot learn."""
    if not isinstance(proposer, DraftModel) or draft is None:
        raise InvalidRequest(f"adapt=True needs method 'draft_model' with a draft from a folder, not {proposer.name!r}")
    from foretoken.models.checkpoint import resolve

    return Adaptive(proposer, Student(resolve(draft), proposer.model, config.learning_rate, config.batch), config)

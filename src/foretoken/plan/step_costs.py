"""Seconds of decode steps by draft length: steps of the real engine beside plain ones, in the engine's cost model.

A step includes drafting, the target's pass, sampling distributions, verification and the KV cache.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import count
from statistics import fmean, median, stdev
from time import perf_counter
from typing import NamedTuple

from foretoken.control.base import Controller
from foretoken.core.context import Context
from foretoken.core.distributions import Law
from foretoken.costs.model import CostModel
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.plan.texts import Prompt, contexts
from foretoken.propose.base import Proposer

PLAIN = ""  # name of plain decoding among the proposers
_COLD = 2  # steps, at least, that are not timed after another draft length: they load weights into caches
_SETTLING = 0.01  # seconds of such steps, at least: threads and clock rates follow the work
_PREFILLS = 3  # timed prefills of the same prompts
_DRIFT = 0.01  # relative error of any ratio of two times on one machine, however often measured
_ids = count(1 << 40)  # ids of contexts, unique across batches because batches share proposers


class TimedStep(NamedTuple):
    """Seconds of a batch's step, of drafting in it, and the rows of its pass."""

    seconds: float
    propose: float
    rows: int


class StepTime(NamedTuple):
    """Seconds of a batch's step, of drafting in it, of a plain step, and the relative error of step over plain step."""

    seconds: float
    propose: float
    plain: float
    error: float


class StepCosts:
    """Step times of one proposer at one batch size and temperature, by draft length.

    Each moment has a cost model of its own, calibrated by medians as at the engine's start; it knows draft lengths
    between the timed ones. The ratio to plain steps is the mean over the moments, from whose spread its error follows.
    """

    def __init__(self) -> None:
        self.moments: list[CostModel] = []

    def time(
        self, target: Model, proposer: Proposer, depths: Sequence[int], prompts: Sequence[Prompt], law: Law, steps: int
    ) -> None:
        """Times ``steps`` steps at each of ``depths``, and of plain decoding in their midst.

        Args:
            target: Target model.
            proposer: Drafts.
            depths: Draft lengths or tree sizes.
            prompts: One per sequence of the batch.
            law: Sampling distribution.
            steps: Timed steps of each.
        """
        passes: dict[int, list[float]] = defaultdict(list)
        drafting: dict[int, float] = {}
        with (
            closing(TimedBatch(target, Proposer(), prompts, law)) as plain,
            closing(TimedBatch(target, proposer, prompts, law)) as drafts,
        ):
            middle = len(depths) // 2
            for depth in (*depths[:middle], 0, *depths[middle:]):
                batch = drafts if depth else plain
                cold: list[float] = []
                while len(cold) < _COLD or sum(cold) < _SETTLING:
                    cold.append(batch.step(depth).seconds)
                timed = [batch.step(depth) for _ in range(steps)]
                for step in timed:
                    passes[step.rows].append(step.seconds - step.propose)
                if depth:
                    drafting[depth] = median(step.propose for step in timed)
        self.moments.append(CostModel())
        self.moments[-1].calibrate({rows: median(seconds) for rows, seconds in passes.items()}, drafting)

    def of(self, depth: int, batch: int, sizes: Mapping[int, float]) -> StepTime:
        """Returns the time of a step.

        Args:
            depth: Draft length.
            batch: Number of sequences.
            sizes: Fractions of the steps by number of draft tokens, of one sequence.
        """
        plain, drafting, steps = [], [], []  # by moment: seconds of a plain step, and of the others in plain steps
        for costs in self.moments:
            of_rows = costs.step_seconds(batch)
            plain.append(of_rows(batch))
            drafting.append(costs.drafting.seconds(depth, batch) / plain[-1])
            verified = sum(share * of_rows(batch * (1 + size)) for size, share in sizes.items())
            steps.append(drafting[-1] + verified / plain[-1])
        unit, over = fmean(plain), fmean(steps)
        spread = stdev(steps) / over / math.sqrt(len(steps)) if len(steps) > 1 else 0.0
        return StepTime(over * unit, fmean(drafting) * unit, unit, math.hypot(spread, _DRIFT))


def time_prefill(
    target: Model, proposers: Mapping[str, Proposer], prompts: Sequence[Prompt], law: Law
) -> dict[str, float]:
    """Returns the seconds of the step that holds a batch's prompts, by proposer, and in plain decoding (``PLAIN``).

    There must be no prefix cache yet. The first prefill, which reads weights that are in no cache, does not count.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(1 + _PREFILLS):
        for name, proposer in {PLAIN: Proposer(), **proposers}.items():
            with closing(TimedBatch(target, proposer, prompts, law)) as batch:
                seconds[name].append(batch.prefill)
    return {name: median(values[1:]) for name, values in seconds.items()}


class _Length(Controller):
    """Drafts ``depth`` tokens, which may change between steps."""

    depth = 1

    def budgets(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> list[int]:
        return [min(self.depth, left) for left in max_draft_tokens]


class TimedBatch:
    """A batch that is decoded without end. It restarts when a sequence reaches the model's length.

    Attributes:
        engine: Runs it.
        prefill: Seconds of the step that held the prompts.
    """

    def __init__(self, target: Model, proposer: Proposer, prompts: Sequence[Prompt], law: Law) -> None:
        self._prompts, self._law, self._length = prompts, law, _Length()
        self.engine = Engine(target, proposer, self._length, max_sequences=len(prompts))
        self._begin()

    def step(self, depth: int) -> TimedStep:
        """Runs and times a step with ``depth`` draft tokens for each sequence."""
        if len(self.engine.running) < len(self._prompts):
            self._begin()
        self._length.depth = depth
        started = perf_counter()
        steps = self.engine.step_or_raise()
        seconds = perf_counter() - started
        return TimedStep(seconds, steps[0].timings.propose, sum(len(step.draft) + 1 for step in steps))

    def close(self) -> None:
        self.engine.clear()

    def _begin(self) -> None:
        self.close()
        for context in contexts(self._prompts, self._law, 0):
            context.id = next(_ids)
            self.engine.add(context, Length(1 << 30))
        started = perf_counter()
        self.engine.step_or_raise()
        self.prefill = perf_counter() - started

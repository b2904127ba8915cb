"""Warm-up before the first request: steps on a synthetic prompt that measure passes and drafting.

The cost of an oversized draft model shows here, not in a request. The kernels are warm afterwards, too.
"""

import math
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from foretoken.control.base import Controller
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput
from foretoken.core.streams import Streams
from foretoken.costs.model import CostModel
from foretoken.engine.loop import Engine, draining
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.propose.base import Proposer

_PROMPT = 32  # tokens
_FIRST = (0, 1)  # prefill, and the tokens that the proposer missed
_COARSE = (0, 1, 2, 4, 8, 16)  # depths that are always timed; costs between them are interpolated
_FINE = (6, 7, 12)  # timed as well unless _SECONDS are over
_SWEEPS = 3  # their medians count, so that a slow moment has no effect; fewer if they take longer than
_SECONDS = 0.5


class _Script(Controller):
    """Drafts the given depths in turn.

    Args:
        costs: The cost model that learns from the steps.
        synthetic: Whether drafts are made up, so that their time does not matter.

    Attributes:
        passes: Seconds by rows.
        drafting: Seconds by depth, after the proposer's cache is up to date.
        settled: Fewest seconds of the last plain steps, if ``settle_steps`` of them followed each other.
    """

    def __init__(self, depths: Sequence[int], costs: CostModel, synthetic: bool = False) -> None:
        self._synthetic = synthetic
        self.depths, self.costs, self._costs = list(depths), costs, costs
        self.passes: dict[int, list[float]] = defaultdict(list)
        self.drafting: dict[int, list[float]] = defaultdict(list)
        self.settled = math.inf
        self._plain = 0  # plain steps since a draft
        self._depth, self._skip, self._end = 0, len(_FIRST), time.perf_counter() + _SECONDS

    def budgets(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> list[int]:
        self._depth = self.depths.pop(0) if self.depths else 0
        return [max(0, min(self._depth, left)) for left in max_draft_tokens]

    @property
    def pass_seconds(self) -> dict[int, float]:
        return {rows: median(seconds) for rows, seconds in self.passes.items()}

    def observe(self, contexts: Sequence[Context], steps: Sequence[StepOutput]) -> None:
        self._skip -= 1
        if self._skip >= 0:
            return
        timings = steps[0].timings
        self._plain = 0 if self._depth else self._plain + 1
        if self._plain > self._costs.tuning.settle_steps - _SWEEPS:
            self.settled = min(self.settled, timings.total)
        if self._plain > 1:
            return
        self.passes[sum(len(step.draft) + 1 for step in steps)].append(timings.total - timings.propose)
        if self._depth:
            self.drafting[self._depth].append(timings.propose)
            if not self._synthetic and timings.propose > self._costs.plain_seconds(
                1
            ):  # deeper drafts cannot be profitable
                self.depths = [depth for depth in self.depths if depth < self._depth]
        if time.perf_counter() > self._end:
            self.depths = [depth for depth in self.depths if depth in _COARSE[1:] and depth not in self.drafting]


class _Synthetic(Proposer):
    """Drafts chains of tokens that differ, to time their rows. Equal tokens would choose the same experts.

    vocab_size: Number of tokens of the target.
    """

    def __init__(self, vocab_size: int) -> None:
        self._random, self._vocab_size = random.Random(0), vocab_size

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [Draft.chain([self._random.randrange(self._vocab_size) for _ in range(budget)]) for budget in budgets]


def warm_up(target: Model, proposer: Proposer, costs: CostModel, max_tokens: int) -> None:
    """Calibrates ``costs`` with passes and drafts of up to ``max_tokens`` tokens.

    It needs space for 32 tokens and the drafts in the target's context window, and does nothing with less. Where
    drafting takes no time, or the proposer would learn from the synthetic prompt, only passes are timed; of a mixture,
    its model drafts alone. Passes of a model with experts are timed apart, over random tokens: what
    a proposer drafts on a synthetic prompt repeats itself, and would choose fewer experts than a text.

    Args:
        proposer: Drafts tokens.
        costs: The cost model; later steps of requests count more.
        max_tokens: Largest draft length.
    """
    sweep = [depth for depth in (*_COARSE, *_FINE) if depth <= max_tokens]
    emitted, settling = sum(depth + 1 for depth in sweep), [0] * costs.tuning.settle_steps
    space = target.max_length - max_tokens - 1 - sum(_FIRST) - len(_FIRST) - len(settling)
    sweeps = min(_SWEEPS, (space - 32) // emitted)
    if sweeps < 1 or not max_tokens:
        return
    length = min(_PROMPT, space - sweeps * emitted)
    timed = proposer.timed_part
    passes: dict[int, float] = {}
    drafting: dict[int, float] = {}
    missed = math.inf
    if timed is None or target.has_experts:
        script = _Script([*_FIRST, *(sweep * sweeps)], CostModel(), synthetic=True)
        _run(target, _Synthetic(target.vocab_size), script, length)
        passes = script.pass_seconds
    if timed is not None:
        # Memory is allocated in the first run, which makes missed tokens look slow, as a slow moment does.
        first = CostModel()
        _run(target, timed, _Script(_FIRST, first), length)
        script = _Script([*_FIRST, *(sweep * sweeps), *settling], costs)
        _run(target, timed, script, length)
        drafting = {depth: min(seconds) for depth, seconds in script.drafting.items()}  # others caused the rest
        passes, missed = passes or script.pass_seconds, first.drafting.missed(1) or missed
    costs.calibrate(passes, drafting, missed, script.settled)


def _run(target: Model, proposer: Proposer, script: _Script, length: int) -> None:
    """Runs the steps of a script on a prompt of ``length`` tokens."""
    tokens = [(7 * i + 1) % target.vocab_size for i in range(length)]
    source = tuple(tokens[: target.source_length])
    context = Context(-1, tokens, length, SamplingLaw(temperature=0.0), Streams(0), source=source)
    engine = Engine(target, proposer, script)
    with draining(engine, [context.id]):
        engine.add(context, Length(2**31))
        while script.depths:
            engine.step_or_raise()

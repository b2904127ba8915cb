"""Predicts the speedup of every proposer, draft length, temperature and batch on the user's text and machine.

Tokens per pass come from the target's own text (``replay``), step times from steps of the real engine beside plain
ones, in the engine's cost model. A step includes drafting, the target's pass, sampling distributions, verification and
the KV cache. The speedup of decoding is tokens per pass over the step's time in plain steps. Intervals are for another
run over as many requests of the same kind. They include the spread between requests twice, of the sample and of that
run, and the spread of the times. See ``statistics``.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean, median, stdev
from time import perf_counter
from typing import NamedTuple

from foretoken.control.base import Controller
from foretoken.core.context import Context
from foretoken.core.distributions import Law
from foretoken.core.errors import InvalidRequest
from foretoken.core.progress import Say
from foretoken.core.sampling import SamplingLaw
from foretoken.costs.model import CostModel
from foretoken.engine.footprint import split_kv_memory
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.plan.candidates import Candidate, PlanRow
from foretoken.plan.outcome import Plan
from foretoken.plan.predictors import Predictor, fitted
from foretoken.plan.replay import Proposers, Sample, chain_of, write
from foretoken.plan.texts import AcceptanceEstimate, Prompt, SampledText, contexts, repeated
from foretoken.propose.base import Proposer
from foretoken.speculation import SpeculativeConfig

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


_MOMENTS = 6  # moments at each temperature at which steps are timed
_TIMED = (1, 2, 4, 6, 8)  # draft lengths that are timed where there are many; others are interpolated
_NORMAL = 1.96  # standard errors in half an interval
_OPEN = 32  # open sequences at once, of which the KV cache is kept


def timed_depths(depths: Sequence[int]) -> list[int]:
    """Returns the draft lengths that are timed: all of a few, some of many, always the deepest."""
    return list(depths) if len(depths) <= len(_TIMED) else [d for d in depths if d in _TIMED or d == max(depths)]


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Settings of a plan."""

    temperatures: Sequence[float] = (0.0, 1.0)
    batches: Sequence[int] = (1,)  # numbers of sequences at once
    max_tokens: int = 64  # greatest number of tokens per request
    turns: int = 24  # timed steps of every candidate, spread over several moments of the plan
    top_p: float = 1.0
    seed: int = 0  # of the target's texts

    def __post_init__(self) -> None:
        if self.max_tokens < 8:
            raise InvalidRequest(f"max_tokens must be at least 8 to tell steps apart, got {self.max_tokens}")
        if not self.temperatures or not self.batches:
            raise InvalidRequest("a plan needs a temperature and a batch at least")

    def law(self, temperature: float) -> SamplingLaw:
        """Returns the sampling distribution at one temperature."""
        return SamplingLaw(temperature=float(temperature), top_p=float(self.top_p))


@dataclass
class Planner:
    """Plans for one target."""

    target: Model  # target model
    # builds a proposer from a configuration, as ``speculation.Builder.build`` does
    build: Callable[[SpeculativeConfig], Proposer]
    settings: PlanSettings  # what to plan for
    eos: Collection[int] = ()  # ids of end-of-text tokens
    say: Say = lambda what, share: None  # reports progress
    _done: float = field(default=0.0, init=False)  # units of work: texts, candidates, and candidates that are timed
    _total: float = field(default=1.0, init=False)

    def plan(
        self,
        prompts: Sequence[Prompt],  # tokenized prompts, or their token ids
        candidates: Sequence[Candidate],  # ways to speculate
        # token ids that the target sampled after each prompt, if known; None lets it sample
        completions: Sequence[Sequence[int]] | None = None,
    ) -> Plan:
        """Measures and predicts.

        Raises:
            InvalidRequest: There are no prompts or candidates, or the prompts do not fit the target.
        """
        if not prompts or not candidates:
            raise InvalidRequest("a plan needs a prompt and a way to speculate at least")
        settings, proposers = self.settings, Proposers(self.build)
        built = {candidate.name: proposers.get(candidate) for candidate in candidates}
        taps = sorted({tap for proposer in built.values() for tap in proposer.needs.taps})
        batches, temperatures = settings.batches, settings.temperatures
        self._done, self._total = 0.0, len(batches) + len(temperatures) * (1 + len(candidates) * (1 + len(batches)))
        prefills = {}
        for batch in batches:
            self._next(f"prefill, batch {batch}")
            prefills[batch] = time_prefill(self.target, built, repeated(prompts, batch), settings.law(temperatures[0]))
        for proposer in built.values():  # from here on each prompt's KV cache is computed once
            split_kv_memory(self.target, proposer, None, True, _OPEN)
        rows: list[PlanRow] = []
        predictors: dict[tuple[str, float], list[Predictor]] = {}
        for temperature in temperatures:
            law = settings.law(temperature)
            self._next(f"sampling texts at temperature {temperature:g}")
            sample = Sample(self.target, law, self._texts(prompts, completions, law), self.eos, proposers, taps)
            estimates, times = self._measure(sample, candidates)
            decoded = fmean(len(text.tokens) for text in sample.texts) - 1
            for batch in batches:
                for candidate in candidates:
                    first = prefills[batch][PLAIN], prefills[batch][candidate.name]
                    for depth in candidate.depths:
                        estimate, costs = estimates[candidate.name, depth], times[candidate.name, batch]
                        rows.append(_row(candidate, depth, temperature, batch, estimate, costs, first, decoded))
            predictors |= _predictors(sample, candidates, temperature)
        return Plan.of(rows, predictors=predictors)

    def _next(self, what: str, weight: float = 1.0) -> None:
        """Reports the beginning of ``what``, which is ``weight`` units of work."""
        self.say(what, min(1.0, self._done / self._total))
        self._done += weight

    def _measure(
        self, sample: Sample, candidates: Sequence[Candidate]
    ) -> tuple[dict[tuple[str, int], AcceptanceEstimate], dict[tuple[str, int], StepCosts]]:
        """Returns acceptance by candidate and draft length, and step times by candidate and batch.

        Steps are timed at several moments between the estimates, because a machine's speed changes.
        """
        estimates: dict[tuple[str, int], AcceptanceEstimate] = {}
        times: dict[tuple[str, int], StepCosts] = defaultdict(StepCosts)
        moments, law = min(_MOMENTS, self.settings.turns, len(candidates)), sample.law
        halfway = [text.after(len(text.tokens) // 2) for text in sample.texts]
        for i in range(moments):
            for candidate in candidates[i::moments]:
                for depth in candidate.depths:
                    self._next(f"{candidate.name} on its text", 1 / len(candidate.depths))
                    estimates[candidate.name, depth] = sample.estimate(candidate, depth)
            for batch in self.settings.batches:
                for candidate in candidates:
                    self._next(f"steps at temperature {law.temperature:g}, batch {batch}", 1 / moments)
                    proposer, depths = sample.proposers.get(candidate), timed_depths(candidate.depths)
                    steps, prompts = (self.settings.turns + i) // moments, repeated(halfway, batch)
                    times[candidate.name, batch].time(self.target, proposer, depths, prompts, law, steps)
        return estimates, times

    def _texts(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[int]] | None, law: SamplingLaw
    ) -> list[SampledText]:
        """Returns the sample. Raises InvalidRequest if every text ends at its first token."""
        limit = self.settings.max_tokens
        if completions is None:
            texts = write(self.target, prompts, law, limit, self.eos, self.settings.seed)
        else:
            texts = [
                SampledText(tuple(context.tokens), tuple(text[:limit]), limit, context.source)
                for context, text in zip(contexts(prompts, law, 0), completions, strict=True)
            ]
        if all(len(text.tokens) < 2 for text in texts):
            raise InvalidRequest("every text ends at once; give prompts that the target continues")
        return texts


def _row(
    candidate: Candidate,
    depth: int,
    temperature: float,
    batch: int,
    estimate: AcceptanceEstimate,
    costs: StepCosts,
    first: tuple[float, float],
    decoded: float,
) -> PlanRow:
    """Returns the prediction for one candidate and draft length. first, decoded: see ``PlanRow.predicted``."""
    time = costs.of(depth, batch, estimate.sizes)
    return PlanRow.predicted(
        candidate,
        depth,
        tokens=estimate.tokens_per_pass,
        tokens_width=estimate.spread,
        seconds_width=math.sqrt(2) * _NORMAL * time.error,
        first=first,
        decoded=decoded,
        temperature=temperature,
        batch=batch,
        step_seconds=time.seconds,
        draft_seconds=time.propose,
        plain_seconds=time.plain,
        acceptance=estimate.acceptance,
        estimator=estimate.estimator,
        requests=estimate.requests,
    )


def _predictors(
    sample: Sample, candidates: Sequence[Candidate], temperature: float
) -> dict[tuple[str, float], list[Predictor]]:
    """Returns the predictors of each draft model's acceptance on a request."""
    result = {}
    for candidate in candidates:
        draft = chain_of(sample.proposers.get(candidate))
        if draft is not None and len(sample.texts) >= 3:
            probabilities, facts = sample.chains(candidate, draft)
            result[candidate.name, temperature] = fitted(facts, [text.acceptance for text in probabilities])
    return result

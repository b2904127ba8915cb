"""Predicts the speedup of every proposer, draft length, temperature and batch on the user's text and machine.

Tokens per pass come from the target's own text (``sample``), step times from real steps (``step_timing``). The speedup
of decoding is tokens per pass over the step's time in plain steps. Intervals are for another run over as many requests
of the same kind. They include the spread between requests twice, of the sample and of that run, and the spread of the
times. See ``statistics``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from foretoken.core.errors import InvalidRequest
from foretoken.core.progress import Say
from foretoken.core.sampling import SamplingLaw
from foretoken.engine.kv_budget import split_kv_memory
from foretoken.models.base import Model
from foretoken.plan.candidates import Candidate
from foretoken.plan.outcome import Plan
from foretoken.plan.predictors import Predictor, fitted
from foretoken.plan.replay import write
from foretoken.plan.rows import PlanRow
from foretoken.plan.sample import Proposers, Sample, chain_of
from foretoken.plan.statistics import around
from foretoken.plan.step_times import MeasuredStepTimes, PassTimes, StepTime
from foretoken.plan.step_timing import (
    MAX_OPEN,
    PrefillTiming,
    Visit,
    halfway_prompts,
    time_lanes,
    time_plain_pass,
    time_prefill,
)
from foretoken.plan.tally import AcceptanceEstimate
from foretoken.plan.texts import Prompt, SampledText, contexts
from foretoken.propose.base import Proposer
from foretoken.speculation import SpeculativeConfig

_MOMENTS = 6  # moments at each temperature at which steps are timed
_TIMED = (1, 2, 4, 6, 8)  # draft lengths that are timed where there are many; others are interpolated
_NORMAL = 1.96  # standard errors in half an interval


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
    """Plans for one target.

    Args:
        target: Target model.
        build: Builds a proposer from a configuration, as ``speculation.Builder.build`` does.
        settings: What to plan for.
        eos: Ids of end-of-text tokens.
        say: Reports progress.
    """

    target: Model
    build: Callable[[SpeculativeConfig], Proposer]
    settings: PlanSettings
    eos: Collection[int] = ()
    say: Say = lambda what, share: None
    _done: float = field(default=0.0, init=False)  # units of work: texts, candidates and timed lanes
    _total: float = field(default=1.0, init=False)

    def plan(
        self,
        prompts: Sequence[Prompt],
        candidates: Sequence[Candidate],
        completions: Sequence[Sequence[int]] | None = None,
    ) -> Plan:
        """Measures and predicts.

        Args:
            prompts: Tokenized prompts, or their token ids.
            candidates: Ways to speculate.
            completions: Token ids that the target sampled after each prompt, if known. None lets it sample.

        Raises:
            InvalidRequest: There are no prompts or candidates, or the prompts do not fit the target.
        """
        if not prompts or not candidates:
            raise InvalidRequest("a plan needs a prompt and a way to speculate at least")
        settings, proposers = self.settings, Proposers(self.build)
        built = {candidate.name: proposers.get(candidate) for candidate in candidates}
        taps = sorted({tap for proposer in built.values() for tap in proposer.needs.taps})
        lanes, batches = sum(len(timed_depths(candidate.depths)) for candidate in candidates), len(settings.batches)
        self._done, self._total = 0.0, batches + len(settings.temperatures) * (1 + len(candidates) + lanes * batches)
        prefills = {}
        for batch in settings.batches:
            self._next(f"prefill, batch {batch}")
            together = [prompts[i % len(prompts)] for i in range(batch)]
            prefills[batch] = time_prefill(self.target, built, together, settings.law(settings.temperatures[0]))
        for proposer in built.values():  # from here on each prompt's KV cache is computed once
            split_kv_memory(self.target, proposer, None, True, MAX_OPEN)
        measurements: list[_Measurements] = []
        predictors: dict[tuple[str, float], list[Predictor]] = {}
        for temperature in settings.temperatures:
            law = settings.law(temperature)
            self._next(f"sampling texts at temperature {temperature:g}")
            sample = Sample(self.target, law, self._texts(prompts, completions, law), self.eos, proposers, taps)
            measurements.append(self._measure(sample, candidates))
            predictors |= _predictors(sample, candidates, temperature)
        return Plan.of(list(self._rows(measurements, candidates, prefills)), predictors=predictors)

    def _next(self, what: str, weight: float = 1.0) -> None:
        """Reports the beginning of ``what``, which is ``weight`` units of work."""
        self.say(what, min(1.0, self._done / self._total))
        self._done += weight

    def _measure(self, sample: Sample, candidates: Sequence[Candidate]) -> _Measurements:
        """Estimates acceptance and times steps.

        Steps are timed at several moments, because a machine's speed changes; plain passes between all estimates.
        """
        result = _Measurements(sample.texts)
        moments, batches = min(_MOMENTS, self.settings.turns, len(candidates)), self.settings.batches
        halfway = {batch: halfway_prompts(sample.texts, batch) for batch in batches}
        for i in range(moments):
            for candidate in candidates[i::moments]:
                for depth in candidate.depths:
                    self._next(f"{candidate.name} on its text", 1 / len(candidate.depths))
                    result.estimates[candidate.name, depth] = sample.estimate(candidate, depth)
                    for batch in batches:
                        result.plain_passes[batch].append(time_plain_pass(self.target, halfway[batch], sample.law))
            for batch in batches:
                visit = self._visit(sample, candidates, halfway[batch], (self.settings.turns + i) // moments)
                result.visits[batch].append(visit)
        return result

    def _rows(
        self,
        measurements: Sequence[_Measurements],
        candidates: Sequence[Candidate],
        prefills: Mapping[int, PrefillTiming],
    ) -> Iterator[PlanRow]:
        passes = {
            batch: PassTimes(
                [visit for each in measurements for visit in each.visits[batch]],
                [seconds for each in measurements for seconds in each.plain_passes[batch]],
            )
            for batch in self.settings.batches
        }
        for temperature, each in zip(self.settings.temperatures, measurements, strict=True):
            for batch in self.settings.batches:
                times = MeasuredStepTimes(each.visits[batch], batch, passes[batch])
                for candidate in candidates:
                    for depth in candidate.depths:
                        yield each.row(candidate, depth, temperature, batch, times, prefills[batch])

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

    def _visit(self, sample: Sample, candidates: Sequence[Candidate], prompts: Sequence[Prompt], turns: int) -> Visit:
        """Times ``turns`` steps of every timed candidate and draft length."""
        lanes = {
            _lane(candidate, depth): (sample.proposers.get(candidate), depth)
            for candidate in candidates
            for depth in timed_depths(candidate.depths)
        }
        what = f"steps at temperature {sample.law.temperature:g}, batch {len(prompts)}"
        self._next(what, 0.0)
        return time_lanes(
            self.target, lanes, prompts, sample.law, turns, lambda steps: self._next(what, steps / self.settings.turns)
        )


@dataclass
class _Measurements:
    """Measurements at one temperature."""

    texts: Sequence[SampledText]  # the sample
    estimates: dict[tuple[str, int], AcceptanceEstimate] = field(default_factory=dict)  # by candidate and draft length
    visits: dict[int, list[Visit]] = field(default_factory=lambda: defaultdict(list))  # by batch, one per moment
    plain_passes: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # seconds, by batch

    def row(
        self,
        candidate: Candidate,
        depth: int,
        temperature: float,
        batch: int,
        times: MeasuredStepTimes,
        prefill: PrefillTiming,
    ) -> PlanRow:
        """Returns the prediction for one candidate and draft length."""
        estimate = self.estimates[candidate.name, depth]
        time = _time(candidate, depth, times, estimate)
        mean, width = estimate.tokens_per_pass, estimate.spread
        speedup, off = mean / time.over_plain, math.hypot(width, math.sqrt(2) * _NORMAL * time.error)
        (fewest, most), (low, high) = around(mean, width), around(speedup, off)
        plain = prefill.seconds + (fmean(len(text.tokens) for text in self.texts) - 1) * times.plain
        steps = sum(estimate.steps) / max(1, len(estimate.tallies))
        return PlanRow(
            name=candidate.name,
            method=candidate.method,
            config=candidate.at(depth),
            temperature=temperature,
            batch=batch,
            tokens_per_pass=mean,
            tokens_per_pass_low=fewest,
            tokens_per_pass_high=most,
            speedup=speedup,
            low=low,
            high=high,
            end_to_end=plain / (prefill.seconds * prefill.over_plain[candidate.name] + steps * time.seconds),
            step_seconds=time.seconds,
            draft_seconds=time.propose,
            plain_seconds=times.plain,
            acceptance=estimate.acceptance,
            estimator=estimate.estimator,
            requests=estimate.requests,
        )


def _lane(candidate: Candidate, depth: int) -> str:
    """Returns the name under which a candidate's draft length is timed."""
    return f"{candidate.name} @ {depth}"


def _time(candidate: Candidate, depth: int, times: MeasuredStepTimes, estimate: AcceptanceEstimate) -> StepTime:
    """Returns the time of a step, interpolated where the draft length was not timed."""
    near = timed_depths(candidate.depths)
    low, high = max(d for d in near if d <= depth), min(d for d in near if d >= depth)
    start, end = (times.of(_lane(candidate, d), estimate.sizes) for d in (low, high))
    share = (depth - low) / (high - low) if low < high else 0.0
    return StepTime(*((1 - share) * a + share * b for a, b in zip(start, end, strict=True)))


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

"""Predicts the speedup of every proposer, draft length, temperature and batch on the user's text and machine.

Tokens per pass come from the target's own text (``sample``), step times from real steps (``step_timing``). The speedup
of decoding is tokens per pass over the step's time in plain steps. Intervals are for another run over as many requests
of the same kind. They include the spread between requests twice, of the sample and of that run, and the spread of the
times. See ``statistics``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.engine.kv_budget import split_kv_memory
from foretoken.models.base import Model
from foretoken.plan.candidates import Candidate
from foretoken.plan.outcome import Plan, choices, mark_best
from foretoken.plan.predictions import Place, lane_name, predicted_row, timed_depths
from foretoken.plan.predictors import Predictor, fitted
from foretoken.plan.rows import PlanRow
from foretoken.plan.sample import Proposers, Sample, chain_of
from foretoken.plan.step_times import MeasuredStepTimes, PassTimes
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
from foretoken.plan.texts import Prompt, SampledText, contexts, write
from foretoken.propose.base import Proposer
from foretoken.speculation import SpeculativeConfig

_MOMENTS = 6  # moments at each temperature at which steps are timed
PredictorsByDraft = dict[tuple[str, float], list[Predictor]]
"""Predictors by draft and temperature."""
Say = Callable[[str, float], None]
"""Reports progress: what is being done, and the share of the whole that is done."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Settings of a plan.

    Args:
        temperatures: Sampling temperatures.
        batches: Numbers of sequences at once.
        max_tokens: Greatest number of tokens per request.
        turns: Timed steps of every candidate, spread over several moments of the plan.
        top_p: Nucleus sampling.
        seed: Seed of the target's texts.
    """

    temperatures: Sequence[float] = (0.0, 1.0)
    batches: Sequence[int] = (1,)
    max_tokens: int = 64
    turns: int = 24
    top_p: float = 1.0
    seed: int = 0

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
        proposers = Proposers(self.build)
        built = {candidate.name: proposers.get(candidate) for candidate in candidates}
        taps = sorted({tap for proposer in built.values() for tap in proposer.needs.taps})
        progress = _Progress(self.say, self.settings, candidates)
        prefills = self._time_prefills(prompts, built, progress)
        for proposer in built.values():  # from here on each prompt's KV cache is computed once
            split_kv_memory(self.target, proposer, None, True, MAX_OPEN)
        measurements: list[_Measurements] = []
        predictors: PredictorsByDraft = {}
        for temperature in self.settings.temperatures:
            law = self.settings.law(temperature)
            progress.next(f"sampling texts at temperature {temperature:g}")
            sample = Sample(self.target, law, self._texts(prompts, completions, law), self.eos, proposers, taps)
            measurements.append(self._measure(sample, candidates, progress))
            predictors |= _predictors(sample, candidates, temperature)
        rows = list(self._rows(measurements, candidates, prefills))
        return Plan(tuple(mark_best(rows)), tuple(choices(rows)), predictors)

    def _time_prefills(
        self, prompts: Sequence[Prompt], proposers: Mapping[str, Proposer], progress: _Progress
    ) -> dict[int, PrefillTiming]:
        """Returns the time of prefill by batch."""
        law, result = self.settings.law(self.settings.temperatures[0]), {}
        for batch in self.settings.batches:
            progress.next(f"prefill, batch {batch}")
            together = [prompts[i % len(prompts)] for i in range(batch)]
            result[batch] = time_prefill(self.target, proposers, together, law)
        return result

    def _measure(self, sample: Sample, candidates: Sequence[Candidate], progress: _Progress) -> _Measurements:
        """Estimates acceptance and times steps.

        Steps are timed at several moments, because a machine's speed changes; plain passes between all estimates.
        """
        result = _Measurements(sample.texts)
        moments = min(_MOMENTS, self.settings.turns, len(candidates))
        for i in range(moments):
            for candidate in candidates[i::moments]:
                for depth in candidate.depths:
                    progress.next(f"{candidate.name} on its text", 1 / len(candidate.depths))
                    result.estimates[candidate.name, depth] = sample.estimate(candidate, depth)
                    self._time_plain(sample, result)
            turns = (self.settings.turns + i) // moments
            for batch in self.settings.batches:
                result.visits[batch].append(self._visit(sample, candidates, batch, turns, progress))
        return result

    def _time_plain(self, sample: Sample, result: _Measurements) -> None:
        for batch in self.settings.batches:
            result.plain_passes[batch].append(
                time_plain_pass(self.target, halfway_prompts(sample.texts, batch), sample.law)
            )

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
            tokens = fmean(len(text.tokens) for text in each.texts)
            for batch in self.settings.batches:
                times = MeasuredStepTimes(each.visits[batch], batch, passes[batch])
                place = Place(temperature, batch, tokens, times, prefills[batch])
                for candidate in candidates:
                    for depth in candidate.depths:
                        yield predicted_row(candidate, depth, place, each.estimates[candidate.name, depth])

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

    def _visit(
        self, sample: Sample, candidates: Sequence[Candidate], batch: int, turns: int, progress: _Progress
    ) -> Visit:
        """Times ``turns`` steps of every timed candidate and draft length."""
        lanes = {
            lane_name(candidate, depth): (sample.proposers.get(candidate), depth)
            for candidate in candidates
            for depth in timed_depths(candidate.depths)
        }
        what = f"steps at temperature {sample.law.temperature:g}, batch {batch}"
        progress.next(what, 0.0)
        tick = partial(self._tick, progress, what)
        return time_lanes(self.target, lanes, halfway_prompts(sample.texts, batch), sample.law, turns, tick)

    def _tick(self, progress: _Progress, what: str, steps: int) -> None:
        progress.next(what, steps / self.settings.turns)


@dataclass
class _Measurements:
    """Measurements at one temperature.

    Args:
        texts: The sample.
        estimates: Acceptance by candidate and draft length.
        visits: Timed steps by batch, one visit per moment.
        plain_passes: Seconds of plain passes between the moments, by batch.
    """

    texts: Sequence[SampledText]
    estimates: dict[tuple[str, int], AcceptanceEstimate] = field(default_factory=dict)
    visits: dict[int, list[Visit]] = field(default_factory=lambda: defaultdict(list))
    plain_passes: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


class _Progress:
    """Counts finished units of work: texts, candidates and timed lanes."""

    def __init__(self, say: Say, settings: PlanSettings, candidates: Sequence[Candidate]) -> None:
        lanes = sum(len(timed_depths(candidate.depths)) for candidate in candidates)
        batches = len(settings.batches)
        self._total = batches + len(settings.temperatures) * (1 + len(candidates) + lanes * batches)
        self._say, self._done = say, 0.0

    def next(self, what: str, weight: float = 1.0) -> None:
        """Reports the beginning of ``what``, which is ``weight`` units of work."""
        self._say(what, min(1.0, self._done / self._total))
        self._done += weight


def _predictors(sample: Sample, candidates: Sequence[Candidate], temperature: float) -> PredictorsByDraft:
    """Returns the predictors of each draft model's acceptance on a request."""
    result: PredictorsByDraft = {}
    for candidate in candidates:
        draft = chain_of(sample.proposers.get(candidate))
        if draft is not None and len(sample.texts) >= 3:
            chains = sample.chains(candidate, draft)
            accepted = [text.acceptance for text in chains.probabilities]
            result[candidate.name, temperature] = fitted(chains.statistics, accepted)
    return result

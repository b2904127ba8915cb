"""What speculation would gain on the user's text and machine, for every proposer, depth, temperature and batch.

Tokens per pass come from the target's own text (``sample``), the time of a round from rounds that are run
(``rounds``); the gain in decoding is tokens per pass over the round's time in plain steps. Intervals say what another
run over as many requests of the same kind would give: they hold the spread between requests twice (the sample's and
that run's), and the spread of the times. See ``statistics``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.engine.kv_budget import split_kv_memory
from foretoken.models.base import Model
from foretoken.plan.candidates import Candidate
from foretoken.plan.outcome import Plan, choices, mark
from foretoken.plan.predictors import Predictor, fitted
from foretoken.plan.rounds import OPEN, PrefillTiming, Visit, midway, plain_pass, reading, timed
from foretoken.plan.rows import PlanRow
from foretoken.plan.sample import Proposers, Sample, chain_of
from foretoken.plan.statistics import ratio_interval
from foretoken.plan.tally import AcceptanceEstimate
from foretoken.plan.texts import SampledText, Start, contexts, write
from foretoken.plan.times import PassTimes, RoundTime, Times
from foretoken.propose.base import Proposer
from foretoken.speculation import SpeculativeConfig

LEVEL = 0.95
_MOMENTS = 6  # at each temperature, at which rounds are timed
_TIMED = (1, 2, 4, 6, 8)  # of many depths, those whose rounds are timed; between them times are read off a line
_NORMAL = 1.96
Foretold = dict[tuple[str, float], list[Predictor]]  # by draft and temperature
Say = Callable[[str, float], None]  # what is being done, and the share of the whole that is


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What to plan for. turns: timed rounds of every candidate, at a few moments of the plan."""

    temperatures: Sequence[float] = (0.0, 1.0)
    batches: Sequence[int] = (1,)
    max_tokens: int = 64
    turns: int = 24
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 8:
            raise InvalidRequest(f"max_tokens must be at least 8 to tell rounds apart, got {self.max_tokens}")
        if not self.temperatures or not self.batches:
            raise InvalidRequest("a plan needs a temperature and a batch at least")

    def law(self, temperature: float) -> SamplingLaw:
        return SamplingLaw(temperature=float(temperature), top_p=float(self.top_p))


@dataclass
class Planner:
    """Plans for one target. build: makes a proposer of a configuration, as ``speculation.Builder`` does."""

    target: Model
    build: Callable[[SpeculativeConfig], Proposer]
    settings: PlanSettings
    eos: Collection[int] = ()
    say: Say = lambda what, share: None

    def plan(
        self,
        prompts: Sequence[Start],
        candidates: Sequence[Candidate],
        completions: Sequence[Sequence[int]] | None = None,
    ) -> Plan:
        """prompts: as they were read, or their token ids. completions: what the target wrote after them, where that
        is known; else it writes.

        Raises InvalidRequest for prompts that do not fit the target, or none.
        """
        if not prompts or not candidates:
            raise InvalidRequest("a plan needs a prompt and a way to speculate at least")
        proposers = Proposers(self.build)
        made = {candidate.name: proposers.get(candidate) for candidate in candidates}
        taps = sorted({tap for proposer in made.values() for tap in proposer.needs.taps})
        progress = _Progress(self.say, self.settings, candidates)
        readings = self._readings(prompts, made, progress)
        for proposer in made.values():  # from now on every prompt is read once
            split_kv_memory(self.target, proposer, None, True, OPEN)
        found: list[_Found] = []
        predictors: Foretold = {}
        for temperature in self.settings.temperatures:
            law = self.settings.law(temperature)
            progress.next(f"the target writes at temperature {temperature:g}")
            sample = Sample(self.target, law, self._texts(prompts, completions, law), self.eos, proposers, taps)
            found.append(self._found(sample, candidates, progress))
            predictors |= _predictors(sample, candidates, temperature)
        rows = list(self._rows(found, candidates, readings))
        return Plan(tuple(mark(rows)), tuple(choices(rows)), predictors)

    def _readings(
        self, prompts: Sequence[Start], proposers: Mapping[str, Proposer], progress: _Progress
    ) -> dict[int, PrefillTiming]:
        """By batch."""
        law, found = self.settings.law(self.settings.temperatures[0]), {}
        for batch in self.settings.batches:
            progress.next(f"reading prompts, batch {batch}")
            together = [prompts[i % len(prompts)] for i in range(batch)]
            found[batch] = reading(self.target, proposers, together, law)
        return found

    def _found(self, sample: Sample, candidates: Sequence[Candidate], progress: _Progress) -> _Found:
        """Rounds are timed at several moments, since a machine is now faster and now slower; plain passes at all."""
        found = _Found(sample.texts)
        moments = min(_MOMENTS, self.settings.turns, len(candidates))
        for i in range(moments):
            for candidate in candidates[i::moments]:
                for depth in candidate.depths:
                    progress.next(f"{candidate.name} on its text", 1 / len(candidate.depths))
                    found.estimates[candidate.name, depth] = sample.estimate(candidate, depth)
                    self._listen(sample, found)
            turns = (self.settings.turns + i) // moments
            for batch in self.settings.batches:
                found.visits[batch].append(self._visit(sample, candidates, batch, turns, progress))
        return found

    def _listen(self, sample: Sample, found: _Found) -> None:
        for batch in self.settings.batches:
            found.between[batch].append(plain_pass(self.target, midway(sample.texts, batch), sample.law))

    def _rows(
        self, found: Sequence[_Found], candidates: Sequence[Candidate], readings: Mapping[int, PrefillTiming]
    ) -> Iterator[PlanRow]:
        passes = {
            batch: PassTimes(
                [visit for each in found for visit in each.visits[batch]],
                [seconds for each in found for seconds in each.between[batch]],
            )
            for batch in self.settings.batches
        }
        for temperature, each in zip(self.settings.temperatures, found, strict=True):
            tokens = fmean(len(text.tokens) for text in each.texts)
            for batch in self.settings.batches:
                times = Times(each.visits[batch], batch, passes[batch])
                for candidate in candidates:
                    yield from _rows(candidate, temperature, batch, tokens, each.estimates, times, readings[batch])

    def _texts(
        self, prompts: Sequence[Start], completions: Sequence[Sequence[int]] | None, law: SamplingLaw
    ) -> list[SampledText]:
        """Raises InvalidRequest where no text has rounds to speak of."""
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
        """``turns`` rounds of everything that is timed."""
        lanes = {
            _lane(candidate, depth): (sample.proposers.get(candidate), depth)
            for candidate in candidates
            for depth in timed_depths(candidate.depths)
        }
        what = f"rounds at temperature {sample.law.temperature:g}, batch {batch}"
        progress.next(what, 0.0)
        return timed(
            self.target, lanes, midway(sample.texts, batch), sample.law, turns,
            lambda rounds: progress.next(what, rounds / self.settings.turns),
        )  # fmt: skip


@dataclass
class _Found:
    """At one temperature: what candidates do by name and depth, and by batch the visits that timed them.

    between: by batch, seconds of plain passes between these.
    """

    texts: Sequence[SampledText]
    estimates: dict[tuple[str, int], AcceptanceEstimate] = field(default_factory=dict)
    visits: dict[int, list[Visit]] = field(default_factory=lambda: defaultdict(list))
    between: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


class _Progress:
    """Counts what is done: texts, candidates and timed lanes alike."""

    def __init__(self, say: Say, settings: PlanSettings, candidates: Sequence[Candidate]) -> None:
        lanes = sum(len(timed_depths(candidate.depths)) for candidate in candidates)
        batches = len(settings.batches)
        self._total = batches + len(settings.temperatures) * (1 + len(candidates) + lanes * batches)
        self._say, self._done = say, 0.0

    def next(self, what: str, weight: float = 1.0) -> None:
        """``what`` begins, and takes a share of ``weight``."""
        self._say(what, min(1.0, self._done / self._total))
        self._done += weight


def timed_depths(depths: Sequence[int]) -> list[int]:
    """All of a few, some of many, the deepest always."""
    return list(depths) if len(depths) <= len(_TIMED) else [d for d in depths if d in _TIMED or d == max(depths)]


def _lane(candidate: Candidate, depth: int) -> str:
    return f"{candidate.name} @ {depth}"


def _time(candidate: Candidate, depth: int, times: Times, estimate: AcceptanceEstimate) -> RoundTime:
    """As timed, or on the line between the depths beside it."""
    near = timed_depths(candidate.depths)
    if depth in near:
        return times.of(_lane(candidate, depth), estimate.sizes)
    low, high = max(d for d in near if d < depth), min(d for d in near if d > depth)
    ends = [times.of(_lane(candidate, d), estimate.sizes) for d in (low, high)]
    share = (depth - low) / (high - low)

    def between(name: str) -> float:
        return float((1 - share) * getattr(ends[0], name) + share * getattr(ends[1], name))

    return RoundTime(**{name: between(name) for name in RoundTime.__dataclass_fields__})


def _rows(
    candidate: Candidate,
    temperature: float,
    batch: int,
    tokens: float,
    estimates: dict[tuple[str, int], AcceptanceEstimate],
    times: Times,
    prompts: PrefillTiming,
) -> Iterator[PlanRow]:
    for depth in candidate.depths:
        estimate = estimates[candidate.name, depth]
        time = _time(candidate, depth, times, estimate)
        mean, width = estimate.tokens_per_pass, spread(estimate)
        gain, off = mean / time.over_plain, math.hypot(width, math.sqrt(2) * _NORMAL * time.error)
        plain = prompts.seconds + (tokens - 1) * times.plain
        own = prompts.seconds * prompts.over_plain[candidate.name]
        rounds = sum(estimate.rounds) / max(1, len(estimate.tallies))
        yield PlanRow(
            name=candidate.name, method=candidate.method, config=candidate.at(depth), temperature=temperature,
            batch=batch, tokens_per_pass=mean, tokens_per_pass_low=mean * _exp(-width),
            tokens_per_pass_high=mean * _exp(width), speedup=gain, low=gain * _exp(-off), high=gain * _exp(off),
            end_to_end=plain / (own + rounds * time.seconds), round_seconds=time.seconds,
            draft_seconds=time.propose, plain_seconds=times.plain, acceptance=estimate.acceptance,
            estimator=estimate.estimator, requests=estimate.requests,
        )  # fmt: skip


def spread(estimate: AcceptanceEstimate) -> float:
    """Half the interval's width in the logarithm, for another sample of as many requests; infinite for one request.

    That sample has one text of each, whose spread is that of all draws together times the root of their number.
    """
    if estimate.requests < 2:
        return math.inf
    mean, low, high = ratio_interval(estimate.tokens, estimate.rounds, LEVEL)
    return math.sqrt(1 + estimate.draws) * (high - low) / 2 / mean


def _exp(value: float) -> float:
    return 0.0 if value == -math.inf else math.exp(value) if value < 700 else math.inf


def _predictors(sample: Sample, candidates: Sequence[Candidate], temperature: float) -> Foretold:
    """For each draft model, what foretells the share of its drawn tokens that a request accepts."""
    found: Foretold = {}
    for candidate in candidates:
        draft = chain_of(sample.proposers.get(candidate))
        if draft is not None and len(sample.texts) >= 3:
            chains = sample.chains(candidate, draft)
            accepted = [ratios.acceptance for ratios in chains.ratios]
            found[candidate.name, temperature] = fitted(chains.statistics, accepted)
    return found

"""Predicts the speedup of every proposer, draft length, temperature and batch on the user's text and machine.

Tokens per pass come from the target's own text (``sample``), step times from real steps (``step_costs``). The speedup
of decoding is tokens per pass over the step's time in plain steps. Intervals are for another run over as many requests
of the same kind. They include the spread between requests twice, of the sample and of that run, and the spread of the
times. See ``statistics``.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from foretoken.core.errors import InvalidRequest
from foretoken.core.progress import Say
from foretoken.core.sampling import SamplingLaw
from foretoken.engine.kv_budget import split_kv_memory
from foretoken.models.base import Model
from foretoken.plan.candidates import Candidate, PlanRow
from foretoken.plan.outcome import Plan
from foretoken.plan.predictors import Predictor, fitted
from foretoken.plan.replay import write
from foretoken.plan.sample import Proposers, Sample, chain_of
from foretoken.plan.step_costs import PLAIN, StepCosts, time_prefill
from foretoken.plan.texts import AcceptanceEstimate, Prompt, SampledText, contexts, repeated
from foretoken.propose.base import Proposer
from foretoken.speculation import SpeculativeConfig

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
    _done: float = field(default=0.0, init=False)  # units of work: texts, candidates, and candidates that are timed
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

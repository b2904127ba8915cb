"""Texts that the target sampled at one temperature, and what every candidate does on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from foretoken.core.sampling import SamplingLaw
from foretoken.models.base import Model
from foretoken.plan.candidates import Candidate
from foretoken.plan.chains import TextProbabilities, chain_estimate, text_probabilities, token_distributions
from foretoken.plan.predictors import TextDistributions, statistics
from foretoken.plan.replay import NotReplayable, Recording, record, replay_estimate, step_estimate
from foretoken.plan.tally import AcceptanceEstimate
from foretoken.plan.texts import BATCH, SampledText
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel
from foretoken.speculation import SpeculativeConfig

_DRAWS = 3  # texts of each request for proposers that sample: their runs are noisier than replayed ones
_LEARNING_BATCH = 4  # requests at once of a proposer that learns: fewer is slower, more delays what it learns


@dataclass
class Proposers:
    """Builds proposers. Those that do not learn are built once."""

    build: Callable[[SpeculativeConfig], Proposer]
    _kept: dict[str, Proposer] = field(default_factory=dict)

    def get(self, candidate: Candidate) -> Proposer:
        """Returns a proposer that has learned nothing."""
        proposer = self._kept.get(candidate.name)
        if proposer is None:
            proposer = self.build(SpeculativeConfig.of(candidate.config))
            if not proposer.learns:
                self._kept[candidate.name] = proposer
        return proposer


@dataclass
class Sample:
    """Texts of one temperature."""

    target: Model  # the model that sampled them
    law: SamplingLaw
    texts: Sequence[SampledText]  # one per request
    eos: Collection[int]  # ids of end-of-text tokens
    proposers: Proposers  # of the candidates
    taps: Sequence[int] = ()  # layers whose hidden states any candidate needs
    _recordings: list[Recording] = field(default_factory=list)
    _chains: dict[str, Chains] = field(default_factory=dict)

    def estimate(self, candidate: Candidate, depth: int) -> AcceptanceEstimate:
        """Returns the estimate of the cheapest method that is unbiased for the candidate."""
        proposer = self.proposers.get(candidate)
        if (draft := chain_of(proposer)) is not None:
            chains = self.chains(candidate, draft)
            rejection = SpeculativeConfig.of(candidate.config).rejection
            return chain_estimate(chains.probabilities, draft.config.steps(depth), rejection, draft.model.max_length)
        if not proposer.needs.live_steps:
            self._recordings = self._recordings or record(self.target, self.texts, self.taps)
            try:
                batch = 1 if proposer.learns else BATCH
                return replay_estimate(self.target, self._recordings, proposer, self.law, depth, batch)
            except NotReplayable:
                pass
        if proposer.learns or self.law.greedy:
            return self._run(candidate, proposer, depth, _LEARNING_BATCH if proposer.learns else BATCH)
        estimate = self._run(candidate, proposer, depth, BATCH, _DRAWS)
        return self._adjusted(estimate, candidate, proposer, depth) if isinstance(proposer, DraftModel) else estimate

    def _run(
        self, candidate: Candidate, proposer: Proposer, depth: int, batch: int, draws: int = 1
    ) -> AcceptanceEstimate:
        prompts, limit = [text.start for text in self.texts] * draws, self.texts[0].limit
        rejection = SpeculativeConfig.of(candidate.config).rejection
        estimate = step_estimate(self.target, prompts, proposer, self.law, depth, limit, self.eos, rejection, batch)
        return replace(estimate, draws=draws)

    def _adjusted(
        self, estimate: AcceptanceEstimate, candidate: Candidate, draft: DraftModel, depth: int
    ) -> AcceptanceEstimate:
        """Adjusts an estimate from texts of its own to the sample's texts.

        The factor is how much easier the sample's are for a chain of the same draft, whose distribution is known on
        both (a ratio estimator). Without it, chance in the texts would decide between a tree and a chain.
        """
        steps, fixed = draft.config.steps(depth), _draft_law(draft, self.law).greedy
        distributions = _distributions(self.target, draft, estimate.texts, self.law)
        theirs = [text_probabilities(text, p, q, fixed) for text, p, q in distributions]
        ours = self.chains(candidate, draft).probabilities
        factor = chain_estimate(ours, steps).tokens_per_pass / chain_estimate(theirs, steps).tokens_per_pass
        return estimate.times(factor)

    def chains(self, candidate: Candidate, draft: DraftModel) -> Chains:
        """Returns the probabilities of every text for chains of any length. Computed once per candidate."""
        known = self._chains.get(candidate.name)
        if known is None:
            known = self._chains[candidate.name] = _chains(self.target, draft, self.texts, self.law)
        return known


@dataclass(frozen=True)
class Chains:
    """Probabilities and statistics of one draft model on every text, one of each per request."""

    probabilities: list[TextProbabilities]
    statistics: list[dict[str, float]]  # see ``predictors``; at temperature 0 those of temperature 1


def chain_of(proposer: Proposer) -> DraftModel | None:
    """Returns the proposer if it is a draft model that drafts chains of a length known beforehand, else None."""
    if not isinstance(proposer, DraftModel) or proposer.config.draft_stop is not None:
        return None
    return proposer if proposer.config.tree == "chain" else None


def _draft_law(draft: DraftModel, law: SamplingLaw) -> SamplingLaw:
    """Returns the distribution that the draft samples from."""
    own = draft.config.draft_temperature
    return law if own is None or law.greedy else law.with_temperature(own)


def _distributions(
    target: Model, draft: DraftModel, texts: Sequence[SampledText], law: SamplingLaw
) -> Iterator[tuple[SampledText, Tensor, Tensor]]:
    """Yields every text with the target's and the draft's distributions of its tokens, [n, V] each."""
    draft_law = _draft_law(draft, law)
    for text in texts:
        p = token_distributions(target, text, law, target.vocab_size)
        q = token_distributions(draft.model, text, draft_law, target.vocab_size)
        yield text, p, q


def _chains(target: Model, draft: DraftModel, texts: Sequence[SampledText], law: SamplingLaw) -> Chains:
    draft_law = _draft_law(draft, law)
    probabilities: list[TextProbabilities] = []
    facts: list[dict[str, float]] = []
    for text, p, q in _distributions(target, draft, texts, law):
        probabilities.append(text_probabilities(text, p, q, draft_law.greedy))
        if law.greedy or draft_law.greedy:
            warm = law.with_temperature(1.0) if law.greedy else law
            p, q = (token_distributions(model, text, warm, target.vocab_size) for model in (target, draft.model))
        facts.append(statistics(TextDistributions(p, q, text.tokens)))
    return Chains(probabilities, facts)

"""Texts that the target sampled at one temperature, and what every candidate does on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from foretoken.core.sampling import SamplingLaw
from foretoken.models.base import Model
from foretoken.plan.candidates import Candidate
from foretoken.plan.chains import TextProbabilities, chain_estimate, text_probabilities, token_distributions
from foretoken.plan.predictors import statistics
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
    _chains: dict[str, tuple[list[TextProbabilities], list[dict[str, float]]]] = field(default_factory=dict)

    def estimate(self, candidate: Candidate, depth: int) -> AcceptanceEstimate:
        """Returns the estimate of the cheapest method that is unbiased for the candidate."""
        proposer = self.proposers.get(candidate)
        if (draft := chain_of(proposer)) is not None:
            probabilities, _ = self.chains(candidate, draft)
            rejection = SpeculativeConfig.of(candidate.config).rejection
            return chain_estimate(probabilities, draft.config.steps(depth), rejection, draft.model.max_length)
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
        theirs = [probabilities for probabilities, *_ in self._probabilities(draft, estimate.texts)]
        both = (chain_estimate(each, draft.config.steps(depth)) for each in (self.chains(candidate, draft)[0], theirs))
        ours, others = (each.tokens_per_pass for each in both)
        return estimate.times(ours / others)

    def chains(self, candidate: Candidate, draft: DraftModel) -> tuple[list[TextProbabilities], list[dict[str, float]]]:
        """Returns the probabilities of every text for chains of any length, and ``predictors.statistics`` of it.

        Computed once per candidate. At temperature 0 the statistics are those of temperature 1.
        """
        if candidate.name not in self._chains:
            probabilities: list[TextProbabilities] = []
            facts: list[dict[str, float]] = []
            for text, p, q in self._probabilities(draft, self.texts):
                probabilities.append(text)
                if self.law.greedy or text.fixed:
                    warm = self.law.with_temperature(1.0) if self.law.greedy else self.law
                    p, q = (self._distribution(model, text.text, warm) for model in (self.target, draft.model))
                facts.append(statistics(p, q, text.text.tokens))
            self._chains[candidate.name] = probabilities, facts
        return self._chains[candidate.name]

    def _probabilities(
        self, draft: DraftModel, texts: Sequence[SampledText]
    ) -> Iterator[tuple[TextProbabilities, Tensor, Tensor]]:
        """Yields the probabilities of every text, and both models' distributions of its tokens, [n, V] each."""
        own = draft.config.draft_temperature
        draft_law = self.law if own is None or self.law.greedy else self.law.with_temperature(own)
        for text in texts:
            p = self._distribution(self.target, text, self.law)
            q = self._distribution(draft.model, text, draft_law)
            yield text_probabilities(text, p, q, draft_law.greedy), p, q

    def _distribution(self, model: Model, text: SampledText, law: SamplingLaw) -> Tensor:
        return token_distributions(model, text, law, self.target.vocab_size)


def chain_of(proposer: Proposer) -> DraftModel | None:
    """Returns the proposer if it is a draft model that drafts chains of a length known beforehand, else None."""
    if not isinstance(proposer, DraftModel) or proposer.config.draft_stop is not None:
        return None
    return proposer if proposer.config.tree == "chain" else None

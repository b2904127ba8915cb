"""The target's text at one temperature, and what every candidate would do on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from foretoken.core.sampling import SamplingLaw
from foretoken.models.base import Model
from foretoken.plan.candidates import Candidate
from foretoken.plan.chains import Ratios, expected, ratios, rows
from foretoken.plan.predictors import TextDistributions, statistics
from foretoken.plan.replay import NotReplayable, Recording, record, replayed, run
from foretoken.plan.tally import AcceptanceEstimate
from foretoken.plan.texts import TOGETHER, SampledText
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel
from foretoken.speculation import SpeculativeConfig

_DRAWS = 3  # texts of each request by rounds that draw, which have more luck in them than what is read off a text
_TOGETHER_LEARNING = 4  # requests that a proposer learns from at once: fewer is slower, more delays what it learns


@dataclass
class Proposers:
    """Makes proposers; those that learn nothing are made once."""

    build: Callable[[SpeculativeConfig], Proposer]
    _kept: dict[str, Proposer] = field(default_factory=dict)

    def get(self, candidate: Candidate) -> Proposer:
        """One that has learned nothing."""
        made = self._kept.get(candidate.name)
        if made is None:
            made = self.build(SpeculativeConfig.of(candidate.config))
            if not made.learns:
                self._kept[candidate.name] = made
        return made


@dataclass
class Sample:
    """See the module. taps: hidden states that any candidate wants."""

    target: Model
    law: SamplingLaw
    texts: Sequence[SampledText]
    eos: Collection[int]
    proposers: Proposers
    taps: Sequence[int] = ()
    _recordings: list[Recording] = field(default_factory=list)
    _chains: dict[str, Chains] = field(default_factory=dict)

    def estimate(self, candidate: Candidate, depth: int) -> AcceptanceEstimate:
        """By the cheapest estimator that is right for it."""
        proposer = self.proposers.get(candidate)
        if (draft := chain_of(proposer)) is not None:
            chains = self.chains(candidate, draft)
            window, rejection = draft.model.max_length, SpeculativeConfig.of(candidate.config).rejection
            return expected(chains.ratios, draft.config.steps(depth), rejection, window)
        if not proposer.needs.live_steps:
            self._recordings = self._recordings or record(self.target, self.texts, self.taps)
            try:
                together = 1 if proposer.learns else TOGETHER
                return replayed(self.target, self._recordings, proposer, self.law, depth, together)
            except NotReplayable:
                pass
        if proposer.learns or self.law.greedy:
            return self._run(candidate, proposer, depth, _TOGETHER_LEARNING if proposer.learns else TOGETHER)
        found = self._run(candidate, proposer, depth, TOGETHER, _DRAWS)
        return self._brought_here(found, candidate, proposer, depth) if isinstance(proposer, DraftModel) else found

    def _run(
        self, candidate: Candidate, proposer: Proposer, depth: int, together: int, draws: int = 1
    ) -> AcceptanceEstimate:
        prompts, limit = [text.start for text in self.texts] * draws, self.texts[0].limit
        rejection = SpeculativeConfig.of(candidate.config).rejection
        found = run(self.target, prompts, proposer, self.law, depth, limit, self.eos, rejection, together)
        return replace(found, draws=draws)

    def _brought_here(
        self, found: AcceptanceEstimate, candidate: Candidate, draft: DraftModel, depth: int
    ) -> AcceptanceEstimate:
        """``found``, on texts of its own, as it would be on the sample's: by how much easier these are for a chain of
        the same draft, whose law is known on both (a ratio estimator). Else a tree's luck with its texts would decide
        between it and the chain.
        """
        steps, fixed = draft.config.steps(depth), _drafting(draft, self.law).greedy
        there = [ratios(text, p, q, fixed) for text, p, q in _told(self.target, draft, found.texts, self.law)]
        here = self.chains(candidate, draft).ratios
        return found.times(expected(here, steps).tokens_per_pass / expected(there, steps).tokens_per_pass)

    def chains(self, candidate: Candidate, draft: DraftModel) -> Chains:
        """What target and draft say of every text, for chains of any depth."""
        known = self._chains.get(candidate.name)
        if known is None:
            known = self._chains[candidate.name] = _chains(self.target, draft, self.texts, self.law)
        return known


@dataclass(frozen=True)
class Chains:
    """Of one draft model, by request. statistics: see ``predictors``, of the laws at temperature 1 where it is 0."""

    ratios: list[Ratios]
    statistics: list[dict[str, float]]


def chain_of(proposer: Proposer) -> DraftModel | None:
    """The proposer, if it drafts chains whose length is known beforehand with a model of the target's vocabulary."""
    if not isinstance(proposer, DraftModel) or proposer.config.draft_stop is not None:
        return None
    return proposer if proposer.config.tree == "chain" else None


def _drafting(draft: DraftModel, law: SamplingLaw) -> SamplingLaw:
    """The law that the draft draws from."""
    own = draft.config.draft_temperature
    return law if own is None or law.greedy else law.with_temperature(own)


def _told(
    target: Model, draft: DraftModel, texts: Sequence[SampledText], law: SamplingLaw
) -> Iterator[tuple[SampledText, Tensor, Tensor]]:
    """Every text with the target's and the draft's laws of its tokens."""
    judges = ((target, law), (draft.model, _drafting(draft, law)))
    for text in texts:
        p, q = (_rows(model, text, target, judged) for model, judged in judges)
        yield text, p, q


def _chains(target: Model, draft: DraftModel, texts: Sequence[SampledText], law: SamplingLaw) -> Chains:
    draft_law = _drafting(draft, law)
    found: list[Ratios] = []
    facts: list[dict[str, float]] = []
    for text, p, q in _told(target, draft, texts, law):
        found.append(ratios(text, p, q, draft_law.greedy))
        if law.greedy or draft_law.greedy:
            warm = law.with_temperature(1.0) if law.greedy else law
            p, q = (_rows(model, text, target, warm) for model in (target, draft.model))
        facts.append(statistics(TextDistributions(p, q, text.tokens)))
    return Chains(found, facts)


def _rows(model: Model, text: SampledText, target: Model, law: SamplingLaw) -> Tensor:
    return rows(model, text, law, target.vocab_size)

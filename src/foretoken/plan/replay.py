"""Tokens per step on texts that the target sampled: computed for chains, else by running the engine.

Chains of a draft model need one pass of draft and target over the text for all draft lengths. With
r_i = q_i(x_i) / p_i(x_i) at the text's tokens after a step's beginning and P_k = r_1 ... r_k, at least k draft tokens
are accepted with probability

    token rejection      S_k = prod min(1, r_i)
    block verification   S_k = min(1, P_1, ..., P_k)
    fixed candidates     S_k = [x_i = argmax q_i for all i <= k]

(Block: draft and text agree on k tokens with probability q_1 ... q_k w_k, w_k = min(1, w_{k-1} / r_k), over the text's
own p_1 ... p_k. Under all three rules the tokens after an accepted one have the target's distribution, so later tokens
of the text tell nothing more about S_k.) The probability that a step begins at each token follows, and with it the
expected number of steps. Nothing is sampled.

Other proposers run over the recorded text, or with the target itself. ``RecordedModel`` stands in for the target and
repeats a recorded text. Real proposers and the real engine run over it without a forward pass. For a greedy text, and
for fixed candidates, the result is that of a real run: a greedy target continues its text whatever is proposed, and
walk verification samples y from p at each node and descends to y. The text consists of such samples, so the paths
through fixed candidates have the probabilities of any other run. Sampled trees, and proposers that learn from the
target's logits, run with the target.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.distributions import Law
from foretoken.core.draft import Draft, PointMass, ProposalLaw
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import PositionCounts
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Handle, Model, Scores, growing
from foretoken.plan.candidates import Candidate
from foretoken.plan.predictors import statistics
from foretoken.plan.texts import (
    BATCH,
    AcceptanceEstimate,
    Prompt,
    SampledText,
    StepTally,
    contexts,
    teacher_forced,
    text_distributions,
    text_logits,
)
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel
from foretoken.speculation import SpeculativeConfig
from foretoken.verify import Verifier, choose

_NEVER = -1e30  # finite, so that no sampling parameter turns it into NaN


@dataclass(frozen=True, slots=True)
class Recording:
    """A text, and the target's hidden states at its tokens by layer, [len(whole) - 1, H]."""

    text: SampledText
    taps: dict[int, Tensor] = field(default_factory=dict)


def record(target: Model, texts: Sequence[SampledText], taps: Sequence[int] = ()) -> list[Recording]:
    """Records the texts, with one teacher-forced pass each if hidden states of the layers ``taps`` are needed."""
    if not taps:
        return [Recording(text) for text in texts]
    result = []
    for text in texts:
        chunks = [chunk.taps for chunk in teacher_forced(target, text, taps)]
        result.append(Recording(text, {layer: torch.cat([chunk[layer] for chunk in chunks]) for layer in taps}))
    return result


class RecordedModel(Model):
    """Stands in for ``target`` and repeats recorded texts.

    Logits put all probability on the recorded token. Logits and hidden states below a draft token that is not in the
    text are arbitrary, because no verdict reaches them. A prompt with several recordings opens them in turn.
    """

    def __init__(self, target: Model, recordings: Sequence[Recording]) -> None:
        self.take_sizes(target)
        self.batch_invariant = True
        self._recordings: dict[tuple[tuple[int, ...], tuple[int, ...]], deque[Recording]] = {}
        for recording in recordings:
            text = recording.text
            self._recordings.setdefault((text.prompt, text.source), deque()).append(recording)
        self._open: dict[int, Recording] = {}
        self._slots = 0

    def open(
        self,
        prompt: Sequence[int],
        source: Sequence[int] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Handle:
        """Raises InvalidRequest for a prompt that was not recorded."""
        known = self._recordings.get((tuple(prompt), tuple(source)))
        if known is None:
            raise InvalidRequest(f"a prompt of {len(prompt)} tokens was not recorded; replay those that were")
        self._slots += 1
        self._open[self._slots] = known[0]
        known.rotate(-1)
        return Handle(self._slots, list(prompt))

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        return [self._score(handle, draft, taps) for handle, draft in zip(handles, drafts, strict=True)]

    def _score(self, handle: Handle, draft: Draft, taps: Sequence[int]) -> Scores:
        recording = self._open[handle.slot]
        done, first = growing(handle, draft), handle.cached
        nodes = range(-1 if handle.pending else done, len(draft))
        whole, root = recording.text.whole, len(handle.tokens)
        reach = [root]  # length of the text up to the root, and up to and including each node; all of it off the text
        for token, parent in zip(draft.ids, draft.parents, strict=True):
            at = reach[parent + 1]
            reach.append(at + 1 if whole[at : at + 1] == (token,) else len(whole))
        logits, following = torch.full((len(nodes), self.vocab_size), _NEVER), (*whole, 0)
        for row, node in enumerate(nodes):
            logits[row, following[reach[node + 1]]] = 0.0
        handle.cached = root
        handle.nodes[:], handle.parents[:] = draft.ids, draft.parents
        computed = [*range(first, root), *(reach[node + 1] - 1 for node in nodes if node >= 0)]
        return Scores(logits, {layer: _rows(recording.taps[layer], computed) for layer in taps}, first)

    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        for handle, new in zip(handles, tokens, strict=True):
            handle.advance(new)

    def close(self, handle: Handle) -> None:
        self._open.pop(handle.slot, None)


def _rows(states: Tensor, places: Sequence[int]) -> Tensor:
    """Returns the rows at ``places``, [places, H], zeros beyond the last."""
    rows = states[[min(at, len(states) - 1) for at in places]]
    rows[[i for i, at in enumerate(places) if at >= len(states)]] = 0
    return rows


class NotReplayable(Exception):
    """The proposer samples its drafts, so its steps do not follow from a text."""


def replay_estimate(
    target: Model, recordings: Sequence[Recording], proposer: Proposer, law: Law, depth: int, batch: int = BATCH
) -> AcceptanceEstimate:
    """Runs the engine over texts that were recorded of ``target``.

    Args:
        depth: Draft length or tree size.
        batch: Sequences at once. With 1 a proposer that learns sees the texts in order.

    Raises:
        NotReplayable: Drafts are sampled and the sampling distribution is not greedy.
    """

    def rule(drawn: ProposalLaw, exactness: Exactness) -> Verifier:
        if not isinstance(drawn, PointMass):
            raise NotReplayable
        return choose(drawn, exactness)

    engine = Engine(RecordedModel(target, recordings), proposer, Fixed(depth), rule=rule, max_sequences=batch)
    texts = [recording.text for recording in recordings]
    made = contexts([text.start for text in texts], law, 0)
    endings = [Length(text.limit, stop_after=len(text.tokens)) for text in texts]
    return AcceptanceEstimate(_tallied(engine, made, endings), "text")


def step_estimate(
    target: Model,
    prompts: Sequence[Prompt],
    proposer: Proposer,
    law: Law,
    depth: int,  # draft length or tree size
    limit: int,
    eos: Collection[int] = (),  # ids of end-of-text tokens
    rejection: str = "block",  # "block" or "token"
    batch: int = BATCH,  # sequences at once
    seed: int = 0,
) -> AcceptanceEstimate:
    """Runs the engine with the target itself, up to ``limit`` tokens for each prompt."""
    engine = Engine(target, proposer, Fixed(depth), rule=partial(choose, rejection=rejection), max_sequences=batch)
    made = contexts(prompts, law, seed)
    tallies = _tallied(engine, made, [Length(limit, eos) for _ in made])
    return AcceptanceEstimate(tallies, "steps", tuple(SampledText.of(context, limit) for context in made))


def write(
    target: Model, prompts: Sequence[Prompt], law: Law, limit: int, eos: Collection[int] = (), seed: int = 0
) -> list[SampledText]:
    """Completes every prompt by plain decoding, with up to ``limit`` tokens. eos: ids of end-of-text tokens."""
    return list(step_estimate(target, prompts, Proposer(), law, 0, limit, eos, seed=seed).texts)


def _tallied(engine: Engine, made: Sequence[Context], endings: Sequence[Length]) -> tuple[StepTally, ...]:
    tallies = {context.id: StepTally() for context in made}
    for step in engine.run(zip(made, endings, strict=True)):
        tallies[step.sequence].add(step)
    return tuple(tallies.values())


Reals = NDArray[np.float64]

_HUGE = 1e200  # products of ratios are clipped here, far above the 1 at which they count


@dataclass(frozen=True, slots=True)
class TextProbabilities:
    """Probabilities of the n tokens of one text."""

    text: SampledText
    p: Reals  # the target's, [n]
    q: Reals  # the draft's, [n]
    fixed: bool  # whether the draft proposes the argmax of q instead of a sample from q

    @property
    def acceptance(self) -> float:
        """Mean acceptance of one draft token over the text: mean min(1, q/p)."""
        return float(survival(self, 1)[1].mean())


def token_distributions(model: Model, text: SampledText, law: Law, vocab: int) -> Tensor:
    """Returns the model's distribution of each of the text's tokens, [n, vocab], from one teacher-forced pass.

    Logits of another width than ``vocab`` are cut, or filled with -inf.
    """
    logits = text_logits(model, text)
    logits = F.pad(logits, (0, vocab - logits.shape[-1]), value=-torch.inf)
    return text_distributions(logits, text, law)


def text_probabilities(text: SampledText, p: Tensor, q: Tensor, fixed: bool) -> TextProbabilities:
    """Returns the probabilities of the text's tokens in the distributions ``p`` and ``q``, [n, V] each."""
    tokens = torch.tensor(text.tokens, device=p.device)[:, None]

    def chosen(probs: Tensor) -> Reals:
        values: Reals = probs.gather(1, tokens.to(probs.device))[:, 0].double().cpu().numpy()
        return values

    return TextProbabilities(text, chosen(p), chosen(q), fixed)


def survival(text: TextProbabilities, depth: int, rejection: str = "block") -> Reals:
    """Returns S[k, t] (see the module) of steps that begin before token t, [depth + 1, n]. 0 beyond the text's end."""
    count = len(text.q)
    p = np.ones(count) if text.fixed else text.p
    ratios = np.concatenate([np.divide(text.q, p, out=np.zeros(count), where=p > 0), np.zeros(depth)])
    if text.fixed or rejection == "token":
        ratios = np.minimum(ratios, 1.0)
    product, reach = np.ones(count), [np.ones(count)]
    for k in range(depth):
        product = np.minimum(product * ratios[k : k + count], _HUGE)
        reach.append(np.minimum(reach[-1], product))
    return np.array(reach)


def step_starts(reach: Reals) -> tuple[Reals, Reals]:
    """Returns the probability pi_t that a step begins at each token, [n], and P(N = 1), P(N = 2), ..., [n, depth + 1].

    N is the number of tokens of a step, the target's own included. A step that begins at t is followed by one at t + N:
    pi_0 = 1 and pi_{t+m} += pi_t (S_{m-1} - S_m). The sum of pi is the expected number of steps that emit the text.

    reach: ``survival``, [depth + 1, n].
    """
    lengths = -np.diff(reach, axis=0, append=0.0).T
    count, sizes = lengths.shape
    begins = np.zeros(count + sizes)
    begins[0] = 1.0
    for t in range(count):
        begins[t + 1 : t + sizes + 1] += begins[t] * lengths[t]
    return begins[:count], lengths


def chain_estimate(
    texts: Sequence[TextProbabilities], depth: int, rejection: str = "block", max_length: int | None = None
) -> AcceptanceEstimate:
    """Returns the estimate for chains of ``depth`` tokens over one text per request.

    rejection: "block" or "token". max_length: of the draft model's sequences, beyond which it drafts nothing.
    """
    return AcceptanceEstimate(tuple(_tally(text, depth, rejection, max_length) for text in texts), "distribution")


def _tally(probabilities: TextProbabilities, depth: int, rejection: str, max_length: int | None) -> StepTally:
    text, at = probabilities.text, np.arange(len(probabilities.text.tokens))
    drafted = np.minimum(depth, text.limit - at - 1)  # by a step that begins at each token
    if max_length is not None:
        drafted[len(text.prompt) + at + depth > max_length] = 0
    reach = survival(probabilities, depth, rejection) * (np.arange(depth + 1)[:, None] <= drafted)
    begins, lengths = step_starts(reach)
    begins[0] = 0.0  # the prompt's step
    emitted = (np.minimum(np.arange(1, depth + 2), len(at) - at[:, None]) * lengths).sum(1)  # the text's end ends it
    longest = int(drafted[1:].max(initial=0))
    positions = PositionCounts(
        [float(begins[drafted > position].sum()) for position in range(longest)],
        (reach[1:] @ begins)[:longest].tolist(),
    )
    sizes = {int(size): float(begins[drafted == size].sum()) for size in np.unique(drafted[1:])}
    return StepTally(float(begins @ emitted), float(begins.sum()), positions, sizes)


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

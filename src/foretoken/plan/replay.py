"""Tokens per step by running the engine: over recorded text, or with the target itself.

``RecordedModel`` stands in for the target and repeats a recorded text. Real proposers and the real engine run over it
without a forward pass. For a greedy text, and for fixed candidates, the result is that of a real run: a greedy target
continues its text whatever is proposed, and walk verification samples y from p at each node and descends to y. The text
consists of such samples, so the paths through fixed candidates have the probabilities of any other run.

Sampled trees, and proposers that learn from the target's logits, run with the target. Chains of a draft model: see
``sample``.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.distributions import Law
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.law import PointMass, ProposalLaw
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Handle, Model, Scores, growing
from foretoken.plan.texts import BATCH, AcceptanceEstimate, Prompt, SampledText, StepTally, contexts, teacher_forced
from foretoken.propose.base import Proposer
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
    depth: int,
    limit: int,
    eos: Collection[int] = (),
    rejection: str = "block",
    batch: int = BATCH,
    seed: int = 0,
) -> AcceptanceEstimate:
    """Runs the engine with the target itself, up to ``limit`` tokens for each prompt.

    Args:
        depth: Draft length or tree size.
        eos: Ids of end-of-text tokens.
        rejection: "block" or "token".
        batch: Sequences at once.
    """
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

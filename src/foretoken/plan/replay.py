"""Tokens per pass by running the engine: over text that is there, or with the target itself.

Over recorded text (see ``recorded``) for fixed candidates and greedy requests, which costs no pass of the target; with
the target for drawn trees, and for what learns from the target's rows. Chains of a draft model: see ``chains``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.distributions import Law
from foretoken.core.law import PointMass, ProposalLaw
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.plan.recorded import Recorded, Recording
from foretoken.plan.tally import AcceptanceEstimate, StepTally
from foretoken.plan.texts import TOGETHER, SampledText, Start, contexts, silent
from foretoken.propose.base import Proposer
from foretoken.verify import Verifier, choose


class NotReplayable(Exception):
    """The proposer draws: its rounds cannot be read off a text."""


def replayed(
    target: Model, recordings: Sequence[Recording], proposer: Proposer, law: Law, depth: int, together: int = TOGETHER
) -> AcceptanceEstimate:
    """Over the record. together: 1 keeps the order in which a proposer that learns reads the texts.

    Raises Drawn where drafts turn out to be drawn and the law is not greedy.
    """

    def rule(drawn: ProposalLaw, exactness: Exactness) -> Verifier:
        if not isinstance(drawn, PointMass):
            raise NotReplayable
        return choose(drawn, exactness)

    engine = Engine(Recorded(target, recordings), proposer, Fixed(depth), rule=rule, max_sequences=together)
    texts = [recording.text for recording in recordings]
    made = contexts([text.start for text in texts], law, 0)
    endings = [Length(text.limit, stop_after=len(text.tokens)) for text in texts]
    return AcceptanceEstimate(_tallied(engine, made, endings), "text")


def run(
    target: Model,
    prompts: Sequence[Start],
    proposer: Proposer,
    law: Law,
    depth: int,
    limit: int,
    eos: Collection[int] = (),
    rejection: str = "block",
    together: int = TOGETHER,
    seed: int = 0,
    tick: Callable[[], None] = silent,
) -> AcceptanceEstimate:
    """Real rounds of the real target. tick: called for each finished text."""
    engine = Engine(
        target, proposer, Fixed(depth), rule=partial(choose, rejection=rejection), max_sequences=together
    )  # fmt: skip
    made = contexts(prompts, law, seed)
    tallies = _tallied(engine, made, [Length(limit, eos) for _ in made], tick)
    return AcceptanceEstimate(tallies, "rounds", tuple(SampledText.of(context, limit) for context in made))


def _tallied(
    engine: Engine, made: Sequence[Context], endings: Sequence[Length], tick: Callable[[], None] = silent
) -> tuple[StepTally, ...]:
    tallies = {context.id: StepTally() for context in made}
    for step in engine.run(zip(made, endings, strict=True)):
        tallies[step.sequence].add(step)
        if step.finish_reason is not None:
            tick()
    return tuple(tallies.values())

"""Before the first request: a few rounds on a made-up prompt, so that what drafting takes is known before it is paid.

What an over-large draft model would cost is seen here, not in somebody's request. Kernels are warm afterwards, too.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from foretoken.control.base import Controller
from foretoken.control.tempo import Tempo
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine, draining
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.propose.base import Proposer

_PROMPT = 96  # tokens
_FIRST = (0, 1)  # the prompt is read, and the proposer catches up
_SWEEP = (0, 1, 2, 4, 6, 7, 8, 12, 16)  # what lies between is read off a line
_SWEEPS = 3  # of which medians are taken, since a slow moment would be remembered; fewer if they take longer than
_SECONDS = 1.0
_ENOUGH = 1.0  # plain rounds; drafting that takes longer need not be looked at again


class _Script(Controller):
    """These depths, one after another. passes, drafts: seconds by rows and depth, the proposer having caught up."""

    def __init__(self, depths: Sequence[int], tempo: Tempo) -> None:
        self.left, self.tempo = list(depths), tempo
        self.passes: dict[int, list[float]] = defaultdict(list)
        self.drafts: dict[int, list[float]] = defaultdict(list)
        self._depth, self._skip, self._end = 0, len(_FIRST), time.perf_counter() + _SECONDS

    def budgets(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> list[int]:
        self._depth = self.left.pop(0) if self.left else 0
        budgets = [max(0, min(self._depth, room)) for room in max_draft_tokens]
        self.tempo.begin(contexts, budgets)
        return budgets

    def observe(self, steps: Sequence[StepOutput]) -> None:
        self.tempo.observe(steps)
        self._skip -= 1
        if self._skip >= 0:
            return
        timings = steps[0].timings
        self.passes[sum(len(step.draft) + 1 for step in steps)].append(timings.total - timings.propose)
        if self._depth:
            self.drafts[self._depth].append(timings.propose)
            if timings.propose > _ENOUGH * self.tempo.plain_seconds(1):
                self.left = [depth for depth in self.left if depth < self._depth]
        if time.perf_counter() > self._end:
            self.left = [depth for depth in self.left if depth and depth not in self.drafts]

    def forget(self, context: Context) -> None:
        self.tempo.forget(context)


class _Anything(Proposer):
    """Chains of one token, for what they are as rows."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [Draft.chain([context.tokens[-1]] * budget) for context, budget in zip(contexts, budgets, strict=True)]


def rehearse(target: Model, proposer: Proposer, tempo: Tempo, most: int) -> None:
    """Teach ``tempo`` what rounds of up to ``most`` nodes take; it will prefer what requests show.

    Needs room for 32 tokens and the drafts in the target; with less nothing is tried. Where drafts take no time, or the
    proposer would learn from the made-up prompt, the target's passes are all that is looked at.
    """
    sweep = [depth for depth in _SWEEP if depth <= most]
    taken = sum(depth + 1 for depth in sweep)
    room = target.max_length - most - 1 - sum(_FIRST) - len(_FIRST)
    sweeps = min(_SWEEPS, (room - 32) // taken)
    if sweeps < 1 or not most:
        return
    length = min(_PROMPT, room - sweeps * taken)
    tokens = [(7 * i + 1) % target.vocab_size for i in range(length)]
    source = tuple(tokens[: target.source_length])
    context = Context(-1, tokens, length, SamplingLaw(temperature=0.0), Streams(0), source=source)
    passes_alone = proposer.costless or proposer.learns
    script = _Script([*_FIRST, *(sweep * sweeps)], Tempo(tempo.passes) if passes_alone else tempo)
    engine = Engine(target, _Anything() if passes_alone else proposer, script)
    with draining(engine, [context.id]):
        engine.add(context, Length(2**31))
        while script.left:
            engine.step_or_raise()
    drafts = {} if passes_alone else {depth: median(seconds) for depth, seconds in script.drafts.items()}
    tempo.rehearsed({rows: median(seconds) for rows, seconds in script.passes.items()}, drafts)

"""Before the first request: a few rounds on a made-up prompt, so that what drafting takes is known before it is paid.

What an over-large draft model would cost is seen here, not in somebody's request. Kernels are warm afterwards, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.control.base import Controller
from foretoken.control.tempo import Tempo
from foretoken.core.context import Context
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import Step
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine, draining
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.propose.base import Proposer

_PROMPT = 96  # tokens
_DEPTHS = (0, 0, 0, 1, 1, 2, 4, 8, 16)  # the prompt's round first; what lies between is read off a line
_ENOUGH = 1.0  # plain rounds; drafting that takes longer need not be looked at more closely


class _Script(Controller):
    """These depths, one after another."""

    def __init__(self, depths: Sequence[int], tempo: Tempo) -> None:
        self.left, self.tempo = list(depths), tempo

    def budgets(self, contexts: Sequence[Context], rooms: Sequence[int]) -> list[int]:
        wanted = self.left.pop(0) if self.left else 0
        budgets = [max(0, min(wanted, room)) for room in rooms]
        self.tempo.begin(contexts, budgets)
        return budgets

    def observe(self, steps: Sequence[Step]) -> None:
        self.tempo.observe(steps)
        if steps[0].timings.propose > _ENOUGH * (self.tempo.plain_seconds(1) or float("inf")):
            self.left = self.left[:1]

    def forget(self, context: Context) -> None:
        self.tempo.forget(context)


def rehearse(target: Model, proposer: Proposer, tempo: Tempo, most: int) -> None:
    """Teach ``tempo`` what rounds of up to ``most`` nodes take; it will prefer what requests show. Needs room for 32
    tokens and the draft in the target; with less nothing is tried.
    """
    script = _Script([depth for depth in _DEPTHS if depth <= most], tempo)
    rounds = sum(depth + 1 for depth in script.left)
    length = min(_PROMPT, target.max_length - rounds - most - 1)
    if length < 32:
        return
    tokens = [(7 * i + 1) % target.vocab_size for i in range(length)]
    engine = Engine(target, proposer, script)
    source = tuple(tokens[: target.source_length])
    context = Context(-1, tokens, length, SamplingLaw(temperature=0.0), Streams(0), source=source)
    with draining(engine, [context.id]):
        engine.add(context, Length(2**31))
        while script.left:
            engine.step()
    tempo.doubt()

"""The output distribution is the target's with every controller; a controller that sees the coming draw biases it."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace

import pytest

from foretoken.control.base import Controller
from foretoken.control.fixed import Fixed
from foretoken.control.ledger import Ledger
from foretoken.control.memory import MemoryWatch
from foretoken.control.policy import DraftPolicy
from foretoken.core import devices
from foretoken.core.context import Context, Exactness
from foretoken.core.devices import Memory
from foretoken.core.history import History
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Purpose, Streams
from foretoken.costs.model import CostModel
from foretoken.costs.tuning import TUNING, Tuning
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.union import Union

from .enumerate import AddressReused, Branching, BranchingStream, Text, autoregressive_law, outcomes, total_variation

LIMIT = 1e-12
PROMPT = [0, 1, 1, 0, 1]
TARGET = ToyModel(2, order=1, seed=5, sharpness=1.0)
DRAFT = TARGET.perturbed(0.5)
LAW = SamplingLaw()


def guarded(
    max_tokens: int, tuning: Tuning = TUNING, memory: MemoryWatch | None = None, constant: bool = False
) -> DraftPolicy:
    policy = DraftPolicy(CostModel(tuning))
    policy.bound(max_tokens, Ledger(0.005), memory, constant=constant)
    return policy


@dataclass
class Machine:
    """Its memory is short once in a while; a second passes from look to look."""

    now: int = 0

    def read(self) -> Memory:
        return Memory(5 if self.now % 30 == 3 else 50, 100)

    def clock(self) -> float:
        self.now += 1
        return float(self.now)


def pressed(tuning: Tuning = TUNING) -> DraftPolicy:
    machine = Machine()
    return guarded(3, tuning, memory=MemoryWatch(3, machine.read, machine.clock))


CONTROLLERS: dict[str, Callable[[], DraftPolicy]] = {
    "goodput": lambda: DraftPolicy(max_tokens=3),
    "guarded goodput": lambda: guarded(3),
    "guarded depth": lambda: guarded(2, constant=True),
    "short of memory": pressed,
    "never resting": lambda: pressed(Tuning(hold_steps=1)),
}


def generate(
    controller: Controller,
    streams: Streams | Branching,
    length: int,
    law: SamplingLaw = LAW,
    exactness: Exactness = Exactness.DISTRIBUTION,
    drafted: list[int] | None = None,
) -> Text:
    """Returns the text of a request, and adds the length of each draft to ``drafted``."""
    proposer = DraftModel(DRAFT)
    chosen = Union.of(proposer, controller) if isinstance(controller, DraftPolicy) else proposer
    engine = Engine(TARGET, chosen, controller)
    context = Context(0, list(PROMPT), len(PROMPT), law, streams, exactness)  # type: ignore[arg-type]
    engine.add(context, Length(length))
    while engine.busy:
        lengths = [len(step.draft) for step in engine.step()]
        if drafted is not None:
            drafted += lengths
    return tuple(context.tokens[len(PROMPT) :])


@pytest.fixture
def steady(monkeypatch):
    """Every lap takes a millisecond, so that a step decides the same whenever it is run."""
    ticks = count()
    monkeypatch.setattr(devices, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-3))


def reference(length: int) -> dict[Text, float]:
    def row(text: Text):
        tokens = [*PROMPT, *text]
        return LAW.probs(TARGET.logits(tokens)[None], [History(tokens, len(PROMPT))])[0]

    return autoregressive_law(row, length)


@pytest.mark.parametrize("name", CONTROLLERS)
@pytest.mark.slow
def test_law_of_the_engine(name, steady):
    """Enumerated with a controller that has learned from some requests already."""
    learned = CONTROLLERS[name]()
    for seed in range(3):
        generate(learned, Streams(seed), 60)
    drafted: list[int] = []

    def run(streams: Branching) -> Text:
        return generate(deepcopy(learned), streams, 4, drafted=drafted)

    assert total_variation(outcomes(run), reference(4)) < LIMIT
    assert max(drafted) > 0


@pytest.mark.parametrize("name", CONTROLLERS)
@pytest.mark.parametrize("law", [SamplingLaw(), SamplingLaw(temperature=0.0)], ids=["drawn", "greedy"])
def test_text_is_that_of_plain_decoding(name, law):
    """In the trajectory grade, and greedily, the text does not depend on the controller."""
    for seed in range(3):
        plain = generate(Controller(), Streams(seed), 200, law, Exactness.TRAJECTORY)
        assert generate(CONTROLLERS[name](), Streams(seed), 200, law, Exactness.TRAJECTORY) == plain


# A controller that sees the coming draw


class Remembering(Branching):
    """A number asked for twice is the same number twice, as with real streams."""

    def branch(self, address, options):
        known = self.__dict__.setdefault("known", {})
        if address not in known:
            known[address] = super().branch(address, options)
        return known[address]

    def private(self, purpose, position):
        return BranchingStream(self, purpose, position)


def peek(context: Context) -> int:
    """Returns 1 where the token that is going to be sampled is likely under the draft, else 0."""
    q = DRAFT.probs(context.tokens)
    drawn = context.streams.private(Purpose.DRAFT, context.generated).categorical(q, 0)
    return 1 if q[drawn] >= 0.5 else 0


class Peeking(Controller):
    def budgets(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> list[int]:
        return [min(left, peek(context)) for context, left in zip(contexts, max_draft_tokens, strict=True)]


class PeekingPolicy(DraftPolicy):
    """Chooses the draft length by the coming sample."""

    def budgets(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> list[int]:
        return [min(left, self.max_tokens) for left in max_draft_tokens]

    def lengths(
        self, source: str, contexts: Sequence[Context], caps: Sequence[int], early: Sequence[bool], batch: int
    ) -> list[int]:
        super().lengths(source, contexts, caps, early, batch)
        return [min(cap, peek(context)) for context, cap in zip(contexts, caps, strict=True)]

    def value(self, context: Context) -> float:
        return 1.0


def remembered(controller: Callable[[], Controller], length: int) -> dict[Text, float]:
    law: dict[Text, float] = {}
    script: list[int] = []
    while True:
        streams = Remembering(None, script)
        text = generate(controller(), streams, length)
        law[text] = law.get(text, 0.0) + streams.probability
        while script and script[-1] + 1 == streams.widths[len(script) - 1]:
            script.pop()
        if not script:
            return law
        script[-1] += 1


@pytest.mark.parametrize("controller", [Peeking, PeekingPolicy])
def test_a_controller_that_peeks_is_caught(controller):
    assert total_variation(remembered(controller, 4), reference(4)) > 0.02
    with pytest.raises(AddressReused):
        outcomes(lambda streams: generate(controller(), streams, 4))


def test_the_enumeration_that_catches_it_finds_nothing_in_an_honest_one():
    assert total_variation(remembered(lambda: Fixed(1), 4), reference(4)) < LIMIT

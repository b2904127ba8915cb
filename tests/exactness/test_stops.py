"""Drafts that end early keep the target's law, enumerated; a rule that looks at what it drew does not."""

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from tests.propose.heads import random_head

from foretoken.control.fixed import Fixed
from foretoken.core.context import ChainEnd, Context, Exactness
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.chains import DraftStop
from foretoken.models.toy import ToyModel
from foretoken.propose import growers
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.scores import entropy_bound, make_stop
from foretoken.verify import choose

from .decode_step import Pair, drawn, table
from .enumerate import Branching, Text, outcomes, total_variation
from .test_engine import LAWS, PROMPT, generate, reference

pytestmark = pytest.mark.slow

LIMIT = 1e-12
# Confident after some tokens and not after others, so that the rules have something to choose.
TWO = ToyModel(2, order=1, seed=32, sharpness=1.5)
THREE = ToyModel(3, order=1, seed=2, sharpness=2.5)
RULES = ("entropy", "margin", "learned")
ENTROPY = {2: 0.66, 3: 0.56, 12: 0.5}  # thresholds by vocabulary, as the toys differ
MARGIN = {2: 0.25, 3: 0.5, 12: 0.25}
Make = Callable[[ToyModel], DraftModel]


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Make]:
    """Stops that end some drafts of the toys at once, some later, some not at all."""
    head = random_head(tmp_path_factory.mktemp("stop") / "head", 8, scale=0.2)
    learned = make_stop({"rule": "learned", "model": head, "threshold": 0.6}, ToyModel())  # loaded once for all runs

    def draft(target: ToyModel, stop: DraftStop | None) -> DraftModel:
        made = DraftModel(target.perturbed(0.5))
        made.stop = stop
        return made

    def scored(target: ToyModel, rule: str, thresholds: dict[int, float]) -> DraftModel:
        return draft(target, make_stop({"rule": rule, "threshold": thresholds[target.vocab_size]}, target))

    return {
        "entropy": lambda target: scored(target, "entropy", ENTROPY),
        "margin": lambda target: scored(target, "margin", MARGIN),
        "learned": lambda target: draft(target, learned),
    }


class Ending(Fixed):
    """Has drafts end as the draft policy would, by calibrated scores and a minimum acceptance for each depth."""

    def admit(self, context: Context) -> None:
        super().admit(context)
        context.end = ChainEnd((0.3, 0.6), (0.1, 0.2, 0.4), (0.9, 0.6, 0.5), (0.45, 0.55))


CONTROLLERS = {"own threshold": Fixed, "minimum acceptance": Ending}


@pytest.mark.parametrize("rejection", ["block", "token"])
@pytest.mark.parametrize("law", ["plain", "filters and penalties"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize(("target", "length", "end"), [(TWO, 4, None), (THREE, 3, 2)], ids=["two", "three"])
def test_law_of_the_engine(rule, law, rejection, controller, target, length, end, makers):
    depth = 2
    lengths: set[tuple[int, int]] = set()  # drafted, and what there was room for

    class Noting(CONTROLLERS[controller]):  # type: ignore[misc]
        def observe(self, contexts: list[Context], steps: list[StepOutput]) -> None:
            lengths.update((len(step.draft), min(depth, length - 1 - step.position)) for step in steps)

    def run(streams: Branching) -> Text:
        verifiers = partial(choose, rejection=rejection)
        engine = Engine(target, makers[rule](target), Noting(depth), rule=verifiers)
        return generate(engine, LAWS[law], Length(length, () if end is None else (end,)), streams)

    assert total_variation(outcomes(run), reference(target, LAWS[law], length, end)) < LIMIT
    assert any(drafted < limit for drafted, limit in lengths), "the rule never stopped a draft"
    assert any(drafted > 0 for drafted, _ in lengths), "the rule stopped every draft at once"


class Peeking(growers.Chain):
    """Samples, and drops a token that its own law finds unlikely: the chain ends there."""

    __slots__ = ()

    def extend(self, logits: torch.Tensor, hidden: torch.Tensor | None = None) -> None:
        super().extend(logits, hidden)
        if float(self.rows[-1][self.tokens[-1]]) < 0.4:
            self.tokens.pop()
            self.rows.pop()
            self.stopped = True


@pytest.mark.parametrize("rejection", ["block", "token"])
def test_a_rule_that_sees_what_was_drawn_is_caught(rejection):
    target = THREE

    def gap(chain: type[growers.Chain]) -> float:
        def run(streams: Branching) -> Text:
            proposer = DraftModel(target.perturbed(0.5))
            engine = Engine(target, proposer, Fixed(2), rule=partial(choose, rejection=rejection))
            return generate(engine, SamplingLaw(), Length(3), streams)

        with mock.patch.object(growers, "Chain", chain):
            return total_variation(outcomes(run), reference(target, SamplingLaw(), 3, None))

    assert gap(growers.Chain) < LIMIT
    assert gap(Peeking) > 0.01


@pytest.mark.parametrize("rejection", ["block", "token"])
@pytest.mark.parametrize("threshold", [0.6, 0.65, 0.75])
def test_law_of_a_round(threshold, rejection):
    """Every history its own logits, three tokens deep."""
    target, draft = (table(3, seed=seed, sharpness=1.5) for seed in (31, 32))
    pair = Pair(target, drawn(draft, stop=lambda q: entropy_bound(q, 0.2) < threshold), rejection=rejection)
    assert pair.gap(length=4) < LIMIT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("law", ["plain", "greedy"])
def test_one_text_per_seed_in_any_batch(rule, law, controller, makers):
    """The trajectory grade, and greedy requests of the other: the text of plain decoding."""
    target = ToyModel(12, order=2, seed=3, sharpness=2.0)
    grade = Exactness.DISTRIBUTION if law == "greedy" else Exactness.TRAJECTORY

    def texts(depth: int, batch: int) -> list[list[int]]:
        engine = Engine(target, makers[rule](target), CONTROLLERS[controller](depth), max_sequences=batch)
        contexts = [Context(i, [*PROMPT, i], 6, LAWS[law], Streams(i), grade) for i in range(6)]
        for context in contexts:
            engine.add(context, Length(20))
        while engine.busy:
            engine.step()
        return [context.tokens for context in contexts]

    plain = texts(0, 1)
    assert all(texts(depth, batch) == plain for depth, batch in ((1, 1), (4, 4), (9, 4)))

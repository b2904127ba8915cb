"""The output distribution is the target's under the default method and its controller, and a late stop is caught."""

from __future__ import annotations

from copy import deepcopy
from itertools import count
from types import SimpleNamespace

import pytest
from torch import Tensor

from foretoken.control.goodput_controller import Goodput
from foretoken.control.ledger import Ledger
from foretoken.core.context import Context, Exactness
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.costs.model import CostModel
from foretoken.costs.tuning import Tuning
from foretoken.engine import clock
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.propose import growers, mixture_members
from foretoken.propose.auto import Auto
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.mixture_members import Member
from foretoken.propose.suffix import Suffix, SuffixConfig

from .enumerate import Branching, Text, outcomes, total_variation
from .test_engine import LIMIT, PROMPT, reference

pytestmark = pytest.mark.slow

LAW, LENGTH = SamplingLaw(), 4
TARGET = ToyModel(2, order=2, seed=5, sharpness=2.0)


def default(light: float) -> tuple[Goodput, Auto]:
    """Returns the controller and the method, which have learned nothing.

    Args:
        light: Seconds of a plain step below which the model drafts alone.
    """
    costs = CostModel(Tuning(light=light))
    members = [
        Member("suffix", Suffix(SuffixConfig(suffix_decoding_max_cached_requests=0)), free=True),
        Member("draft_model", DraftModel(TARGET.perturbed(0.5), DraftModelConfig(tree="ranked")), free=False),
    ]
    proposer = Auto(members, costs)
    return Goodput(3, costs, Ledger(0.005), prunes=proposer.prunes, parts=proposer.parts), proposer


def generate(parts: tuple[Goodput, Proposer], streams: Streams | Branching, length: int) -> tuple[Text, list[str]]:
    """Returns a text, and each draft: its number of nodes and its law."""
    controller, proposer = parts
    engine, drafts = Engine(TARGET, proposer, controller), []
    context = Context(0, list(PROMPT), len(PROMPT), LAW, streams, Exactness.DISTRIBUTION)  # type: ignore[arg-type]
    engine.add(context, Length(length))
    while engine.busy:
        drafts += [f"{len(step.draft)} {type(step.draft.law).__name__}" for step in engine.step()]
    return tuple(context.tokens[len(PROMPT) :]), drafts


@pytest.fixture(params=[0.0])
def learned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Goodput, Auto]:
    """After some requests. Every lap takes a millisecond, and every level of a draft less, whenever it is run."""
    for module, seconds in ((clock, 1e-3), (mixture_members, 2e-4)):
        ticks = count()
        ticking = SimpleNamespace(perf_counter=lambda ticks=ticks, seconds=seconds: next(ticks) * seconds)
        monkeypatch.setattr(module, "time", ticking)
    parts = default(request.param)
    for seed in range(4):
        generate(parts, Streams(seed), 60)
    return parts


def law(learned: tuple[Goodput, Auto]) -> tuple[dict[Text, float], set[str]]:
    seen: set[str] = set()
    kept = learned[1].free[0].proposer.store  # type: ignore[attr-defined]  # empty, with a thread of its own

    def run(streams: Branching) -> Text:
        text, drafts = generate(deepcopy(learned, {id(kept): kept}), streams, LENGTH)
        seen.update(drafts)
        return text

    return outcomes(run), seen


@pytest.mark.parametrize("learned", [0.0, 1.0], indirect=True, ids=["mixture", "model alone"])
def test_law_of_auto(learned: tuple[Goodput, Auto], request: pytest.FixtureRequest) -> None:
    result, drafts = law(learned)
    if "mixture" in request.node.name:
        assert {"1 Sampled", "2 Sampled", "3 Sampled"} <= drafts, drafts  # early stops end some chains
    assert any("Sampled" in draft for draft in drafts), drafts
    assert total_variation(result, reference(TARGET, LAW, LENGTH, None)) < LIMIT


class Late(growers.Chain):
    """Decides by the sampled token whether it stays."""

    def extend(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        super().extend(logits, hidden)
        if self.floor and self.rows and float(self.rows[-1][self.tokens[-1]]) < 0.5:
            self.tokens.pop()
            self.rows.pop()
            self.stopped = True


def test_a_floor_that_sees_the_draw_is_caught(learned: tuple[Goodput, Auto], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growers, "Chain", Late)
    assert total_variation(law(learned)[0], reference(TARGET, LAW, LENGTH, None)) > 0.02

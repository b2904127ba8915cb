"""Each request uses the method that it names; a failing one does not affect the text."""

import logging
from dataclasses import dataclass, field

import pytest

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Needs, Proposer
from foretoken.propose.per_request import FallbackProposer, PerRequestProposer

TARGET = ToyModel(vocab_size=6, order=2, seed=3)


@dataclass
class Always(Proposer):
    """Drafts one token, and records the contexts of its calls."""

    token: int
    needs: Needs = field(default_factory=Needs)
    proposed: list[int] = field(default_factory=list)
    observed: list[int] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)

    def propose(self, contexts, budgets):  # type: ignore[no-untyped-def]
        self.proposed += [context.id for context in contexts]
        return [Draft.chain([self.token] * min(1, budget)) for budget in budgets]

    def observe(self, contexts, observations):  # type: ignore[no-untyped-def]
        self.observed += [context.id for context in contexts]

    def forget(self, context):  # type: ignore[no-untyped-def]
        self.forgotten.append(context.id)


def context(identifier: int, method: str | None = None, prediction: tuple[int, ...] = ()) -> Context:
    return Context(
        identifier, [1, 2, 3], 3, SamplingLaw(), Streams(identifier), Exactness.TRAJECTORY, 1, prediction, method
    )


def test_requests_use_the_method_they_name():
    members = {"usual": Always(1), "other": Always(2, Needs((3,))), "prediction": Always(3, Needs(live_steps=True))}
    chosen = PerRequestProposer(members)
    assert chosen.needs == Needs((3,), live_steps=True)
    contexts = [context(0), context(1, "other"), context(2, None, (4, 5)), context(3, "usual", (4,)), context(4)]
    drafts = chosen.propose(contexts, [1, 1, 1, 1, 0])
    assert [draft.ids for draft in drafts] == [(1,), (2,), (3,), (1,), ()]
    assert [member.proposed for member in members.values()] == [[0, 3, 4], [1], [2]]
    chosen.forget(contexts[2])
    assert members["prediction"].forgotten == [2] and not members["usual"].forgotten


def test_predictions_join_what_auto_drafts():
    usual = Always(1)
    usual.name = "auto"
    chosen = PerRequestProposer({"auto": usual, "prediction": Always(3)})
    drafts = chosen.propose([context(0, None, (4, 5)), context(1, "prediction", (4, 5))], [1, 1])
    assert [draft.ids for draft in drafts] == [(1,), (3,)]


def test_only_the_drafting_member_observes():
    members = {"usual": Always(1), "other": Always(2)}
    engine = Engine(TARGET, PerRequestProposer(members), Fixed(1))
    for one in (context(0), context(1, "other")):
        engine.add(one, Length(6))
    while engine.busy:
        engine.step()
    assert set(members["usual"].observed) == {0} and set(members["other"].observed) == {1}


class Broken(Always):
    def propose(self, contexts, budgets):  # type: ignore[no-untyped-def]
        super().propose(contexts, budgets)
        raise RuntimeError("no idea")


def text(proposer: Proposer) -> list[int]:
    engine = Engine(TARGET, proposer, Fixed(1))
    one = context(7)
    engine.add(one, Length(12))
    while engine.busy:
        engine.step()
    return one.tokens


def test_a_failing_proposer_is_left_out_and_the_text_is_the_same(caplog):
    broken = Broken(1)
    with caplog.at_level(logging.ERROR):
        assert text(FallbackProposer(broken)) == text(Always(2)) == text(Proposer())
    assert len(broken.proposed) == 3 and "is disabled after 3 failures of propose" in caplog.text
    with pytest.raises(RuntimeError):
        text(Broken(1))


def test_an_invalid_request_is_not_a_failure_of_the_proposer():
    class Refusing(Always):
        def propose(self, contexts, budgets):  # type: ignore[no-untyped-def]
            raise InvalidRequest("no token is allowed")

    tolerant = FallbackProposer(Refusing(1))
    assert tolerant.propose([context(0)], [1]) == [Draft.empty()]
    assert tolerant.failures == 0

"""Each request is drafted for by whom it names; one that fails harms nobody."""

from __future__ import annotations

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
from foretoken.propose.selection import Selection
from foretoken.propose.tolerant import Tolerant

TARGET = ToyModel(vocab_size=6, order=2, seed=3)


@dataclass
class Always(Proposer):
    """Drafts one token, and remembers whom it was asked for and told of."""

    token: int
    needs: Needs = field(default_factory=Needs)
    asked: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)

    def propose(self, contexts, budgets):  # type: ignore[no-untyped-def]
        self.asked += [context.id for context in contexts]
        return [Draft.chain([self.token] * min(1, budget)) for budget in budgets]

    def observe(self, contexts, observations):  # type: ignore[no-untyped-def]
        self.told += [context.id for context in contexts]

    def forget(self, context):  # type: ignore[no-untyped-def]
        self.forgotten.append(context.id)


def context(identifier: int, method: str | None = None, prediction: tuple[int, ...] = ()) -> Context:
    return Context(
        identifier, [1, 2, 3], 3, SamplingLaw(), Streams(identifier), Exactness.TRAJECTORY, 1, prediction, method
    )


def test_requests_go_to_whom_they_name():
    members = {"usual": Always(1), "other": Always(2, Needs((3,))), "prediction": Always(3, Needs(rounds=True))}
    chosen = Selection(members)
    assert chosen.needs == Needs((3,), rounds=True)
    contexts = [context(0), context(1, "other"), context(2, None, (4, 5)), context(3, "usual", (4,)), context(4)]
    drafts = chosen.propose(contexts, [1, 1, 1, 1, 0])
    assert [draft.ids for draft in drafts] == [(1,), (2,), (3,), (1,), ()]
    assert [member.asked for member in members.values()] == [[0, 3, 4], [1], [2]]
    chosen.forget(contexts[2])
    assert members["prediction"].forgotten == [2] and not members["usual"].forgotten


def test_only_who_drafts_is_told():
    members = {"usual": Always(1), "other": Always(2)}
    engine = Engine(TARGET, Selection(members), Fixed(1))
    for one in (context(0), context(1, "other")):
        engine.add(one, Length(6))
    while engine.busy:
        engine.step()
    assert set(members["usual"].told) == {0} and set(members["other"].told) == {1}


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


def test_who_fails_is_left_out_and_the_text_is_the_same(caplog):
    broken = Broken(1)
    with caplog.at_level(logging.ERROR):
        assert text(Tolerant(broken)) == text(Always(2)) == text(Proposer())
    assert len(broken.asked) == 3 and "of 3 before it is left out" in caplog.text
    with pytest.raises(RuntimeError):
        text(Broken(1))


def test_what_a_request_did_itself_is_not_the_proposers_failure():
    class Refusing(Always):
        def propose(self, contexts, budgets):  # type: ignore[no-untyped-def]
            raise InvalidRequest("no token is allowed")

    tolerant = Tolerant(Refusing(1))
    assert tolerant.propose([context(0)], [1]) == [Draft.empty()]
    assert tolerant.failures == 0

"""Every member of a proposer may fail, and wrappers forward all of them."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.control.config import GoodputConfig, build
from foretoken.control.fixed import Fixed
from foretoken.control.policy import DraftPolicy
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.toy import ToyModel
from foretoken.propose.base import MEMBERS, Proposer, Wrapper
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.per_request import FallbackProposer, PerRequestProposer

TARGET = ToyModel(vocab_size=6, order=2, seed=3, sharpness=2.0)
LOGGER = "foretoken.propose.per_request"


class Failure(Exception):
    """An unexpected error."""


def context(identifier: int, method: str | None = None) -> Context:
    tokens = [identifier % 6, 1, 2]
    return Context(identifier, tokens, 3, SamplingLaw(), Streams(identifier), Exactness.TRAJECTORY, None, (), method)


def is_method(member: str) -> bool:
    return callable(getattr(Proposer(), member))


def broken(member: str, kind: type[Proposer] = DraftModel, fails: Callable[[], bool] = lambda: True) -> Proposer:
    """A drafting proposer whose ``member`` raises."""

    def fail(*args: Any) -> Any:
        if fails():
            raise Failure(member)
        return getattr(super(other, proposer), member)(*args[1:])

    other = type("Broken", (kind,), {member: fail if is_method(member) else property(fail, lambda *_: None)})
    proposer: Any = other(TARGET.perturbed(0.3)) if kind is DraftModel else other()
    return proposer


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "propose": ([context(0)], [2]),
    "prefill": ([context(0)], []),
    "observe": ([context(0)], []),
    "enable_prefix_cache": (100,),
}


def value_of(proposer: Proposer, member: str) -> Any:
    value = getattr(proposer, member)
    return value(*ARGUMENTS.get(member, (context(0),))) if is_method(member) else value


def test_all_members_are_enumerated() -> None:
    assert {"propose", "prefill", "observe", "forget", "reusable_prefix_len", "needs", "name"} <= set(MEMBERS)
    public = {name for name in dir(Proposer) if not name.startswith("_")}
    assert public - set(MEMBERS) == {"enable_prefix_caches"}, "it only calls members"


@pytest.mark.parametrize("member", MEMBERS)
def test_wrappers_forward_every_member(member: str) -> None:
    mark = object()
    made = {member: (lambda *_: mark) if is_method(member) else mark}
    inner = type("Marked", (Proposer,), made)()
    assert value_of(Wrapper(inner), member) is mark
    if member != "propose":  # whose drafts are checked
        assert value_of(FallbackProposer(inner), member) is mark
    if not is_method(member):
        wrapper = Wrapper(inner)
        setattr(wrapper, member, 5)
        assert getattr(inner, member) == 5


@pytest.mark.parametrize("member", MEMBERS)
def test_every_member_is_guarded(member: str, caplog: pytest.LogCaptureFixture) -> None:
    guarded = FallbackProposer(broken(member))
    with caplog.at_level(logging.INFO, LOGGER):
        for _ in range(5):
            plain, value = value_of(Proposer(), member), value_of(guarded, member)
            assert value == plain or type(value) is type(plain) is Proposer
    assert guarded.disabled
    assert len(caplog.records) == 2 and not any(record.exc_info for record in caplog.records)
    assert f"failed in {member}: Failure: {member}" in caplog.text
    assert f"is disabled after 3 failures of {member}" in caplog.text


def texts(proposer: Proposer, length: int = 24) -> tuple[dict[int, list[int]], Engine]:
    """Six requests, of which two run at a time, so that some are queued and prefilled while others decode."""
    control = build(GoodputConfig(memory=False, guard=False), 3, TARGET.device, DraftPolicy())
    engine = Engine(TARGET, proposer, control, max_sequences=2, prompt_rows=2)
    for i in range(6):
        engine.add(context(i), Length(length))
    while engine.busy:
        engine.step()
        engine.check_integrity()
    assert not engine.running and not engine.waiting
    return {i: each.context.tokens for i, each in engine.finished.items()}, engine


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("share", [1, 2], ids=["always", "every second call"])
def test_no_failure_changes_a_text(member: str, share: int) -> None:
    calls = iter(range(10**6))
    proposer = broken(member, fails=lambda: next(calls) % share == 0)
    assert texts(FallbackProposer(proposer))[0] == texts(Proposer())[0]


def test_observe_that_fails_disables_though_propose_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    proposer = FallbackProposer(broken("observe"))
    with caplog.at_level(logging.INFO, LOGGER):
        texts(proposer)
    assert proposer.disabled and len(caplog.records) == 2 and "Traceback" not in caplog.text


def test_failures_of_different_members_do_not_add_up() -> None:
    proposer = FallbackProposer(broken("forget", fails=iter([True, False] * 9).__next__))
    for i in range(9):
        proposer.forget(context(i))
    assert not proposer.disabled and proposer.failures <= 1


def test_a_proposer_that_is_enabled_again_has_forgotten_what_it_missed() -> None:
    forgotten: list[int] = []

    class Recording(Proposer):
        fails = True

        def propose(self, contexts, budgets):  # type: ignore[no-untyped-def]
            if self.fails:
                raise Failure("propose")
            return [Draft.chain([1])] * len(contexts)

        def forget(self, context: Context) -> None:
            forgotten.append(context.id)

    inner = Recording()
    proposer, one, other = FallbackProposer(inner), context(1), context(2)
    for _ in range(3):
        proposer.propose([one], [1])
    assert proposer.disabled
    forgotten.clear()
    proposer.observe([one, other], [])
    proposer.forget(one)
    assert forgotten == [1] and proposer.propose([other], [1]) == [Draft.empty()]
    inner.fails = False
    proposer.enable()
    assert forgotten == [1, 2] and [draft.ids for draft in proposer.propose([other], [1])] == [(1,)]


@pytest.mark.parametrize(
    "drafts",
    [[], [Draft.chain([1])] * 2, [Draft.chain([1, 2, 3])], [Draft.chain([6])], [Draft.chain([-1])], [None], None],
    ids=["none", "too many", "too long", "unknown token", "negative token", "no draft", "no list"],
)
def test_drafts_that_cannot_be_verified_are_failures(drafts: Any) -> None:
    class Wrong(Proposer):
        def propose(self, contexts, budgets):  # type: ignore[no-untyped-def]
            return drafts

    proposer = FallbackProposer(Wrong(), vocab_size=6)
    assert proposer.propose([context(0)], [2]) == [Draft.empty()] and proposer.failures == 1


def test_a_failing_method_leaves_the_others_drafting() -> None:
    good = DraftModel(TARGET.perturbed(0.3))
    chosen = PerRequestProposer({"good": FallbackProposer(good), "bad": FallbackProposer(broken("propose"))})
    engine = Engine(TARGET, chosen, Fixed(2))
    for i in range(4):
        engine.add(context(i, ("good", "bad")[i % 2]), Length(12))
    drafted = dict.fromkeys(range(4), 0)
    while engine.busy:
        for step in engine.step():
            drafted[step.sequence] += len(step.draft)
    assert drafted[0] and drafted[2] and not drafted[1] and not drafted[3]


def engine_that_cannot_forget() -> Engine:
    """Without a guard: errors are raised."""
    engine = Engine(TARGET, broken("forget"), Fixed(2))
    for i in range(3):
        engine.add(context(i), Length(2 + 3 * i))
    return engine


def test_steps_leave_no_finished_sequence_that_is_not_forgotten() -> None:
    engine = engine_that_cannot_forget()
    for _ in range(20):
        try:
            engine.step()
        except Failure:
            assert all(each.finish_reason is None for each in engine.running.values())
    assert not engine.busy and set(engine.finished) == {0, 1, 2}


def test_clear_leaves_no_sequence_that_is_not_forgotten() -> None:
    engine = engine_that_cannot_forget()
    with pytest.raises(Failure):
        engine.clear()
    assert not engine.busy and not engine.finished
    engine.check_integrity()


def test_run_leaves_no_sequence_that_is_not_forgotten() -> None:
    engine = Engine(TARGET, broken("forget"), Fixed(2))
    with pytest.raises(Failure):
        list(engine.run([(context(i), Length(2 + i)) for i in range(3)]))
    assert not engine.busy and not engine.finished
    engine.check_integrity()


@pytest.mark.parametrize("member", ["forget", "reusable_prefix_len", "propose", "observe"])
def test_llm_leaves_no_sequence_of_a_call_that_failed(member: str, tiny_pair: Any) -> None:
    llm = LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", speculative_config={"num_speculative_tokens": 2})
    llm.engine.proposer = broken(member, Proposer)
    with pytest.raises(Failure):
        llm.generate(["a b", "def", "x"], SamplingParams(max_tokens=4))
    assert not llm.engine.busy and not llm.engine.finished
    llm.engine.check_integrity()
    llm.engine.proposer = Proposer()
    assert len(llm.generate(["a b"], SamplingParams(max_tokens=4))) == 1


def test_a_step_that_fails_is_forgotten_for_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[int] = []

    class Both(DraftModel):
        def propose(self, contexts, budgets):  # type: ignore[no-untyped-def]
            raise Failure("propose")

        def forget(self, context: Context) -> None:
            forgotten.append(context.id)
            raise Failure("forget")

    engine = Engine(TARGET, Both(TARGET.perturbed(0.3)), Fixed(2))
    for i in range(3):
        engine.add(context(i), Length(2))
    with pytest.raises(Failure):
        engine.step()
    assert forgotten == [0, 1, 2]

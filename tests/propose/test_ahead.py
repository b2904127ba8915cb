"""Drafting on another worker, ahead of verdicts: the same drafts and the same text as one worker, whatever happens."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import pytest
import torch

from foretoken.control.base import Controller
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.law import PointMass
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import Step
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Handle, Scores
from foretoken.models.resumable import Resumable
from foretoken.models.toy import ToyModel
from foretoken.propose.ahead import Drafter, likely_path
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.links import Line, Lost, Threaded
from foretoken.propose.remote import Remote
from foretoken.propose.suffix import Suffix
from foretoken.propose.tolerant import Tolerant

TARGET = ToyModel(vocab_size=7, order=2, seed=3, sharpness=2.5)
DISTRIBUTION, TRAJECTORY = Exactness.DISTRIBUTION, Exactness.TRAJECTORY


class Slow(Resumable):
    """A target whose passes take a while, so that the worker gets somewhere meanwhile."""

    def __init__(self, inner: ToyModel, seconds: float = 0.004) -> None:
        super().__init__(inner, lambda: time.sleep(seconds))


class Varied(Controller):
    """Budgets that nobody foresees, the same in every run: they depend on the text alone."""

    def __init__(self, most: int) -> None:
        self.most = most

    def budgets(self, contexts: Sequence[Context], rooms: Sequence[int]) -> list[int]:
        return [
            max(0, min(room, random.Random(f"{c.id},{len(c.tokens)}").choice((0, 1, self.most, self.most))))
            for c, room in zip(contexts, rooms, strict=True)
        ]


class Steady(Controller):
    def __init__(self, most: int) -> None:
        self.most = most

    def budgets(self, contexts: Sequence[Context], rooms: Sequence[int]) -> list[int]:
        return [max(0, min(self.most, room)) for room in rooms]


def inner(config: DraftModelConfig, strength: float = 0.3) -> tuple[Proposer, Resumable]:
    model = Resumable(TARGET.perturbed(strength))
    return DraftModel(model, config), model


def remote(config: DraftModelConfig, ahead: int, strength: float = 0.3) -> Remote:
    def work(line: Line) -> None:
        proposer, model = inner(config, strength)
        Drafter(proposer, line, ahead, [model]).run()

    return Remote(Threaded(work))


def contexts(law: SamplingLaw, grade: Exactness, count: int = 5) -> list[Context]:
    prompts = [[(3 * i + j) % 7 for j in range(2 + 3 * i)] for i in range(count)]
    return [Context(i, prompt, len(prompt), law, Streams(i + 11), grade) for i, prompt in enumerate(prompts)]


def run(
    proposer: Proposer, law: SamplingLaw, grade: Exactness, controller: Controller, tokens: int = 16, slow: float = 0.0
) -> tuple[list[list[int]], list[Step]]:
    """Ragged requests that join and leave, one of which is cancelled. -> texts, steps"""
    engine = Engine(Slow(TARGET, slow) if slow else TARGET, proposer, controller, max_sequences=3)
    own = contexts(law, grade)
    for context in own:
        engine.add(context, Length(tokens - 2 * context.id))
    steps: list[Step] = []
    while engine.busy:
        steps += engine.step()
        if sum(step.sequence == 1 for step in steps) == 3:
            engine.abort(1)
    return [context.tokens for context in own], steps


def to_the_end(elsewhere: Remote) -> None:
    while True:
        elsewhere.link.receive(1.0)


def whole(texts: list[list[int]]) -> list[list[int]]:
    """Without the one that was cancelled, which is as long as its drafts were lucky."""
    return texts[:1] + texts[2:]


def facts(steps: Sequence[Step]) -> list[object]:
    """What two runs have to have in common, drafts bit by bit."""
    return [(s.sequence, s.position, s.tokens, s.verdict, s.draft.ids, s.draft.parents, law(s.draft)) for s in steps]


def law(draft: Draft) -> object:
    rows = None if isinstance(draft.law, PointMass) else draft.law.probs.numpy().tobytes()
    return type(draft.law), rows


PLANS = ((Steady(4), 1, 0.002), (Steady(4), 3, 0.0), (Varied(5), 0, 0.0), (Varied(5), 2, 0.001))
LAWS = {
    "greedy": (SamplingLaw(temperature=0.0), DISTRIBUTION),
    "drawn": (SamplingLaw(temperature=0.9, top_k=5, presence_penalty=0.3, logit_bias=((2, 0.5),)), DISTRIBUTION),
    "seeded": (SamplingLaw(), TRAJECTORY),
}
SHAPES = {
    "chain": DraftModelConfig(),
    "sampled": DraftModelConfig(tree="sampled", top_k=2),
    "greedy_multi": DraftModelConfig(tree="greedy_multi", top_k=2),
    "top_k": DraftModelConfig(tree="top_k", top_k=2),
    "two steps": DraftModelConfig(num_steps=2),
    "hot": DraftModelConfig(draft_temperature=1.5),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", LAWS)
def test_drafts_and_texts_are_those_of_one_worker(kind: str, shape: str) -> None:
    sampling, grade = LAWS[kind]
    config = SHAPES[shape]
    for controller, ahead, slow in PLANS:
        texts, steps = run(inner(config)[0], sampling, grade, controller)
        elsewhere = remote(config, ahead)
        found, own = run(elsewhere, sampling, grade, controller, slow=slow)
        assert found == texts
        assert facts(own) == facts(steps)
        elsewhere.close()


@pytest.mark.parametrize("kind", LAWS)
def test_rounds_whose_guess_came_true_find_their_draft(kind: str) -> None:
    """The draft is the target itself: of greedy and of seeded requests every guess is right."""
    sampling, grade = LAWS[kind]
    elsewhere = remote(DraftModelConfig(), ahead=2, strength=0.0)
    texts, _ = run(elsewhere, sampling, grade, Steady(3), tokens=40, slow=0.02)
    assert texts == run(inner(DraftModelConfig(), 0.0)[0], sampling, grade, Steady(3), tokens=40)[0]
    assert elsewhere.rounds > elsewhere.ready
    assert elsewhere.ready > elsewhere.rounds // (2 if kind != "drawn" else 10)


def test_a_proposer_that_learns_is_told_everything_in_order() -> None:
    def work(line: Line) -> None:
        Drafter(Suffix(), line, ahead=2).run()

    sampling, grade = LAWS["seeded"]
    elsewhere = Remote(Threaded(work))
    assert elsewhere.learns
    _, steps = run(Suffix(), sampling, grade, Varied(4))
    assert facts(run(elsewhere, sampling, grade, Varied(4))[1]) == facts(steps)


def test_a_chain_that_ends_early_is_that_of_one_worker() -> None:
    config = DraftModelConfig(draft_stop="margin")
    sampling, grade = LAWS["drawn"]
    _, steps = run(inner(config)[0], sampling, grade, Steady(6))
    assert facts(run(remote(config, 2), sampling, grade, Steady(6))[1]) == facts(steps)


def test_long_texts_are_read_in_the_same_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.propose.draft_model.PIECE", 8)
    sampling, grade = LAWS["drawn"]
    _, steps = run(inner(DraftModelConfig())[0], sampling, grade, Varied(3))
    assert facts(run(remote(DraftModelConfig(), 2), sampling, grade, Varied(3), slow=0.002)[1]) == facts(steps)


class Dying(DraftModel):
    """Ends its worker in the middle of a round."""

    left = 6

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        self.left -= 1
        if self.left < 0:
            raise SystemExit
        return super().propose(contexts, budgets)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_decoding_goes_on_when_the_worker_dies(caplog: pytest.LogCaptureFixture) -> None:
    def work(line: Line) -> None:
        Drafter(Dying(TARGET.perturbed(0.3)), line).run()

    sampling, grade = LAWS["seeded"]
    texts, _ = run(Proposer(), sampling, grade, Steady(4))
    before = set(threading.enumerate())
    elsewhere = Remote(Threaded(work))
    found, steps = run(elsewhere, sampling, grade, Steady(4))
    assert whole(found) == whole(texts)
    assert any(len(step.draft) for step in steps) and not len(steps[-1].draft)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "goes on without drafts" in caplog.text
    for thread in set(threading.enumerate()) - before:  # its end is this test's affair, not the next one's
        thread.join(1.0)


def test_a_worker_that_hangs_is_not_waited_for_again(caplog: pytest.LogCaptureFixture) -> None:
    def work(line: Line) -> None:
        proposer, model = inner(DraftModelConfig())
        model.before = lambda: time.sleep(2.0)
        Drafter(proposer, line, 0).run()

    elsewhere = Remote(Threaded(work), timeout=0.05)
    started = time.perf_counter()
    texts, _ = run(elsewhere, *LAWS["seeded"], Steady(4))
    assert texts == run(Proposer(), *LAWS["seeded"], Steady(4))[0]
    assert time.perf_counter() - started < 1.0
    assert "gave none in 0.05 s" in caplog.text


class Failing(DraftModel):
    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        raise ZeroDivisionError("on purpose")


def test_what_fails_there_is_told_here(caplog: pytest.LogCaptureFixture) -> None:
    def work(line: Line) -> None:
        Drafter(Failing(TARGET.perturbed(0.3)), line).run()

    elsewhere = Tolerant(Remote(Threaded(work)))
    texts, _ = run(elsewhere, *LAWS["seeded"], Steady(4))
    assert texts == run(Proposer(), *LAWS["seeded"], Steady(4))[0]
    assert elsewhere.failures == 3 and "ZeroDivisionError: on purpose" in caplog.text


def test_nothing_is_drafted_where_no_token_can_come() -> None:
    """It is the target's pass that ends the request with an error."""
    impossible = SamplingLaw(bad_words=tuple((token,) for token in range(7)))
    elsewhere = remote(DraftModelConfig(), 1)
    own = contexts(impossible, DISTRIBUTION, 1)
    assert len(elsewhere.propose(own, [3])[0]) == 0
    elsewhere.forget(own[0])
    fine = contexts(SamplingLaw(), DISTRIBUTION, 1)
    assert len(elsewhere.propose(fine, [3])[0]) == 3


class Letters:
    """A grammar of which the draft knows nothing."""

    def allowed(self, history: object) -> torch.Tensor:
        return torch.tensor([True] * 5 + [False] * 2)


@pytest.mark.parametrize("grade", [DISTRIBUTION, TRAJECTORY])
def test_a_grammar_stays_here_and_holds(grade: Exactness) -> None:
    sampling = SamplingLaw(grammar=Letters())
    texts, steps = run(remote(DraftModelConfig(), 1), sampling, grade, Steady(4))
    assert any(len(step.draft) for step in steps)
    assert all(token < 5 for step in steps for token in step.tokens)
    if grade is TRAJECTORY:
        assert whole(texts) == whole(run(Proposer(), sampling, grade, Steady(4))[0])


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    models: list[Resumable] = []

    def work(line: Line) -> None:
        proposer, model = inner(DraftModelConfig())
        models.append(model)
        Drafter(proposer, line, 2, [model]).run()

    elsewhere = Remote(Threaded(work))
    run(elsewhere, *LAWS["drawn"], Varied(4), slow=0.002)
    toy = models[0].inner
    assert isinstance(toy, ToyModel) and not elsewhere._seats and not elsewhere._serials
    until = time.monotonic() + 5.0
    while toy._open and time.monotonic() < until:
        time.sleep(0.01)
    assert not toy._open and not models[0]._waiting
    elsewhere.close()
    with pytest.raises(Lost):
        to_the_end(elsewhere)


def test_a_path_that_is_likely_ends_in_a_leaf() -> None:
    tree = Draft(torch.tensor([1, 2, 3, 4]), (-1, -1, 1, 1), scores=torch.tensor([-2.0, -1.0, -3.0, -1.5]))
    assert likely_path(tree) == [2, 4]
    assert likely_path(Draft.chain([5, 6])) == [5, 6]
    assert likely_path(Draft.empty()) == []


def test_a_closed_sequence_is_gone_on_from_where_it_was_left() -> None:
    computed: list[int] = []

    class Counting(ToyModel):
        def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
            computed.append(sum(len(handle.pending) for handle in handles))
            return super().score(handles, drafts, taps)

    model = Resumable(Counting(vocab_size=7))
    first = model.open([1, 2, 3, 4, 5])
    model.score([first], [Draft.chain([6])])
    with model.aside(1):
        model.close(first)
        model.close(first)
    again = model.open([1, 2, 3, 0, 6])
    other = model.open([1, 2, 3])
    model.score([again], [Draft.empty()])
    model.score([other], [Draft.empty()])
    assert computed == [5, 3, 3]
    model.close(again)
    with model.aside(2):
        model.close(other)
    model.release(1)
    assert model.inner._open  # type: ignore[attr-defined]
    model.release(2)
    assert not model.inner._open  # type: ignore[attr-defined]

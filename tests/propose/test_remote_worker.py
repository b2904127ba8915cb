"""Drafting on another worker, ahead of verdicts: the same drafts and the same text as one worker, whatever happens."""

import random
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from tests.propose.toys import TrackedToy

from foretoken.control.base import Controller
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft, PointMass
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Handle, Model, Scores
from foretoken.models.resumable import Resumable
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.per_request import FallbackProposer
from foretoken.propose.remote import Remote
from foretoken.propose.remote_transports import Disconnected, DraftEndpoint, EngineEndpoint, start_thread
from foretoken.propose.remote_worker import DraftingWorker, likely_path
from foretoken.propose.suffix import Suffix

pytestmark = pytest.mark.slow

TARGET = TrackedToy(vocab_size=7, order=2, seed=3, sharpness=2.5)
DISTRIBUTION, TRAJECTORY = Exactness.DISTRIBUTION, Exactness.TRAJECTORY


class Slow(Resumable):
    """A target with slow passes, so that the worker drafts ahead meanwhile."""

    def __init__(self, inner: ToyModel, seconds: float = 0.004) -> None:
        super().__init__(inner, lambda: time.sleep(seconds))


class Varied(Controller):
    """Unpredictable budgets, the same in every run: they depend on the text alone."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def budgets(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> list[int]:
        return [
            max(0, min(limit, random.Random(f"{c.id},{len(c.tokens)}").choice((0, 1, self.budget, self.budget))))
            for c, limit in zip(contexts, max_draft_tokens, strict=True)
        ]


class Steady(Controller):
    def __init__(self, budget: int) -> None:
        self.budget = budget

    def budgets(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> list[int]:
        return [max(0, min(self.budget, limit)) for limit in max_draft_tokens]


def inner(config: DraftModelConfig, strength: float = 0.3) -> tuple[Proposer, Resumable]:
    model = Resumable(TARGET.perturbed(strength))
    return DraftModel(model, config), model


def remote(config: DraftModelConfig, ahead: int, strength: float = 0.3) -> Remote:
    def work(endpoint: DraftEndpoint) -> None:
        proposer, model = inner(config, strength)
        DraftingWorker(proposer, endpoint, ahead, [model]).run()

    return Remote(start_thread(work))


def contexts(law: SamplingLaw, grade: Exactness, count: int = 5) -> list[Context]:
    prompts = [[(3 * i + j) % 7 for j in range(2 + 3 * i)] for i in range(count)]
    return [Context(i, prompt, len(prompt), law, Streams(i + 11), grade) for i, prompt in enumerate(prompts)]


def run(
    proposer: Proposer,
    law: SamplingLaw,
    grade: Exactness,
    controller: Controller,
    tokens: int = 16,
    slow: float = 0.0,
    target: Model | None = None,
) -> tuple[list[list[int]], list[StepOutput]]:
    """Runs requests of different lengths, one of which is aborted. Returns texts and steps."""
    target = target or (Slow(TARGET, slow) if slow else TARGET)
    engine = Engine(target, proposer, controller, max_sequences=3)
    own = contexts(law, grade)
    for context in own:
        engine.add(context, Length(tokens - 2 * context.id))
    steps: list[StepOutput] = []
    while engine.busy:
        steps += engine.step()
        if sum(step.sequence == 1 for step in steps) == 3:
            engine.abort(1)
    return [context.tokens for context in own], steps


def to_the_end(drafting: Remote) -> None:
    while True:
        drafting.endpoint.receive(1.0)


def whole(texts: list[list[int]]) -> list[list[int]]:
    """Skips the aborted request, whose length depends on what was accepted."""
    return texts[:1] + texts[2:]


def facts(steps: Sequence[StepOutput]) -> list[object]:
    """Returns the part that two runs must have in common, drafts bit by bit."""
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
        drafting = remote(config, ahead)
        result, own = run(drafting, sampling, grade, controller, slow=slow)
        assert result == texts
        assert facts(own) == facts(steps)
        drafting.close()


class CountedEndpoint(EngineEndpoint):
    sent = 0

    def send(self, message: bytes) -> None:
        self.sent += 1
        super().send(message)


class Counted:
    """A worker's endpoint. waits_after: messages that it had received when it last waited for one."""

    endpoint: DraftEndpoint
    received = waits_after = 0

    def receive(self, seconds: float | None = None) -> bytes | None:
        if seconds is None:
            self.waits_after = self.received
        message = self.endpoint.receive(seconds)
        self.received += message is not None
        return message

    def send(self, message: bytes) -> None:
        self.endpoint.send(message)


@pytest.mark.parametrize("kind", LAWS)
def test_correct_predictions_have_their_draft_ready(kind: str) -> None:
    """The draft is the target itself, so every prediction for greedy and seeded requests is right."""
    sampling, grade = LAWS[kind]
    worker = Counted()

    def work(endpoint: DraftEndpoint) -> None:
        proposer, model = inner(DraftModelConfig(), 0.0)
        worker.endpoint = endpoint
        DraftingWorker(proposer, worker, 2, [model]).run()

    link = start_thread(work)
    transport = CountedEndpoint(link.send, link._incoming, link.worker, link.close)

    def until_drafted() -> None:
        """A pass takes as long as the worker drafts ahead."""
        end = time.monotonic() + 60.0
        while worker.waits_after < transport.sent and time.monotonic() < end:
            time.sleep(0.001)

    drafting = Remote(transport)
    texts, _ = run(drafting, sampling, grade, Steady(3), tokens=40, target=Resumable(TARGET, until_drafted))
    assert texts == run(inner(DraftModelConfig(), 0.0)[0], sampling, grade, Steady(3), tokens=40)[0]
    assert drafting.drafts_needed > drafting.drafts_ready
    assert drafting.drafts_ready > drafting.drafts_needed // (2 if kind != "drawn" else 10)


def test_a_learning_proposer_observes_every_step_in_order() -> None:
    def work(endpoint: DraftEndpoint) -> None:
        DraftingWorker(Suffix(), endpoint, ahead=2).run()

    sampling, grade = LAWS["seeded"]
    drafting = Remote(start_thread(work))
    assert drafting.learns
    _, steps = run(Suffix(), sampling, grade, Varied(4))
    assert facts(run(drafting, sampling, grade, Varied(4))[1]) == facts(steps)


def test_a_chain_that_ends_early_is_that_of_one_worker() -> None:
    config = DraftModelConfig(draft_stop="margin")
    sampling, grade = LAWS["drawn"]
    _, steps = run(inner(config)[0], sampling, grade, Steady(6))
    assert facts(run(remote(config, 2), sampling, grade, Steady(6))[1]) == facts(steps)


def test_long_texts_are_prefilled_in_the_same_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.propose.draft_model.PREFILL_CHUNK", 8)
    sampling, grade = LAWS["drawn"]
    _, steps = run(inner(DraftModelConfig())[0], sampling, grade, Varied(3))
    assert facts(run(remote(DraftModelConfig(), 2), sampling, grade, Varied(3), slow=0.002)[1]) == facts(steps)


class Dying(DraftModel):
    """Ends its worker in the middle of a step."""

    left = 6

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        self.left -= 1
        if self.left < 0:
            raise SystemExit
        return super().propose(contexts, budgets)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_decoding_continues_when_the_worker_dies(caplog: pytest.LogCaptureFixture) -> None:
    def work(endpoint: DraftEndpoint) -> None:
        DraftingWorker(Dying(TARGET.perturbed(0.3)), endpoint).run()

    sampling, grade = LAWS["seeded"]
    texts, _ = run(Proposer(), sampling, grade, Steady(4))
    before = set(threading.enumerate())
    drafting = Remote(start_thread(work))
    result, steps = run(drafting, sampling, grade, Steady(4))
    assert whole(result) == whole(texts)
    assert any(len(step.draft) for step in steps) and not len(steps[-1].draft)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "continues without drafts" in caplog.text
    for thread in set(threading.enumerate()) - before:  # its end is this test's affair, not the next one's
        thread.join(60.0)


def test_a_worker_that_hangs_is_not_waited_for_again(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()

    def work(endpoint: DraftEndpoint) -> None:
        proposer, model = inner(DraftModelConfig())
        model.before = lambda: ended.wait(60.0)
        DraftingWorker(proposer, endpoint, 0).run()

    drafting = Remote(start_thread(work), timeout=0.05)
    texts, _ = run(drafting, *LAWS["seeded"], Steady(4))
    ended.set()
    assert texts == run(Proposer(), *LAWS["seeded"], Steady(4))[0]
    assert caplog.text.count("gave none in 0.05 s") == 1


class Failing(DraftModel):
    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        raise ZeroDivisionError("on purpose")


def test_an_exception_in_the_worker_is_raised_in_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    def work(endpoint: DraftEndpoint) -> None:
        DraftingWorker(Failing(TARGET.perturbed(0.3)), endpoint).run()

    drafting = FallbackProposer(Remote(start_thread(work)))
    texts, _ = run(drafting, *LAWS["seeded"], Steady(4))
    assert texts == run(Proposer(), *LAWS["seeded"], Steady(4))[0]
    assert drafting.failures == 3 and "ZeroDivisionError: on purpose" in caplog.text


def test_nothing_is_drafted_when_no_token_is_possible() -> None:
    """The target's pass ends the request with an error."""
    impossible = SamplingLaw(bad_words=tuple((token,) for token in range(7)))
    drafting = remote(DraftModelConfig(), 1)
    own = contexts(impossible, DISTRIBUTION, 1)
    assert len(drafting.propose(own, [3])[0]) == 0
    drafting.forget(own[0])
    fine = contexts(SamplingLaw(), DISTRIBUTION, 1)
    assert len(drafting.propose(fine, [3])[0]) == 3


class Letters:
    """A grammar that the draft does not know."""

    def allowed(self, history: object) -> torch.Tensor:
        return torch.tensor([True] * 5 + [False] * 2)


@pytest.mark.parametrize("grade", [DISTRIBUTION, TRAJECTORY])
def test_a_grammar_is_not_sent_and_holds(grade: Exactness) -> None:
    sampling = SamplingLaw(grammar=Letters())
    texts, steps = run(remote(DraftModelConfig(), 1), sampling, grade, Steady(4))
    assert any(len(step.draft) for step in steps)
    assert all(token < 5 for step in steps for token in step.tokens)
    if grade is TRAJECTORY:
        assert whole(texts) == whole(run(Proposer(), sampling, grade, Steady(4))[0])


def test_forgotten_sequences_free_the_workers_memory() -> None:
    models: list[Resumable] = []

    def work(endpoint: DraftEndpoint) -> None:
        proposer, model = inner(DraftModelConfig())
        models.append(model)
        DraftingWorker(proposer, endpoint, 2, [model]).run()

    drafting = Remote(start_thread(work))
    run(drafting, *LAWS["drawn"], Varied(4), slow=0.002)
    toy = models[0].inner
    assert isinstance(toy, TrackedToy) and drafting.num_sessions == 0
    until = time.monotonic() + 60.0
    while toy.open_slots and time.monotonic() < until:
        time.sleep(0.01)
    assert not toy.open_slots  # a sequence that waits to be resumed would be open
    drafting.close()
    with pytest.raises(Disconnected):
        to_the_end(drafting)


def test_the_likely_path_ends_in_a_leaf() -> None:
    tree = Draft.tree([1, 2, 3, 4], (-1, -1, 1, 1), scores=(-2.0, -1.0, -3.0, -1.5))
    assert likely_path(tree) == [2, 4]
    assert likely_path(Draft.chain([5, 6])) == [5, 6]
    assert likely_path(Draft.empty()) == []


def test_a_closed_sequence_resumes_with_its_cached_rows() -> None:
    computed: list[int] = []

    class Counting(TrackedToy):
        def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
            computed.append(sum(len(handle.pending) for handle in handles))
            return super().score(handles, drafts, taps)

    toy = Counting(vocab_size=7)
    model = Resumable(toy)
    first = model.open([1, 2, 3, 4, 5])
    model.score([first], [Draft.chain([6])])
    with model.parked(1):
        model.close(first)
        model.close(first)
    again = model.open([1, 2, 3, 0, 6])
    other = model.open([1, 2, 3])
    model.score([again], [Draft.empty()])
    model.score([other], [Draft.empty()])
    assert computed == [5, 3, 3]
    model.close(again)
    with model.parked(2):
        model.close(other)
    model.release(1)
    assert toy.open_slots
    model.release(2)
    assert not toy.open_slots

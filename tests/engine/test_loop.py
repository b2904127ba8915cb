"""The loop's invariants, on exact toys."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.costs.model import CostModel
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Stopping
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.suffix import Lookup

TARGET = ToyModel(vocab_size=6, order=2, seed=3, sharpness=2.0)


@dataclass
class Length(Stopping):
    """Stops at a length or at an end token."""

    tokens_left: int
    end: int | None = None
    seen: list[int] = field(default_factory=list)

    def push(self, token: int) -> str | None:
        self.seen.append(token)
        self.tokens_left -= 1
        return "stop" if token == self.end else "length" if self.tokens_left == 0 else None


def context(
    identifier: int, seed: int, grade: Exactness, depth: int | None = None, temperature: float = 1.0
) -> Context:
    prompt = [1, 2, 3, identifier % 6]
    return Context(identifier, prompt, len(prompt), SamplingLaw(temperature), Streams(seed), grade, depth)


def proposers() -> Iterator[Proposer]:
    yield Proposer()
    yield DraftModel(TARGET.perturbed(0.3))
    yield Lookup()


def run(engine: Engine, contexts: list[Context], tokens: int = 40, end: int | None = None) -> dict[int, list[int]]:
    for c in contexts:
        engine.add(c, Length(tokens, end))
    while engine.busy:
        for step in engine.step():
            assert 1 <= len(step.tokens) <= len(step.draft) + 1
            sequence = engine.running.get(step.sequence)
            if sequence is not None:
                assert sequence.handle.cached == len(sequence.context.tokens) - 1
                assert sequence.handle.tokens == sequence.context.tokens
    return {c.id: c.tokens[c.prompt_length :] for c in contexts}


@pytest.mark.parametrize("grade", [Exactness.DISTRIBUTION, Exactness.TRAJECTORY])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_neighbours_never_change_a_sequence(grade: Exactness, which: int) -> None:
    def engine(size: int) -> Engine:
        return Engine(TARGET, list(proposers())[which], Fixed(3), max_sequences=size)

    together = run(engine(8), [context(i, 100 + i, grade, depth=i % 4) for i in range(6)])
    for i in range(6):
        alone = run(engine(1), [context(i, 100 + i, grade, depth=i % 4)])
        assert alone[i] == together[i]


def test_trajectory_does_not_depend_on_proposer_or_depth() -> None:
    texts = [
        run(Engine(TARGET, proposer, Fixed(depth)), [context(0, 7, Exactness.TRAJECTORY)])[0]
        for depth in (0, 1, 3, 8)
        for proposer in proposers()
    ]
    assert all(text == texts[0] for text in texts)


def test_greedy_is_plain_greedy() -> None:
    texts = [
        run(Engine(TARGET, p, Fixed(4)), [context(0, 7, Exactness.DISTRIBUTION, temperature=0.0)])[0]
        for p in proposers()
    ]
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("grade", [Exactness.DISTRIBUTION, Exactness.TRAJECTORY])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_that_drafts_for_itself_accepts_everything(grade: Exactness, temperature: float) -> None:
    engine = Engine(TARGET, DraftModel(ToyModel(6, 2, 3, 2.0)), Fixed(4))
    engine.add(context(0, 1, grade, temperature=temperature), Length(50))
    while engine.busy:
        for step in engine.step():
            assert len(step.verdict.path) == len(step.draft)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_end_token_inside_a_block_ends_the_text(which: int) -> None:
    long = run(Engine(TARGET, list(proposers())[which], Fixed(5)), [context(0, 5, Exactness.TRAJECTORY)])[0]
    end = long[7]
    cut = run(Engine(TARGET, list(proposers())[which], Fixed(5)), [context(0, 5, Exactness.TRAJECTORY)], end=end)[0]
    assert cut == long[: long.index(end) + 1]


def test_aborting_frees_every_slot() -> None:
    target, draft = ToyModel(6, 2, 3), ToyModel(6, 2, 4)
    engine = Engine(target, DraftModel(draft), Fixed(3), max_sequences=2)
    for i in range(4):
        engine.add(context(i, i, Exactness.DISTRIBUTION), Length(30))
    engine.step()
    for i in range(4):
        engine.abort(i)
    engine.abort(99)
    assert not engine.busy
    assert target.num_open == draft.num_open == 0


def test_a_request_that_stops_drafting_and_starts_again() -> None:
    """A draft model that did not run for some steps computes the missed tokens by itself."""

    class Alternating(Fixed):
        def budgets(self, contexts, max_draft_tokens):  # type: ignore[no-untyped-def]
            return [
                min(limit, 4 if c.generated % 3 else 0) for c, limit in zip(contexts, max_draft_tokens, strict=True)
            ]

    plain = run(Engine(TARGET, Proposer(), Fixed(0)), [context(0, 9, Exactness.TRAJECTORY)])[0]
    engine = Engine(TARGET, DraftModel(TARGET.perturbed(0.2)), Alternating(4))
    assert run(engine, [context(0, 9, Exactness.TRAJECTORY)])[0] == plain


class Counting(CostModel):
    """Observations: budgets and missed tokens of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def observe(self, steps) -> None:  # type: ignore[no-untyped-def]
        super().observe(steps)
        self.seen.append((steps[0].budget, steps[0].timings.missed_tokens))


def test_missed_tokens_are_those_since_the_last_draft() -> None:
    """Prompts count too. A request without a draft in a step misses that step's token."""

    class Every(Fixed):
        def budgets(self, contexts, max_draft_tokens):  # type: ignore[no-untyped-def]
            return [
                min(limit, 2 if c.generated % 5 == 0 else 0)
                for c, limit in zip(contexts, max_draft_tokens, strict=True)
            ]

    costs = Counting()
    controller = Every(2)
    object.__setattr__(controller, "costs", costs)
    engine = Engine(TARGET, DraftModel(TARGET.perturbed(0.2)), controller)
    c = context(0, 1, Exactness.DISTRIBUTION)
    engine.add(c, Length(60))
    expected = len(c.tokens)
    while engine.busy:
        (step,) = engine.step()
        budget, missed = costs.seen[-1]
        assert (budget, missed) == (step.budget, expected if step.budget else 0)
        expected = 0 if step.budget else expected + len(step.tokens)


def test_the_models_length_ends_a_sequence() -> None:
    small = ToyModel(6, 2, 3, max_length=20)
    engine = Engine(small, DraftModel(ToyModel(6, 2, 3, max_length=20)), Fixed(6))
    c = context(0, 1, Exactness.DISTRIBUTION)
    engine.add(c, Length(1000))
    reasons = [step.finish_reason for _ in range(30) for step in engine.step()]
    assert reasons[-1] == "length"
    assert len(c.tokens) == 20


def test_prompts_that_cannot_run_are_refused() -> None:
    engine = Engine(ToyModel(6, max_length=4), Proposer(), Fixed(0))
    with pytest.raises(InvalidRequest, match="prompt has 4 tokens"):
        engine.add(context(0, 1, Exactness.DISTRIBUTION), Length(5))
    with pytest.raises(InvalidRequest, match="empty"):
        engine.add(Context(0, [], 0, SamplingLaw(), Streams(0)), Length(5))
    assert not engine.busy


def test_an_exception_in_a_step_leaves_the_engine_usable() -> None:
    class Flaky(DraftModel):
        fail = False

        def observe(self, contexts, observations):  # type: ignore[no-untyped-def]
            super().observe(contexts, observations)

        def propose(self, contexts, budgets):  # type: ignore[no-untyped-def]
            drafts = super().propose(contexts, budgets)
            if self.fail:
                self.fail = False
                raise RuntimeError("planted")
            return drafts

    proposer = Flaky(TARGET.perturbed(0.3))
    engine = Engine(TARGET, proposer, Fixed(3))
    c = context(0, 11, Exactness.TRAJECTORY)
    engine.add(c, Length(40))
    engine.step()
    proposer.fail = True
    with pytest.raises(RuntimeError, match="planted"):
        engine.step()
    while engine.busy:
        engine.step()
    plain = run(Engine(TARGET, Proposer(), Fixed(0)), [context(0, 11, Exactness.TRAJECTORY)])[0]
    assert c.tokens[c.prompt_length :] == plain


def test_steps_count_what_was_emitted() -> None:
    engine = Engine(TARGET, DraftModel(TARGET.perturbed(0.3)), Fixed(4))
    engine.add(context(0, 2, Exactness.DISTRIBUTION), Length(33))
    steps = [step for _ in range(40) for step in engine.step()]
    stats = engine.take(0).counts.freeze()
    assert stats.tokens == sum(len(s.tokens) for s in steps) == 33
    assert stats.accepted == sum(s.accepted for s in steps) == sum(stats.accepted_per_position)
    assert stats.drafted == sum(stats.drafted_per_position)
    assert stats.steps == len(steps)
    assert stats.by_output == ((stats.drafts, stats.accepted),)
    assert stats.mean_acceptance_length == pytest.approx(1 + stats.accepted / stats.drafts)


def test_tokens_that_an_end_cuts_off_an_accepted_block_are_not_counted() -> None:
    target = ToyModel(50, order=2, seed=3)
    c = Context(0, [1, 2, 3], 3, SamplingLaw(), Streams(4), Exactness.TRAJECTORY)
    text = run(Engine(target, Proposer(), Fixed(0)), [replace(c, tokens=[1, 2, 3])], tokens=20)[0]
    end = next(i for i in range(5, 20) if i % 5 in (1, 2) and text[i] not in text[:i])
    engine = Engine(target, DraftModel(ToyModel(50, order=2, seed=3)), Fixed(4))
    engine.add(replace(c, tokens=[1, 2, 3]), Length(40, text[end]))
    while engine.busy:
        engine.step()
    stats = engine.take(0).counts.freeze()
    assert stats.tokens == end + 1
    assert stats.accepted == end + 1 - end // 5  # every fifth token is the target's own


def test_a_draft_leaves_a_position_for_the_targets_own_token() -> None:
    target = ToyModel(6, 2, 3, max_length=20)
    engine = Engine(target, DraftModel(ToyModel(6, 2, 3)), Fixed(6))
    for identifier, tokens in enumerate((8, 1000)):  # ended by max_tokens, and by the model's length
        c = context(identifier, 1, Exactness.DISTRIBUTION)
        engine.add(c, Length(tokens))
    left = {0: 8, 1: 20 - 4}
    while engine.busy:
        for step in engine.step():
            assert len(step.draft) == min(6, left[step.sequence] - 1)
            left[step.sequence] -= len(step.tokens)
    assert left == {0: 0, 1: 0}


def test_nothing_global_is_seeded() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    run(Engine(TARGET, DraftModel(TARGET.perturbed(0.3)), Fixed(3)), [context(0, 1, Exactness.DISTRIBUTION)])
    assert torch.equal(before, torch.get_rng_state())

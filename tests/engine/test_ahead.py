"""Engines that launch a step before they read the text of the step before it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.sequence import OutputOptions
from foretoken.engine.stopping import Length
from foretoken.models.base import Scores
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.suffix import Lookup, Suffix

TARGET = ToyModel(vocab_size=6, order=2, seed=3, sharpness=2.0)
PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "none": Proposer,
    "draft_model": lambda: DraftModel(TARGET.perturbed(0.3)),
    "ngram": Lookup,
}


class Phrase(Length):
    """Ends when its text ends in a phrase, which may be in the middle of a step's tokens."""

    phrase: list[int]
    log: list[str] | None = None

    def read(self, token: int) -> str | None:
        if self.log is not None:
            self.log.append("text")
        self.text = [*getattr(self, "text", []), token]
        return "stop" if self.text[-len(self.phrase) :] == self.phrase else None


class Logged(ToyModel):
    """Notes the beginning of each pass."""

    log: list[str]

    def score(self, *args: Any) -> list[Scores]:
        self.log.append("pass")
        return super().score(*args)


ENDS = {1: (2, 5, 4, 3), 3: (0, 3, 5, 1), 5: (4, 5, 1, 3)}


def phrase(*tokens: int, limit: int = 60, log: list[str] | None = None) -> Phrase:
    stopping = Phrase(limit)
    stopping.phrase, stopping.log = list(tokens), log
    return stopping


def context(number: int, length: int = 5) -> Context:
    prompt = [(7 * i + number) % 6 for i in range(length)]
    return Context(number, prompt, length, SamplingLaw(), Streams(number), Exactness.TRAJECTORY)


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("options", [{}, {"capacity": 192, "prompt_rows": 16}], ids=["free", "preempted"])
def test_outputs_do_not_depend_on_running_ahead(name: str, options: dict[str, Any]) -> None:
    results = []
    for ahead in (False, True):
        engine = Engine(TARGET, PROPOSERS[name](), Fixed(4), max_sequences=4, ahead=ahead, **options)
        for number in range(8):
            length = Length(80 + number, ends=(4,) if number == 4 else ())
            stopping = phrase(*ENDS[number]) if number in ENDS else length
            recorded = OutputOptions(logprobs=2 if number < 4 else None, prompt_logprobs=1 if number == 2 else None)
            engine.add(context(number, 5 + 9 * number), stopping, recorded, priority=number % 3)
        steps: dict[int, list[int]] = {}
        while engine.busy:
            for step in engine.step():
                steps.setdefault(step.sequence, []).extend(step.tokens)
            engine.check_integrity()
        assert "capacity" not in options or engine.usage.preemptions
        ended = [engine.take(number) for number in range(8)]
        assert all(one.context.tokens[one.context.prompt_length :] == steps[one.context.id] for one in ended)
        assert [one.counts.tokens for one in ended] == [len(steps[number]) for number in range(8)]
        results.append([(one.context.tokens, one.finish_reason, one.recorded, one.prompt_recorded) for one in ended])
    assert results[0] == results[1]
    assert " ".join(str(reason) for _, reason, *_ in results[0]) == "length stop length stop stop stop length length"


def test_text_is_read_while_the_next_step_runs() -> None:
    log: list[str] = []
    target = Logged(vocab_size=6, order=2, seed=3, sharpness=2.0)
    target.log = log
    for ahead, expected in (False, ["pass", "text"] * 3), (True, ["pass", "pass", "text", "pass", "text", "text"]):
        log.clear()
        engine = Engine(target, Proposer(), Fixed(0), ahead=ahead)
        engine.add(context(0), phrase(7, limit=3, log=log))
        while engine.busy:
            engine.step()
        assert log == expected


def test_the_first_call_launches_and_the_last_one_reads() -> None:
    engine = Engine(TARGET, Proposer(), Fixed(0), ahead=True)
    engine.add(context(0), Length(2))
    assert [len(engine.step()) for _ in range(3)] == [0, 1, 1] and not engine.busy


def test_a_sequence_that_its_text_ends_leaves_the_launched_step() -> None:
    """The others of that step go on, and what it computed for the sequence is dropped."""
    alone = Engine(TARGET, Proposer(), Fixed(0))
    alone.add(context(0), Length(12))
    alone.add(context(1), Length(12))
    while alone.busy:
        alone.step()
    texts = [alone.take(number).context.tokens for number in range(2)]
    engine = Engine(TARGET, Proposer(), Fixed(0), ahead=True)
    engine.add(context(0), phrase(*texts[0][5:9]))
    engine.add(context(1), Length(12))
    counts = []
    while engine.busy:
        counts.append(len(engine.step()))
        engine.check_integrity()
    assert counts == [0, 2, 2, 2, 2, *[1] * 8]
    assert [engine.take(0).context.tokens, engine.take(1).context.tokens] == [texts[0][:9], texts[1]]


def test_a_sequence_that_is_aborted_leaves_the_launched_step() -> None:
    engine = Engine(TARGET, DraftModel(TARGET.perturbed(0.3)), Fixed(3), ahead=True)
    expected = Engine(TARGET, Proposer(), Fixed(0))
    for one in (engine, expected):
        one.add(context(1), Length(20))
    engine.add(context(0), Length(20))
    engine.step()
    engine.step()
    engine.abort(0)
    engine.add(context(2), Length(20))
    for one in (engine, expected):
        while one.busy:
            one.step()
            one.check_integrity()
    assert engine.take(1).context.tokens == expected.take(1).context.tokens
    assert engine.take(0).finish_reason == "abort" and len(engine.take(2).context.tokens) == 25
    engine.add(context(3), Length(20))
    engine.step()
    engine.clear()
    assert not engine.busy and engine.step() == []


@pytest.mark.parametrize("part", ["schedule", "propose", "score"])
def test_a_step_that_fails_to_launch_is_tried_again_after_the_outputs_before_it(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(TARGET, Proposer(), Fixed(0), ahead=True)
    engine.add(context(0), Length(6))
    engine.add(context(1), Length(3))
    for _ in range(3):
        engine.step()

    def fail(*_: Any) -> Any:
        raise RuntimeError("planted")

    parts = {"schedule": engine.scheduler, "propose": engine.proposer, "score": engine.target}
    with monkeypatch.context() as patch:
        patch.setattr(parts[part], part, fail)
        steps = engine.step()
        assert [step.finish_reason for step in steps] == [None, "length"]
        with pytest.raises(RuntimeError, match="planted"):
            engine.step()
    while engine.busy:
        engine.step()
        engine.check_integrity()
    plain = Engine(TARGET, Proposer(), Fixed(0))
    plain.add(context(0), Length(6))
    while plain.busy:
        plain.step()
    assert engine.take(0).context.tokens == plain.take(0).context.tokens


def test_an_error_while_a_step_is_read_leaves_the_engine_usable() -> None:
    engine = Engine(TARGET, Proposer(), Fixed(0), ahead=True)
    engine.add(context(0), Length(4))
    engine.step()
    assert engine._launched is not None
    engine._launched = replace(engine._launched, rows=partial(next, iter(())))
    with pytest.raises(StopIteration):
        engine.step()
    while engine.busy:
        engine.step()
    assert len(engine.take(0).context.tokens) == 9


@pytest.mark.parametrize("ahead", [False, True])
def test_proposers_learn_texts_without_what_is_behind_their_end(ahead: bool) -> None:
    proposer = Suffix()
    engine = Engine(TARGET, proposer, Fixed(4), ahead=ahead)
    engine.add(context(5, 50), phrase(*ENDS[5]))
    while engine.busy:
        engine.step()
    text, other = engine.take(5).context.tokens, Suffix()
    other.store.add(text[50 - other.config.suffix_decoding_max_tree_depth :], None)
    assert len(proposer.store) == len(other.store) > 24 and text[-4:] == [*ENDS[5]]


def test_a_step_that_failed_to_launch_is_forgotten_with_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(TARGET, Proposer(), Fixed(0), ahead=True)
    engine.add(context(0), Length(6))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.proposer, "propose", partial(next, iter(())))
        assert len(engine.step()) == 1
    engine.abort(0)
    engine.add(context(1), Length(2))
    assert [len(engine.step()) for _ in range(3)] == [0, 1, 1] and not engine.busy

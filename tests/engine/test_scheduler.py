"""The order of requests: pieces of prompts, bounds on memory, priorities, and texts that never change for any of it."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import Timings
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.prefill_pace import PrefillLimit, PrefillPacer
from foretoken.engine.stopping import Length
from foretoken.models.base import Handle, Scores
from foretoken.models.state.pages import PAGE
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel

TARGET = ToyModel(vocab_size=6, order=2, seed=3, sharpness=2.0)
RNG = random.Random(5)
SYSTEM = "import os\nimport sys\nfrom collections import Counter, defaultdict\n\n\ndef helper(values):\n" * 6
PROMPTS = [
    SYSTEM + "def first(a, b):\n",
    SYSTEM + "class Second:\n    def __init__(self",
    "for line in open(path):\n" * 30,
    "x = 1",
    SYSTEM,
    "def μ(σ):\n    return '日本語🙂'\n" * 5,
]
PARAMS = [
    SamplingParams(max_tokens=RNG.randint(6, 40), temperature=RNG.choice([0.0, 0.8, 1.0]), seed=i) for i in range(6)
]


def context(identifier: int, length: int, seed: int = 0) -> Context:
    prompt = [(7 * i + identifier) % 6 for i in range(length)]
    return Context(identifier, prompt, length, SamplingLaw(), Streams(seed), Exactness.TRAJECTORY)


def engine(**options: object) -> Engine:
    return Engine(TARGET, DraftModel(TARGET.perturbed(0.3)), Fixed(3), **options)  # type: ignore[arg-type]


def finished(one: Engine) -> dict[int, list[int]]:
    while one.busy:
        one.step()
        one.check_integrity()
    return {identifier: sequence.context.tokens for identifier, sequence in one.finished.items()}


def texts(**options: object) -> dict[int, list[int]]:
    one = engine(**options)
    for i, length in enumerate((40, 3, 90, 17, 64, 5)):
        one.add(context(i, length, seed=i), Length(20 + i), priority=i % 2)
    return finished(one)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_rows": 1},
        {"prompt_rows": 7},
        {"prompt_rows": "auto"},
        {"max_sequences": 2},
        {"capacity": 192},
        {"capacity": 192, "prompt_rows": 9, "max_sequences": 3},
    ],
    ids=str,
)
def test_texts_do_not_depend_on_how_they_were_scheduled(options):
    assert texts(**options) == texts()


def test_a_long_prompt_does_not_stop_the_others():
    one = engine(prompt_rows=8)
    one.add(context(0, 4), Length(100))
    one.step()
    one.add(context(1, 81), Length(4))
    decode_steps = 0
    while 1 not in one.running or one.running[1].num_uncomputed > 8:
        assert [step.sequence for step in one.step()] == [0]
        decode_steps += 1
    assert decode_steps == 9
    assert {step.sequence for step in one.step()} == {0, 1}


def test_the_last_sequences_are_preempted_when_the_kv_cache_is_full_and_resume():
    one = engine(capacity=192)
    for i in range(4):
        one.add(context(i, 30, seed=i), Length(60))
    aside = set()
    while one.busy:
        one.step()
        one.check_integrity()
        assert one.usage.kv_tokens <= 192
        aside |= {sequence.context.id for sequence in one.waiting if sequence.context.generated}
    assert aside and one.usage.preemptions >= len(aside)
    alone = {}
    for i in range(4):
        other = engine()
        other.add(context(i, 30, seed=i), Length(60))
        alone |= finished(other)
    assert {i: s.context.tokens for i, s in one.finished.items()} == alone


class Bounded(ToyModel):
    """Counts the rows that its open sequences hold in blocks, those of drafts among them."""

    def __init__(self, capacity: int, **options: Any) -> None:
        super().__init__(**options)
        self.capacity, self.handles, self.drafted = capacity, [], 0

    def open(self, *given: Any, **named: Any) -> Handle:
        self.handles.append(super().open(*given, **named))
        return self.handles[-1]

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        nodes = {id(handle): len(draft) for handle, draft in zip(handles, drafts, strict=True)}
        rows = [len(handle.tokens) + nodes.get(id(handle), 0) for handle in self.handles if handle.slot >= 0]
        assert sum(-(-count // PAGE) * PAGE for count in rows) <= self.capacity
        self.drafted += sum(nodes.values())
        return super().score(handles, drafts, taps)


@pytest.mark.parametrize("prompt_rows", [None, 24])
@pytest.mark.parametrize("capacity", [128, 192, 320])
def test_rows_of_texts_and_drafts_never_exceed_the_capacity(capacity: int, prompt_rows: int | None) -> None:
    target = Bounded(capacity, vocab_size=6, order=2, seed=3, max_length=120)
    draft = ToyModel(vocab_size=6, order=2, seed=3, max_length=400)
    one = Engine(target, DraftModel(draft), Fixed(90), capacity=capacity, prompt_rows=prompt_rows)
    for i, length in enumerate((62, 30, 63, 64, 5, 40)):
        one.add(context(i, length, seed=i), Length(60))
    while one.busy:
        one.step()
        one.check_integrity()
    assert target.drafted > 0


def test_preempted_sequences_leave_the_draft_too_and_the_first_is_never_preempted():
    draft = ToyModel(vocab_size=6, order=2, seed=3)
    one = Engine(TARGET, DraftModel(draft), Fixed(3), capacity=192)
    for i in range(4):
        one.add(context(i, 30, seed=i), Length(60))
    while one.busy:
        one.step()
        assert 0 in one.running or 0 in one.finished
        assert draft.num_open <= len(one.running)
    assert one.usage.preemptions > 0


def test_higher_priority_runs_first_and_preempts_others():
    one = engine(max_sequences=1)
    one.add(context(0, 5), Length(50), priority=1)
    one.step()
    one.add(context(1, 5), Length(5), priority=1)
    one.add(context(2, 5), Length(5), priority=0)
    order = []
    while one.busy:
        order += [step.sequence for step in one.step() if step.finish_reason]
    assert order == [2, 0, 1]


def test_equal_priorities_run_in_order_of_arrival():
    one = engine(max_sequences=2)
    for i in range(5):
        one.add(context(i, 5), Length(10))
    order = []
    while one.busy:
        order += [step.sequence for step in one.step() if step.finish_reason]
    assert order == sorted(order)


def test_aborting_works_at_every_moment():
    one = engine(prompt_rows=4, max_sequences=2)
    for i in range(4):
        one.add(context(i, 30), Length(10))
    one.step()
    for i in (0, 3, 1, 9):  # being read, waiting, running, unknown
        one.abort(i)
        one.check_integrity()
    assert list(finished(one)) == [0, 3, 1, 2]


class Failing(SamplingLaw):
    """Fails once five tokens are there."""

    def choose(self, logits, histories, noise):  # type: ignore[no-untyped-def]
        return -1

    def probs(self, logits, histories):  # type: ignore[no-untyped-def]
        raise InvalidRequest("no law")

    needs_history = True


def test_a_law_that_fails_ends_its_own_request_alone():
    one, alone = engine(), engine()
    broken = context(0, 5)
    broken.law = Failing()
    one.add(broken, Length(10))
    one.add(context(1, 6, seed=1), Length(10))
    alone.add(context(1, 6, seed=1), Length(10))
    steps = one.step()
    assert [step.finish_reason for step in steps] == ["error", None] and steps[0].tokens == ()
    one.check_integrity()
    assert isinstance(one.take(0).error, InvalidRequest)
    assert finished(one) == finished(alone)


def test_prefill_pace_follows_measured_times():
    pace = PrefillPacer("auto")
    assert pace.next_step(0, 9, 9).rows == 512 and pace.rows(4, 1) == 32
    for rows in (0, 32, 0, 32):
        pace.observe(Timings(0.0, 0.05 + 0.001 * rows, 0.0, 0.0, 4, rows))
    assert pace.rows(4, 1) == pytest.approx(50, abs=1)
    assert pace.rows(4, 0) == pace.rows(4, 1)
    assert pace.rows(4, 3) == pytest.approx(150, abs=2)  # each of those who wait adds a step
    assert pace.rows(4, 64) == pytest.approx(250, abs=2)  # a quarter of a second


def test_prefill_pace_of_a_burst_is_not_that_of_the_step_before_it():
    """A step takes 50 ms and another for each row; only a step of one sequence was timed without prefill."""
    pace = PrefillPacer("auto")
    pace.observe(Timings(0.0, 0.051, 0.0, 0.0, 1))
    for _ in range(3):
        pace.observe(Timings(0.0, 0.05 + 0.001 * (40 + 32), 0.0, 0.0, 40, 32))
    assert pace.rows(40, 1) == pytest.approx(90, abs=1)


def test_prefill_pace_without_a_step_to_compare_with():
    """If every step has had prefill, weights are counted as rows, which makes chunks smaller and never larger."""
    pace = PrefillPacer("auto")
    pace.observe(Timings(0.0, 0.05 + 0.001 * 100, 0.0, 0.0, 4, 96))
    assert 0 < pace.rows(4, 1) <= 54
    pace.observe(Timings(0.0, 0.0, 0.0, 0.0, 4, 96))  # no clock
    assert pace.rows(4, 1) > 0


def test_prefill_pace_counts_draft_tokens_as_rows():
    """A row takes a millisecond beside 50; steps without prefill verify 12 draft tokens, those with prefill none."""
    pace = PrefillPacer("auto")
    pace.observe(Timings(0.0, 0.05 + 0.001 * 12, 0.0, 0.0, 4), draft_rows=12)
    for rows in (40, 20, 12, 5):  # the last two are no more rows than the step without prefill has
        pace.observe(Timings(0.0, 0.05 + 0.001 * rows, 0.0, 0.0, 4, rows))
    assert pace.rows(4, 1) == pytest.approx(62, abs=1)


def test_a_short_prompt_takes_the_place_of_draft_tokens_and_a_long_one_does_not():
    """A row takes a millisecond beside 50; steps without prefill verify 12 draft tokens."""
    pace = PrefillPacer("auto")
    for rows in (0, 50):
        pace.observe(Timings(0.0, 0.05 + 0.001 * (12 + rows), 0.0, 0.0, 4, rows), draft_rows=12)
    rows = pace.rows(4, 1)
    assert rows == pytest.approx(62, abs=1)
    assert pace.next_step(4, 1, 4 * (rows + 12) + 1) == PrefillLimit(rows)
    assert pace.next_step(4, 1, 4 * (rows + 12)) == PrefillLimit(rows + 12, drafts=False)
    assert pace.next_step(4, 1, 2 * rows + 10) == PrefillLimit(rows + 5, drafts=False)  # two equal steps
    assert pace.next_step(4, 1, 3) == PrefillLimit(rows, drafts=False)  # other prompts may have the rest


def test_requests_draft_again_once_a_short_prompt_is_prefilled():
    one = engine(prompt_rows="auto")
    one.add(context(0, 4), Length(100))
    one.step()
    assert [len(step.draft) for step in one.step()] == [3]
    one.add(context(1, 12), Length(100))
    assert [len(step.draft) for step in one.step()] == [0, 0]
    assert [len(step.draft) for step in one.step()] == [3, 3]


def test_prompts_that_arrive_together_begin_one_after_another():
    one = engine(prompt_rows="auto")
    for i, length in enumerate((80, 30, 40, 30, 80)):
        one.add(context(i, length), Length(50))
    assert [step.sequence for step in one.step()] == [0]
    tiny = engine(prompt_rows="auto")
    for i in range(8):
        tiny.add(context(i, 20), Length(50))
    assert {step.sequence for step in tiny.step()} == {0, 1, 2, 3}  # 80 rows cost a pass no more than its products


def test_a_prompt_that_does_not_fit_keeps_nobody_from_drafting():
    one = engine(prompt_rows="auto", capacity=128)
    one.add(context(0, 60), Length(60))
    one.step()
    one.add(context(1, 16), Length(100))
    drafted = [len(step.draft) for _ in range(3) for step in one.step()]
    assert [s.context.id for s in one.waiting] == [1] and all(drafted)


def test_prefill_limits_of_the_caller():
    for limit in (100, None):
        assert PrefillPacer(limit).next_step(4, 1, 3) == PrefillPacer(limit).next_step(0, 1, 3) == PrefillLimit(limit)
    with pytest.raises(InvalidRequest, match="max_num_batched_tokens"):
        PrefillPacer("fast")  # type: ignore[arg-type]


# on the bundled pair


@pytest.fixture(scope="module")
def alone() -> list[str]:
    plain = LLM(dtype="float32", speculative_config={"method": "none"}, max_model_len=512)
    return [plain.generate(p, q)[0].outputs[0].text for p, q in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 37, "enable_prefix_caching": True},
        {
            "max_num_batched_tokens": "auto",
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": 12_000_000,
            "max_num_seqs": 5,
        },
        {"methods": ["ngram", "prediction", {"method": "suffix"}]},
        {
            "max_num_batched_tokens": 37,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": 16_000_000,
            "max_num_seqs": 4,
            "speculative_config": {"method": "eagle3", "num_speculative_tokens": 5},
        },
    ],
    ids=["pieces", "memory", "methods", "head"],
)
@pytest.mark.slow
def test_real_texts_do_not_depend_on_how_they_were_scheduled(alone, options):
    llm = LLM(dtype="float32", max_model_len=512, **options)
    for _ in range(2):
        assert [o.outputs[0].text for o in llm.generate(PROMPTS, PARAMS)] == alone
        llm.engine.check_integrity()
    if "enable_prefix_caching" in options:
        assert llm.engine.usage.prefix_hits > len(SYSTEM) // 4


def test_a_bound_that_cannot_hold_one_sequence_is_refused():
    with pytest.raises(InvalidRequest, match="kv_cache_memory_bytes of 1 MiB holds"):
        LLM(kv_cache_memory_bytes=2**20)


@pytest.mark.slow
def test_methods_are_chosen_by_request(alone):
    config, methods = {"method": "draft_model"}, ["ngram", "prediction"]
    llm = LLM(dtype="float32", speculative_config=config, methods=methods, max_model_len=512)
    assert llm.methods == ("draft_model", "ngram", "prediction")
    q = SamplingParams(max_tokens=40, temperature=0.0, speculative_method="ngram", speculative_tokens=4)
    assert llm.generate(PROMPTS[2], q)[0].stats.drafted > 0
    with pytest.raises(InvalidRequest, match="'medusa' is not loaded; loaded: draft_model, ngram, prediction"):
        llm.generate("x", SamplingParams(speculative_method="medusa"))


def test_prompt_logprobs_are_those_of_the_model():
    llm = LLM(dtype="float32")
    text = "import os\n" * 40
    (out,) = llm.generate(text, SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=2, temperature=0.0))
    (longer,) = llm.generate(text + out.outputs[0].text, SamplingParams(max_tokens=1, prompt_logprobs=2))
    said = out.prompt_logprobs
    assert said is not None and said[0] is None and len(said) == len(out.prompt_token_ids)
    assert all(token in entry for token, entry in zip(out.prompt_token_ids[1:], said[1:], strict=True))
    if longer.prompt_token_ids[: len(said)] == out.prompt_token_ids:
        assert longer.prompt_logprobs[: len(said)] == said
    assert llm.generate("x", SamplingParams(max_tokens=1))[0].prompt_logprobs is None


def test_explanations_hold_probabilities_of_drafted_and_emitted_tokens():
    llm = LLM(dtype="float32")
    for piece in llm.stream("def f(x):\n", SamplingParams(max_tokens=30, explain=True, speculative_tokens=4)):
        said = piece.explained
        assert said is not None
        assert len(said.p) == len(said.q) == len(piece.step.draft)
        assert len(said.emitted_prob) >= len(piece.token_ids)
        assert all(0.0 <= p <= 1.0 for p in said.p) and all(q is None or 0.0 < q <= 1.0 for q in said.q)
        assert all(p > 0.0 for p in said.emitted_prob)


def test_a_plain_engine_needs_no_proposer():
    one = Engine(TARGET, Proposer(), Fixed(0), prompt_rows=3)
    one.add(context(0, 20), Length(5))
    assert len(finished(one)[0]) == 25


def test_a_step_is_refused_while_another_runs():
    class Reentrant(Proposer):
        """Runs the engine from inside a step, as another thread would."""

        def propose(self, contexts, budgets):
            with pytest.raises(InvalidRequest, match="another thread runs this engine"):
                one.step()
            refused.append(len(contexts))
            return super().propose(contexts, budgets)

    refused: list[int] = []
    one = Engine(TARGET, Reentrant(), Fixed(3))
    one.add(context(0, 5), Length(5))
    assert len(finished(one)[0]) == 10
    assert refused


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-300},
        {"top_p": 1e-280},
        {"repetition_penalty": 1e-300},
        {"logit_bias": {3: 1e39}},
        {"logit_bias": {3: float("nan")}},
    ],
    ids=str,
)
def test_parameters_that_leave_nothing_to_compute_with_are_refused(extreme):
    with pytest.raises(InvalidRequest, match=f"^{next(iter(extreme))} "):
        SamplingParams(**extreme)

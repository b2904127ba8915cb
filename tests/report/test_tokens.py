"""A text token by token: origins, probabilities and steps are those of the engine."""

from dataclasses import replace

import pytest

from foretoken import LLM, SamplingParams
from foretoken.core.draft import Draft
from foretoken.core.step import StepOutput, Timings
from foretoken.core.verdict import Verdict
from foretoken.report.tokens import ACCEPTED, REJECTED, TARGET, Tracer, page, visible

from .made_up import HOSTILE, SETTING, Letters, pieces
from .parsed import read, words


def traced(tokenizer: Letters, **options):
    tracer = Tracer(tokenizer, [0, 1])
    for piece in pieces(tokenizer, **options):
        tracer.push(piece)
    return tracer.trace()


def test_tokens_have_their_origin_step_and_probabilities():
    trace = traced(Letters(), steps=4)
    kept = [t for t in trace.tokens if t.origin != REJECTED]
    assert "".join(t.text for t in kept) == trace.text
    assert {t.origin for t in trace.tokens} == {ACCEPTED, REJECTED, TARGET}
    assert "".join(t.origin[0] for t in trace.tokens) == "aaataartarrtrrrt"
    assert [t.step for t in kept] == [1] * 4 + [2] * 3 + [3] * 2 + [4]
    assert all(t.p == pytest.approx(0.5) and t.rank == 1 for t in kept)
    assert all((t.q is None) if t.origin == TARGET else t.q == pytest.approx(1 / 18) for t in trace.tokens)
    # Of the rejected tokens only the first was verified by a recorded row.
    assert [t.p for t in trace.tokens if t.origin == REJECTED][:3] == [pytest.approx(0.25), pytest.approx(0.25), None]
    assert trace.acceptance() == [(3, 4), (2, 3), (1, 2)]


def test_the_page_shows_tokens_and_steps():
    trace = traced(Letters())
    root = read(page([trace], SETTING), scripts=1)
    spans = [each for each in root.iter("span") if (each.get("class") or "").startswith("token")]
    shown = "".join(each.text for each in spans if "rejected" not in each.get("class"))
    assert shown == trace.text
    assert [each.get("tabindex") for each in spans].count("0") == 1
    assert (
        spans[0]
        .get("data-tip")
        .startswith("def␣  draft, accepted, step 1 · target p 50.0 % (its choice no. 1) · draft q 5.6 %")
    )
    assert len(root.findall(".//g[@class='step']")) == 11  # without the prefill's
    assert "took 31.7 ms and is not shown" in words(root)


def test_hostile_texts_are_escaped():
    # A surrogate is what a lone byte of a broken character may become.
    tokenizer = Letters([HOSTILE] * 16)
    root = read(page([traced(tokenizer)], {"command": HOSTILE}), scripts=1)
    assert "<script>alert" in words(root.find("body"))


def test_pages_of_empty_and_aborted_completions():
    read(page([Tracer(Letters(), [0]).trace()]), scripts=1)
    read(page([]), scripts=1)
    trace = traced(Letters(), steps=1, finish="stop")
    assert len(read(page([trace]), scripts=1).findall(".//g[@class='step']")) == 1
    assert "not finished" in words(read(page([traced(Letters(), finish="abort")]), scripts=1))


def test_tokens_after_a_stop_string_are_marked():
    tokenizer = Letters()
    tracer = Tracer(tokenizer, [0])
    for piece in pieces(tokenizer, steps=2):
        tracer.push(replace(piece, text=piece.text[:-1] if piece.output is None else ""))
    trace = tracer.trace()
    assert [t.cut for t in trace.tokens if t.origin != REJECTED] == [False] * 3 + [True] * 4


def test_an_end_of_text_token_is_shown():
    tokenizer = Letters()
    piece = pieces(tokenizer, steps=1, finish="stop")[0]
    end = len(tokenizer.words) - 1
    step = StepOutput(0, 0, Draft.empty(), Verdict((), end), (end,), Timings(0, 0.1, 0, 0, 1), "stop")
    tracer = Tracer(tokenizer, [0])
    tracer.push(replace(piece, token_ids=(end,), step=step, text=""))
    (token,) = tracer.trace().tokens
    assert (token.text, token.cut, token.origin) == ("<|end|>", True, TARGET)


def test_the_longest_refused_path_of_a_tree():
    timings = Timings(0, 0, 0, 0, 1)
    tree = Draft.tree(range(6), (-1, -1, 0, 0, 3, 1))
    assert StepOutput(0, 0, tree, Verdict((0,), 9), (0, 9), timings).rejected == (3, 4)
    assert StepOutput(0, 0, tree, Verdict((), 9), (9,), timings).rejected == (0, 3, 4)
    assert StepOutput(0, 0, tree, Verdict((0, 3, 4), 9), (0, 3, 4, 9), timings).rejected == ()
    assert StepOutput(0, 0, tree, Verdict((0, 3, 4), 9), (0,), timings, "stop").rejected == ()
    assert StepOutput(0, 0, Draft.empty(), Verdict((), 9), (9,), timings).rejected == ()


def test_signs_for_blanks():
    assert visible(" a\n\t") == "␣a⏎⇥"
    assert visible("") == "(part of a character)"


@pytest.mark.parametrize("temperature, tree", [(0.0, "chain"), (1.0, "chain"), (1.0, "top_k"), (1.0, "sampled")])
@pytest.mark.slow
def test_steps_of_a_real_pair(tiny_pair, temperature, tree):
    config = {"method": "draft_model", "model": str(tiny_pair.draft), "num_speculative_tokens": 4, "tree": tree}
    llm = LLM(tiny_pair.target, speculative_config=config, dtype="float32")
    prompt = "def größe(€):"
    tracer = Tracer(llm.tokenizer, llm.tokenizer.encode(prompt))
    params = SamplingParams(max_tokens=24, temperature=temperature, logprobs=3, ignore_eos=True)
    for piece in llm.stream(prompt, params):
        tracer.push(piece)
        output = piece.output
    trace = tracer.trace()
    kept = [t for t in trace.tokens if t.origin != REJECTED]
    assert [t.id for t in kept] == list(output.token_ids) and trace.text == output.text
    assert all(0 <= t.p <= 1 and t.rank >= 1 for t in kept)
    assert sum(t.origin == ACCEPTED for t in kept) == output.stats.accepted
    drawn = temperature > 0 and tree != "top_k"
    assert all((t.q is not None and 0 < t.q <= 1) == (drawn and t.origin != TARGET) for t in trace.tokens)
    assert len(page([trace])) < 200_000
    read(page([trace]), scripts=1)

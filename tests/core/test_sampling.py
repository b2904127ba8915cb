"""The sampling law against a transparent reference, its ties, independent rows, and bad words."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from foretoken.core import sampling
from foretoken.core.distributions import NodeDistributions
from foretoken.core.errors import InvalidRequest
from foretoken.core.history import History
from foretoken.core.restrictions import BadWords
from foretoken.core.sampling import SamplingLaw

VOCAB = 6


class Undecided(Exception):
    """The answer hangs on the last bit of a rounding, or no token is left."""


def decided(condition: bool) -> None:
    if not condition:
        raise Undecided


def reference(
    law: SamplingLaw, logits: Sequence[float], prompt: Sequence[int], generated: Sequence[int]
) -> list[float]:
    """One row in plain Python, a paragraph for each parameter, in vLLM's order."""
    row, history = list(logits), [*prompt, *generated]

    if law.allowed_ids:
        row = [x if token in law.allowed_ids else -math.inf for token, x in enumerate(row)]
    for word in law.bad_words:
        before = list(word[:-1])
        if not before or history[-len(before) :] == before:
            row[word[-1]] = -math.inf
    ends_alone = bool(law.allowed_ids) and set(law.allowed_ids) <= set(law.end_ids)
    if len(generated) < law.min_tokens and not ends_alone:
        for token in law.end_ids:
            row[token] = -math.inf

    for token, bias in law.logit_bias:
        row[token] += bias

    for token in set(history):
        row[token] = row[token] / law.repetition_penalty if row[token] > 0 else row[token] * law.repetition_penalty
    for token in set(generated):
        row[token] -= law.frequency_penalty * generated.count(token) + law.presence_penalty

    top = max(row)
    decided(top > -math.inf)
    if law.temperature == 0.0:
        return [float(token == row.index(top)) for token in range(len(row))]
    row = [x / law.temperature for x in row]
    decided(all(x == y or abs(x - y) > 1e-9 for x in row for y in row))

    weights = [math.exp(x - max(row)) for x in row]
    decided(all(w in (0.0, 1.0) or abs(w - law.min_p) > 1e-9 for w in weights))
    weights = [w if w >= law.min_p else 0.0 for w in weights]

    if law.top_k:
        kth = sorted(weights, reverse=True)[: law.top_k][-1]
        weights = [w if w >= kth else 0.0 for w in weights]

    if law.top_p < 1.0:
        total, mass = sum(weights), 0.0
        for token in sorted(range(len(weights)), key=lambda t: (-weights[t], t)):
            decided(abs(mass - law.top_p) > 1e-9)
            share = weights[token] / total
            if mass >= law.top_p:
                weights[token] = 0.0
            mass += share

    return [w / sum(weights) for w in weights]


tokens = st.integers(0, VOCAB - 1)
numbers = st.one_of(st.integers(-40, 40).map(lambda n: n / 8), st.just(-math.inf))  # ties are common
rows = st.lists(numbers, min_size=VOCAB, max_size=VOCAB)
prompts = st.lists(tokens, min_size=1, max_size=4)
outputs = st.lists(tokens, max_size=5)
PARAMETERS: dict[str, st.SearchStrategy[object]] = {
    "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.5]),
    "top_k": st.integers(0, VOCAB + 1),
    "top_p": st.floats(0.05, 1.0),
    "min_p": st.floats(0.0, 1.0),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "logit_bias": st.dictionaries(tokens, st.floats(-3, 3), max_size=3).map(lambda d: tuple(d.items())),
    "bad_words": st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    "min_tokens": st.integers(0, 6),
    "allowed_ids": st.lists(tokens, max_size=VOCAB).map(lambda ids: tuple(sorted(set(ids)))),
}
FIXED = {"min_tokens": {"end_ids": (1, 4)}}


def agrees(law: SamplingLaw, row: list[float], prompt: list[int], output: list[int], split: int) -> None:
    """The last ``split`` tokens of the output as a drafted path, the others committed."""
    try:
        expected = reference(law, row, prompt, output)
    except Undecided:
        reject()
    cut = max(0, len(output) - split)
    history = History([*prompt, *output[:cut]], len(prompt), tuple(output[cut:]))
    result = law.probs(torch.tensor([row], dtype=torch.float64), [history])[0].tolist()
    assert result == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", PARAMETERS)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data(), row=rows, prompt=prompts, output=outputs, split=st.integers(0, 3))
def test_each_parameter_alone(name, data, row, prompt, output, split):
    law = SamplingLaw(**{name: data.draw(PARAMETERS[name])}, **FIXED.get(name, {}))  # type: ignore[arg-type]
    agrees(law, row, prompt, output, split)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.fixed_dictionaries(PARAMETERS), rows, prompts, outputs, st.integers(0, 3))
def test_all_parameters_together(parameters, row, prompt, output, split):
    agrees(SamplingLaw(**parameters, end_ids=(1, 4)), row, prompt, output, split)


def test_rows_use_their_own_histories():
    law = SamplingLaw(frequency_penalty=1.0, repetition_penalty=1.4, bad_words=((2, 3),), min_tokens=3, end_ids=(0,))
    logits = torch.randn(5, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    committed, others = [1, 2, 2], [4, 4, 4, 1]
    histories = [
        History(committed, 1),
        History(committed, 1, (2,)),
        History(committed, 1, (3, 2)),
        History(others, 2, (2,)),
        History(committed, 1, (5,)),
    ]
    together = law.probs(logits, histories)
    for i, history in enumerate(histories):
        output = [*history.tokens[history.prompt_length :], *history.path]
        expected = reference(law, logits[i].tolist(), history.tokens[: history.prompt_length], output)
        assert together[i].tolist() == pytest.approx(expected, abs=1e-12)


def test_logits_are_left_as_they_were():
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    kept = logits.clone()
    law = SamplingLaw(frequency_penalty=1.0, logit_bias=((1, 2.0),), top_p=0.5, min_p=0.1, top_k=3)
    law.probs(logits, [History([1, 2], 1)] * 2)
    assert torch.equal(logits, kept)


def test_as_many_histories_as_rows():
    with pytest.raises(ValueError, match="1 histories for 2 rows"):
        SamplingLaw(frequency_penalty=1.0).probs(torch.zeros(2, 3), [History([1], 1)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [7, 4096, 151_936])
def test_greedy_takes_the_lowest_id_on_ties(dtype, vocab):
    logits = torch.zeros(3, vocab, dtype=dtype)
    tied = [[2, 3, vocab - 1], [vocab // 2, vocab - 1], list(range(vocab))]
    for row, ids in enumerate(tied):
        logits[row, ids] = 5.0
    probs = SamplingLaw(temperature=0.0).probs(logits, [])
    assert probs.argmax(-1).tolist() == [2, vocab // 2, 0]
    assert torch.equal(probs.sum(-1), torch.ones(3, dtype=probs.dtype))
    assert probs.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)


LAWS = {
    "softmax": SamplingLaw(),
    "temperature": SamplingLaw(temperature=0.7),
    "top-k": SamplingLaw(top_k=50),
    "top-p": SamplingLaw(top_p=0.9),
    "min-p": SamplingLaw(min_p=0.05),
    "penalties": SamplingLaw(temperature=0.8, frequency_penalty=0.5, repetition_penalty=1.2, top_k=40, top_p=0.95),
    "greedy": SamplingLaw(temperature=0.0),
}


@pytest.mark.parametrize("vocab, counts", [(4096, (1, 2, 5, 16, 33)), (151_936, (1, 2, 9))])
@pytest.mark.parametrize("name", LAWS)
def test_a_row_does_not_depend_on_how_many_share_the_pass(name, vocab, counts):
    """Bit for bit: the text of the trajectory grade may not hang on the batch or the draft's length."""
    law, maximum = LAWS[name], max(counts)
    logits = 3 * torch.randn(maximum, vocab, generator=torch.Generator().manual_seed(vocab))
    tokens = [1, 5, 5, 7]
    histories = [History(tokens, 2, tuple(range(i % 4))) for i in range(maximum)]
    whole = law.probs(logits, histories)
    for count in counts:
        for start in {0, (maximum - count) // 2, maximum - count}:
            part = slice(start, start + count)
            assert torch.equal(law.probs(logits[part], histories[part]), whole[part])


@pytest.mark.parametrize("name", LAWS)
def test_rows_are_distributions(name):
    logits = 5 * torch.randn(4, 4096, generator=torch.Generator().manual_seed(3))
    probs = LAWS[name].probs(logits, [History([1], 1)] * 4)
    assert bool((probs >= 0).all())
    assert probs.sum(-1).tolist() == pytest.approx([1.0] * 4, abs=2e-6)


def tied_scores(vocab: int, rows: int = 3) -> torch.Tensor:
    """Rows on a coarse grid, so that ties lie at every border; the last row is flat."""
    scores = (4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))).round() / 4
    scores[-1] = 0.0
    scores[0, ::5] = -torch.inf
    return scores


def same_nucleus(scores: torch.Tensor, top_p: float) -> None:
    result, ordered = sampling.nucleus(scores, top_p), sampling.nucleus_sorted(scores, top_p)
    assert torch.equal(result > 0.0, ordered > -torch.inf)
    assert torch.allclose(result, ordered.softmax(-1), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [2, 7, 300, 4096])
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999, 1 - 1e-7])
def test_the_nucleus_is_that_of_the_whole_order(vocab, top_p, dtype):
    scores = tied_scores(vocab).to(dtype)
    same_nucleus(scores, top_p)


def test_the_nucleus_of_a_large_vocabulary():
    scores = tied_scores(151_936, rows=2)
    same_nucleus(scores, 0.9)


@pytest.mark.parametrize("vocab, k", [(7, 1), (7, 6), (4096, 50), (151_936, 50)])
def test_the_kth_largest_is_that_of_the_whole_order(vocab, k):
    scores = tied_scores(vocab)
    assert torch.equal(sampling.kth_largest(scores, k), scores.sort(descending=True).values[:, k - 1 : k])


@pytest.mark.parametrize("vocab, k", [(64, 2), (4096, 50), (4101, 128), (151_936, 50)])
def test_the_largest_are_those_that_no_k_others_exceed(vocab, k):
    for row in tied_scores(vocab).numpy():
        minimum = np.sort(row)[-k]
        assert sampling.largest(row, k).tolist() == np.flatnonzero(row >= minimum).tolist()


def test_a_row_with_nan_stays_nan():
    logits = torch.randn(1, 4096)
    logits[0, 17] = torch.nan
    assert bool(SamplingLaw(top_k=50).probs(logits, [])[0].isnan().any())


@pytest.mark.parametrize("more", [{}, {"temperature": 0.3}, {"top_p": 0.8}, {"min_p": 0.05}, {"temperature": 1e-30}])
def test_small_top_k_gives_the_probabilities_of_whole_rows(more, monkeypatch):
    law = SamplingLaw(top_k=20, **more)
    logits = tied_scores(4096)
    few = law.probs(logits, [])
    monkeypatch.setattr(sampling, "BLOCK", 4096)  # no vocabulary is large now
    assert torch.allclose(law.probs(logits, []), few, rtol=1e-6, atol=0.0)


# Rows that are computed when asked for


@pytest.mark.parametrize("name", LAWS)
def test_rows_read_like_the_tensor(name):
    logits = 3 * torch.randn(5, 300, generator=torch.Generator().manual_seed(4))
    histories = [History([1, 5, 5, 7], 2, tuple(range(i))) for i in range(5)]
    whole, rows = LAWS[name].probs(logits, histories), NodeDistributions(LAWS[name], logits, histories.__getitem__)
    assert rows.shape == whole.shape
    for i in (3, 0, 4, 3):
        assert torch.equal(rows[i], whole[i])
        assert rows.certain(i) == (int(whole[i].argmax()) if LAWS[name].greedy else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_certain_token_is_the_lowest_of_the_best(dtype):
    logits = torch.zeros(2, 4096, dtype=dtype)
    logits[0, [7, 9, 4095]] = 5.0
    rows = NodeDistributions(SamplingLaw(temperature=0.0), logits, lambda row: History([1], 1))
    assert [rows.certain(0), rows.certain(1)] == [7, 0]


def test_rows_that_are_not_read_are_not_computed():
    asked: list[int] = []

    def history(row: int) -> History:
        asked.append(row)
        return History([1, 2], 1, (3,) * row)

    logits = torch.zeros(6, VOCAB)
    rows = NodeDistributions(SamplingLaw(presence_penalty=1.0), logits, history)
    assert rows[2] is rows[2]
    assert asked == [2]
    NodeDistributions(SamplingLaw(), logits, history)[3]
    NodeDistributions(SamplingLaw(temperature=0.0), logits, history).certain(3)
    assert asked == [2]


def test_the_certain_token_depends_on_its_history():
    law = SamplingLaw(temperature=0.0, bad_words=((2, 3),))
    rows = NodeDistributions(law, torch.tensor([[0.0, 0.0, 0.0, 9.0]] * 2), lambda row: History([1], 1, (2,) * row))
    assert [rows.certain(0), rows.certain(1)] == [3, 0]


def test_other_sampling_parameters_have_rows_too():
    class Plain:
        greedy, needs_history = True, True

        def best(self, logits: torch.Tensor, histories: Sequence[History]) -> list[int]:
            return self.probs(logits, histories).argmax(-1).tolist()

        def probs(self, logits: torch.Tensor, histories: Sequence[History]) -> torch.Tensor:
            assert len(histories) == len(logits)
            return SamplingLaw(temperature=0.0).probs(logits, histories)

        def with_temperature(self, temperature: float) -> Plain:
            return self

    rows = NodeDistributions(Plain(), torch.tensor([[0.0, 2.0, 1.0]]), lambda row: History([1], 1))
    assert rows.certain(0) == 1
    assert rows[0].tolist() == [0.0, 1.0, 0.0]


word_tokens = st.integers(0, 3)
texts = st.lists(word_tokens, max_size=6)


@given(st.lists(st.lists(word_tokens, min_size=1, max_size=5).map(tuple), max_size=12), texts, texts)
def test_banned_tokens_are_those_of_a_loop_over_all_words(words, text, path):
    history = (*text, *path)
    expected = {w[-1] for w in words if len(w) <= len(history) + 1 and history[len(history) + 1 - len(w) :] == w[:-1]}
    assert set(BadWords.of(words).banned(text, tuple(path)).tolist()) == expected


def test_bad_words_are_accepted_with_and_without_an_index():
    words = ((1, 2), (3,))
    law = SamplingLaw(bad_words=BadWords.of(words))
    assert law == SamplingLaw(bad_words=words) and law.with_temperature(0.5).bad_words is law.bad_words
    assert law.probs(torch.zeros(1, 5), [History([1], 1)])[0].nonzero().flatten().tolist() == [0, 1, 4]


def test_the_time_of_a_row_does_not_depend_on_the_number_of_words():
    words = [(i % 500, i // 500, i % 7) for i in range(200_000)] + [(i,) for i in range(1_000)]
    law = SamplingLaw(bad_words=tuple(words))
    history, logits = History(list(range(400)), 1), torch.zeros(1, 2_000)
    law.probs(logits, [history])
    begun = time.process_time()
    for _ in range(50):
        law.probs(logits, [history])
    assert time.process_time() - begun < 0.5, "a loop over all words takes seconds"


def test_a_word_without_tokens_is_refused():
    with pytest.raises(InvalidRequest, match="a word without tokens"):
        SamplingLaw(bad_words=((1,), ()))

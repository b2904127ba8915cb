"""Bad words by what stands before their last token, against a loop over all of them."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.bad_words import BadWords
from foretoken.core.errors import InvalidRequest
from foretoken.core.history import History
from foretoken.core.sampling import SamplingLaw

tokens = st.integers(0, 3)
texts = st.lists(tokens, max_size=6)


@given(st.lists(st.lists(tokens, min_size=1, max_size=5).map(tuple), max_size=12), texts, texts)
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

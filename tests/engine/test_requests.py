"""The client's prediction, from the parameter to the context."""

from __future__ import annotations

import pytest

from foretoken.core.errors import InvalidRequest
from foretoken.engine.requests import RequestBuilder
from foretoken.params import SamplingParams


@pytest.fixture
def builder(tokenizer) -> RequestBuilder:
    return RequestBuilder(tokenizer, len(tokenizer), [], seed=0)


def test_a_prediction_reaches_every_context(builder, tokenizer):
    text = "größe 5 €\n"
    _, contexts = builder.build("a", SamplingParams(prediction=text, n=2))
    assert [c.prediction for c in contexts] == [tuple(tokenizer.encode(text, add_special_tokens=False))] * 2
    _, contexts = builder.build("a", SamplingParams(prediction=[1, 2, 3]))
    assert contexts[0].prediction == (1, 2, 3)


@pytest.mark.parametrize("nothing", [None, "", []])
def test_no_prediction(builder, nothing):
    assert builder.build("a", SamplingParams(prediction=nothing))[1][0].prediction == ()


@pytest.mark.parametrize("wrong", [[1, -1], [10**9], [1.5], [True]])
def test_a_prediction_of_wrong_ids_is_refused(builder, wrong):
    with pytest.raises(InvalidRequest, match="a prediction of token ids holds"):
        builder.build("a", SamplingParams(prediction=wrong))

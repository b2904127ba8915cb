"""Sampling parameters: whatever is given is understood or refused, with one clear error."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretoken.core.errors import InvalidRequest
from foretoken.core.history import History
from foretoken.engine.requests import RequestBuilder
from foretoken.params import MAX_COUNT, MAX_N, MAX_SPECULATIVE_TOKENS, SamplingParams

HUGE = (2**31, 2**32 + 1, 2**63, 2**64, 2**128, 10**400, 10**5000)
NAN, INF = float("nan"), float("inf")
FIELDS = [field.name for field in fields(SamplingParams)]
COUNTS = ("n", "max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs", "speculative_tokens", "seed")
REALS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@pytest.mark.parametrize("name", COUNTS)
def test_integers_out_of_bounds_are_refused_by_name(name: str) -> None:
    for value in (*HUGE[2:], *(-value for value in HUGE[3:]), 1.0, NAN, INF, "1", True, [1], b"1"):
        with pytest.raises(InvalidRequest, match=f"^{name} must be an integer from "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", COUNTS[:-1])
def test_integers_that_would_wrap_in_32_bits_are_refused(name: str) -> None:
    for value in (-2, -(2**32) + 1, 2**31, 2**32 + 1):
        with pytest.raises(InvalidRequest, match=f"^{name} must be an integer from "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name, maximum",
    [
        ("n", MAX_N),
        ("max_tokens", MAX_COUNT),
        ("top_k", MAX_COUNT),
        ("logprobs", MAX_COUNT),
        ("prompt_logprobs", MAX_COUNT),
        ("speculative_tokens", MAX_SPECULATIVE_TOKENS),
        ("seed", 2**63 - 1),
    ],
)
def test_the_largest_integers_are_accepted(name: str, maximum: int) -> None:
    assert getattr(SamplingParams(**{name: maximum}), name) == maximum
    with pytest.raises(InvalidRequest, match=f"^{name} must be an integer from .* to {maximum}"):
        SamplingParams(**{name: maximum + 1})


@pytest.mark.parametrize("name", REALS)
def test_numbers_out_of_bounds_are_refused_by_name(name: str) -> None:
    for value in (NAN, INF, -INF, -3, 1e7, 1e300, 10**400, -(10**5000), "1", None, True, [1.0]):
        with pytest.raises(InvalidRequest, match=f"^{name} must be "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name, value",
    [
        ("logit_bias", [1, 2]),
        ("logit_bias", 5),
        ("logit_bias", {"5": 1, 5: 1}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"5.0": 1}),
        ("logit_bias", {"٥": 1}),
        ("logit_bias", {str(2**32): 1}),
        ("logit_bias", {5.7: 1}),
        ("logit_bias", {True: 1}),
        ("logit_bias", {None: 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {2**32 + 1: 1}),
        ("logit_bias", {0: NAN}),
        ("logit_bias", {0: INF}),
        ("logit_bias", {0: 10**400}),
        ("logit_bias", {0: "x"}),
        ("stop_token_ids", 5),
        ("stop_token_ids", "abc"),
        ("stop_token_ids", ["5"]),
        ("stop_token_ids", [5.7]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [None]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**32]),
        ("acceptance_stop", ["loop"]),
        ("acceptance_stop", "repetition"),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", ["5"]),
        ("stop", 5),
        ("stop", [5]),
        ("stop", [None]),
        ("stop", {"a": 1}),
        ("stop", ["a", b"b"]),
        ("stop", b"a"),
        ("bad_words", 5),
        ("bad_words", [5]),
        ("bad_words", "abc"),
        ("bad_words", [None]),
        ("prediction", 5),
        ("prediction", {"a": 1}),
        ("ignore_eos", "no"),
        ("skip_special_tokens", 1),
        ("explain", None),
        ("include_stop_str_in_output", "no"),
        ("speculative_method", 5),
        ("speculative_method", []),
    ],
)
def test_values_of_another_kind_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} "):
        SamplingParams(**{name: value})


def test_token_ids_of_a_logit_bias_may_be_text_as_in_json() -> None:
    assert SamplingParams(logit_bias={"5": 1, "007": 2.5}) == SamplingParams(logit_bias={5: 1, 7: 2.5})


ODD = st.sampled_from(
    [None, True, "", "a", b"a", NAN, INF, -INF, 1e-320, 1e300, -1, 0, 1, 2, *HUGE, *(-i for i in HUGE)]
)
VALUES = st.one_of(ODD, st.lists(ODD, max_size=3), st.dictionaries(ODD.filter(lambda v: v == v), ODD, max_size=2))
relaxed = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


@relaxed
@given(given_values=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
def test_any_value_is_understood_or_refused(tokenizer: Any, given_values: dict[str, Any]) -> None:
    """Parameters that are taken make a law, whose rows are probabilities."""
    builder = RequestBuilder(tokenizer, len(tokenizer), [tokenizer.eos_token_id], seed=0)
    logits = 3 * torch.randn(1, len(tokenizer), generator=torch.Generator().manual_seed(0))
    try:
        params = SamplingParams(**{"n": 1, **given_values})
        _, contexts = builder.build("a", params if params.n < 9 else SamplingParams())
        law = contexts[0].law
        row = law.probs(logits, [History([65], 1)])[0]
    except InvalidRequest as error:
        refused = str(error)
    else:
        refused = ""
        assert float(row.sum()) == pytest.approx(1.0, abs=1e-4)
    assert len(refused) < 1000

"""Grammars of a sampling law: masked logits, distributions and refusals of single rows; schemas within schemas."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.core.history import History
from foretoken.core.sampling import SamplingLaw
from foretoken.core.schema import subschemas

V = 6
LOGITS = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
HERE = [History([0], 1)]


@dataclass(frozen=True)
class Only:
    """These ids, everywhere."""

    ids: Collection[int]

    def allowed(self, history: History) -> Tensor | None:
        mask = torch.zeros(V, dtype=torch.bool)
        mask[list(self.ids)] = True
        return mask


class Anything:
    def allowed(self, history: History) -> Tensor | None:
        return None


def support(law: SamplingLaw, logits: Tensor = LOGITS) -> list[int]:
    result: list[int] = law.probs(logits, HERE)[0].nonzero().flatten().tolist()
    return result


def test_a_row_is_restricted_and_normalized():
    probs = SamplingLaw(grammar=Only({1, 4})).probs(LOGITS, HERE)[0]
    expected = LOGITS.softmax(-1)[0, [1, 4]]
    torch.testing.assert_close(probs[[1, 4]], expected / expected.sum())
    assert probs[[0, 2, 3, 5]].tolist() == [0.0] * 4


def test_only_listed_tokens_of_a_grammar_are_allowed():
    law = SamplingLaw(grammar=Only((1, 2)), allowed_ids=(2, 3))
    assert support(law) == [2]


def test_none_allows_everything():
    assert torch.equal(SamplingLaw(grammar=Anything()).probs(LOGITS, HERE), SamplingLaw().probs(LOGITS, []))


def test_histories_are_needed():
    law = SamplingLaw(grammar=Anything())
    assert law.needs_history and law.with_temperature(0.5).grammar is law.grammar
    with pytest.raises(ValueError, match="0 histories for 1 rows"):
        law.probs(LOGITS, [])


def test_other_parameters_do_not_allow_forbidden_tokens():
    bias = ((0, 100.0),)
    for extra in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 1e-6}, {"frequency_penalty": -2.0}):
        law = SamplingLaw(logit_bias=bias, grammar=Only({1, 4}), **extra)
        assert set(support(law)) <= {1, 4}
    law = SamplingLaw(temperature=0.0, logit_bias=bias, grammar=Only({1, 4}))
    assert law.best(LOGITS, HERE)[0] in (1, 4)


def test_min_tokens_give_way_where_only_the_end_is_left():
    assert support(SamplingLaw(min_tokens=3, end_ids=(4, 5), grammar=Only({4, 5}))) == [4, 5]
    assert support(SamplingLaw(min_tokens=3, end_ids=(4, 5), grammar=Only({1, 4, 5}))) == [1]


def test_parameters_that_forbid_every_token_are_named():
    law = SamplingLaw(bad_words=((1,), (4,)), grammar=Only({1, 4}))
    assert law.probs(LOGITS, HERE).isnan().all()
    assert replace(law, temperature=0.0).best(LOGITS, HERE) == [-1]
    with pytest.raises(InvalidRequest, match="structured_outputs, bad_words and min_tokens together forbid"):
        raise law.refusal(LOGITS[0], HERE[0])


def test_logits_that_are_not_finite_are_named():
    for bad in (torch.nan, torch.inf):
        logits = LOGITS.clone()
        logits[0, 2] = bad
        for law in (SamplingLaw(), SamplingLaw(top_k=2), SamplingLaw(top_p=0.5), SamplingLaw(temperature=0.0)):
            assert law.probs(logits, HERE).isnan().all() and law.probs(logits.double(), HERE).isnan().all()
            with pytest.raises(InvalidRequest, match="logits that are NaN or infinite"):
                raise law.refusal(logits[0], HERE[0])
        assert SamplingLaw(temperature=0.0).best(logits, HERE) == [-1]


def test_a_row_without_logits_of_allowed_tokens_is_uniform():
    """As that of a draft with a smaller vocabulary."""
    logits = LOGITS.clone()
    logits[0, 3:] = -torch.inf
    probs = SamplingLaw(grammar=Only({3, 4, 5}), bad_words=((4,),)).probs(logits, HERE)[0]
    assert probs.tolist() == [0.0, 0.0, 0.0, 0.5, 0.0, 0.5]
    assert support(SamplingLaw(grammar=Only({2, 3}), bad_words=((2,),)), logits) == [3]


def test_schemas_are_found_and_data_is_not() -> None:
    schema = {
        "properties": {"format": {"type": "string"}, "items": {"items": {"minimum": 1}}},
        "enum": [{"type": "data"}],
        "const": {"properties": {"x": {"type": "data"}}},
        "default": {"items": {"type": "data"}},
        "anyOf": [{"maximum": 2}, True],
        "additionalProperties": {"prefixItems": [{"const": 1}]},
        "$defs": {"a": {"not": {"type": "null"}}},
    }
    assert [path for path, _ in subschemas(schema)] == [
        (),
        ("properties", "format"),
        ("properties", "items"),
        ("properties", "items", "items"),
        ("anyOf", "0"),
        ("additionalProperties",),
        ("additionalProperties", "prefixItems", "0"),
        ("$defs", "a"),
        ("$defs", "a", "not"),
    ]


def test_other_values_have_no_subschemas() -> None:
    assert not list(subschemas(True)) and not list(subschemas([{"type": "object"}]))


def test_schemas_of_any_depth_are_found() -> None:
    schema: dict[str, object] = {}
    for _ in range(3_000):
        schema = {"items": schema}
    assert sum(1 for _ in subschemas(schema)) == 3_001

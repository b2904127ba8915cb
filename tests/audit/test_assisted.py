"""transformers' assisted generation, as it comes."""

from dataclasses import replace
from time import monotonic

import pytest
import torch

from foretoken.audit.equality import greedy
from foretoken.audit.implementations import Assisted
from foretoken.audit.sampled import sampled
from foretoken.audit.subject import AuditTask, CheckOutcome, CompletionSettings, noise
from foretoken.core.errors import InvalidRequest
from foretoken.speculation import SpeculativeConfig


@pytest.fixture(scope="module")
def assisted(tiny_pair):
    """With fewer drafted tokens than by default, as the tiny pair seldom agrees."""
    subject = Assisted(tiny_pair.target, SpeculativeConfig(method="draft_model", model=str(tiny_pair.draft)), "float32")
    subject.draft.generation_config.num_assistant_tokens = 2
    return subject


def work(audited) -> AuditTask:
    prompts = tuple(tuple(audited.encode(text)) for text in ("def f(", "x = 1"))
    return AuditTask(audited, prompts, 1.0, 0, 1e-3, monotonic() + 600.0, noise(audited, prompts[:1]))


def test_its_law_has_its_own_filters(assisted):
    assert assisted.law(0.7).temperature == 0.7
    assert assisted.law(0.7).top_k == assisted.facts["top_k"]


def test_the_same_seed_is_the_same_text_and_leaves_torch_alone(assisted):
    ask = CompletionSettings(assisted.law(1.0), 12, (5,), keep=True)
    before = torch.random.get_rng_state()
    first, second = (assisted.generate([[1, 2, 3]], ask)[0] for _ in range(2))
    assert first.tokens == second.tokens and len(first.tokens) == 12
    assert first.rows.shape[0] == 12
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.allclose(assisted.logits([1, 2, 3], first.tokens), first.rows, atol=1e-3)


@pytest.mark.slow
def test_it_passes_as_it_comes(assisted):
    short = replace(work(assisted), deadline=0.0)
    assert greedy(short).outcome is CheckOutcome.PASSED
    check, tally = sampled(work(assisted), max_tokens=128)
    assert check.outcome is CheckOutcome.PASSED, check.evidence
    assert tally.everything.toward.variance > 0
    assert any(one["name"] == "all tokens: ranks" for one in check.numbers["statistics"])


def test_its_lossy_blend_is_planted(assisted):
    ((error, wrong),) = assisted.planted().items()
    assert "assistant_ensemble_weight" in error
    ask = CompletionSettings(assisted.law(1.0), 16, (5,))
    assert wrong.generate([[1, 2, 3]], ask) != assisted.generate([[1, 2, 3]], ask)


def test_prompt_lookup_is_audited(tiny_pair):
    subject = Assisted(tiny_pair.target, SpeculativeConfig(method="ngram"), "float32")
    assert subject.options == {"prompt_lookup_num_tokens": 10}
    assert greedy(replace(work(subject), deadline=0.0)).outcome is CheckOutcome.PASSED
    assert subject.reference([1], [2], subject.law(1.0)) is None
    assert "temperature" in next(iter(subject.planted()))


@pytest.mark.parametrize("config", [{"method": "suffix"}, {"method": "draft_model"}, {}])
def test_other_methods_are_refused(tiny_pair, config):
    with pytest.raises(InvalidRequest, match="draft_model or by ngram"):
        Assisted(tiny_pair.target, SpeculativeConfig.of(config))

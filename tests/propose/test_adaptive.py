"""A draft that learns from what is verified: it gets better, what gets worse is rolled back, text never changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, WriteError
from foretoken.propose.adaptive import AdaptConfig, Adaptive
from foretoken.propose.union import Union

PROMPTS = ["import os\n", "class Stack:\n", "def read(path):\n", "for line in file:\n"] * 4
FAST = {"every": 300, "buffer": 4000, "window": 64, "steps": 30, "learning_rate": 3e-3, "held_out": 4}


def proposer(llm: LLM) -> Adaptive:
    assert isinstance(llm.engine.proposer, Union)
    adaptive = llm.engine.proposer.sources[0].proposer
    assert isinstance(adaptive, Adaptive)
    return adaptive


@pytest.fixture(scope="module")
def taught(tiny_pair: Any) -> LLM:
    """A pair that has nothing in common, after some text."""
    llm = LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", adapt=FAST)
    for seed in range(6):
        llm.generate(PROMPTS, [SamplingParams(max_tokens=48, seed=seed * 100 + i, ignore_eos=True) for i in range(16)])
        proposer(llm).wait()
    return llm


@pytest.mark.slow
def test_the_draft_learns(taught: LLM) -> None:
    history = proposer(taught).history
    assert len(history) >= 3
    assert all(update.taken == (update.after >= update.before) for update in history)
    assert history[-1].after > history[0].before + 0.02


def test_requests_with_a_salt_teach_nothing(tiny_pair: Any) -> None:
    llm = LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", adapt=FAST)

    def samples(salt: str | None) -> int:
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, cache_salt=salt)
        llm.generate([PROMPTS[0]], params)
        return len(proposer(llm).samples)

    assert samples("secret") == 0
    assert samples(None) > 0


def test_the_text_does_not_depend_on_the_version_of_the_draft(taught: LLM, tiny_pair: Any) -> None:
    params = SamplingParams(max_tokens=40, seed=7, ignore_eos=True)
    plain = LLM(tiny_pair.target, dtype="float32").generate(PROMPTS[:4], params)
    adapted = taught.generate(PROMPTS[:4], params)
    assert [o.outputs[0].token_ids for o in adapted] == [o.outputs[0].token_ids for o in plain]


@pytest.mark.slow
def test_an_adapted_draft_can_be_saved(taught: LLM, tiny_pair: Any, tmp_path: Path) -> None:
    taught.save_draft(tmp_path / "draft")
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, speculative_tokens=4)
    alone = {"method": "draft_model"}
    saved = LLM(tiny_pair.target, tmp_path / "draft", dtype="float32", speculative_config=alone)
    again = saved.generate(PROMPTS[:4], params)
    adapted = taught.generate(PROMPTS[:4], params)
    assert [o.stats.accepted for o in again] == [o.stats.accepted for o in adapted]
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot write"):
        taught.save_draft(tmp_path / "file" / "draft")


def test_an_update_that_does_worse_is_rolled_back(tiny_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", adapt=FAST)
    before, student = proposer(llm).inner.model, proposer(llm).student
    weights = {name: value.clone() for name, value in student.module.state_dict().items()}

    def unlearn(lessons: Any, steps: int) -> None:
        with torch.no_grad():
            for parameter in student.module.parameters():
                parameter.mul_(-3)

    monkeypatch.setattr(student, "learn", unlearn)
    llm.generate(PROMPTS, SamplingParams(max_tokens=48, ignore_eos=True))
    proposer(llm).wait()
    update = proposer(llm).history[0]
    assert not update.taken and update.after < update.before
    assert proposer(llm).inner.model is before
    assert all((value == weights[name]).all() for name, value in proposer(llm).student.module.state_dict().items())


def test_the_buffer_is_bounded(taught: LLM) -> None:
    adaptive = proposer(taught)
    kept = [sample for sample, _ in adaptive.samples]
    assert sum(map(len, kept)) == adaptive.num_rows <= FAST["buffer"]
    assert all(len(sample) <= len(sample.tokens) <= FAST["window"] for sample in kept)
    assert {held_out for _, held_out in adaptive.samples} == {True, False}


def test_samples_are_the_targets_own_distributions(tiny_pair: Any) -> None:
    llm = LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", adapt=FAST)
    llm.generate(PROMPTS[1], SamplingParams(max_tokens=20, ignore_eos=True))
    ((sample, _),) = proposer(llm).samples
    assert len(sample) == 20
    for row in range(20):
        handle = llm.target.open(sample.tokens[: len(sample.tokens) - 19 + row].tolist())
        (scores,) = llm.target.score([handle], [Draft.empty()])
        llm.target.close(handle)
        law = scores.logits[0].log_softmax(-1)
        torch.testing.assert_close(law[torch.from_numpy(sample.ids[row])], torch.from_numpy(sample.log_p[row]))


@pytest.mark.parametrize(
    ("adapt", "message"),
    [
        ({"evry": 3}, "unknown key.*known: every"),
        ({"every": 0}, "every of adapt must be"),
        ({"buffer": 10}, "buffer of adapt must be"),
        ({"learning_rate": 0}, "learning_rate of adapt"),
    ],
)
def test_bad_settings_are_refused(adapt: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        AdaptConfig.of(adapt)


def test_only_a_draft_model_adapts(tiny_pair: Any) -> None:
    with pytest.raises(InvalidRequest, match="needs method 'draft_model'"):
        LLM(tiny_pair.target, speculative_config={"method": "ngram"}, adapt=True)
    with pytest.raises(InvalidRequest, match="adapt=True"):
        LLM(tiny_pair.target, tiny_pair.draft).save_draft("somewhere")

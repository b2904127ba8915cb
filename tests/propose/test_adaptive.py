"""Drafts and heads that learn from verified tokens: worse versions are rolled back, and no text changes."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.heads import tiny

from foretoken import LLM, SamplingParams
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, WriteError
from foretoken.models.heads.eagle import read_eagle
from foretoken.propose.adaptive import AdaptConfig, Adaptive, learner_in
from foretoken.propose.eagle import Eagle

PROMPTS = ["import os\n", "class Stack:\n", "def read(path):\n", "for line in file:\n"] * 4
FAST = {"every": 600, "buffer": 4000, "window": 64, "steps": 30, "learning_rate": 3e-3, "held_out": 4}


def proposer(llm: LLM) -> Adaptive:
    adaptive = learner_in(llm.engine.proposer)
    assert adaptive is not None
    return adaptive


def begin_no_update(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the drafter constant: an update that begins while drafts are compared may finish before the last step."""
    adaptive = proposer(llm)
    monkeypatch.setattr(adaptive, "config", replace(adaptive.config, every=adaptive.config.buffer))


@contextmanager
def updates_within_steps(llm: LLM) -> Iterator[None]:
    """Finishes each update before the next step, so that what is learned from does not depend on the machine."""
    adaptive = proposer(llm)

    def observe(*observed: Any) -> None:
        Adaptive.observe(adaptive, *observed)
        adaptive.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive, "observe", observe)
        yield


@pytest.fixture(scope="module")
def taught(tiny_pair: Any) -> LLM:
    """A pair that has nothing in common, after some text."""
    llm = LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", adapt=FAST)
    with updates_within_steps(llm):
        for seed in range(6):
            seeds = range(seed * 100, seed * 100 + 16)
            llm.generate(PROMPTS, [SamplingParams(max_tokens=48, seed=each, ignore_eos=True) for each in seeds])
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


@pytest.mark.slow
def test_the_text_does_not_depend_on_the_version_of_the_draft(taught: LLM, tiny_pair: Any) -> None:
    params = SamplingParams(max_tokens=40, seed=7, ignore_eos=True)
    plain = LLM(tiny_pair.target, dtype="float32").generate(PROMPTS[:4], params)
    adapted = taught.generate(PROMPTS[:4], params)
    assert [o.outputs[0].token_ids for o in adapted] == [o.outputs[0].token_ids for o in plain]


@pytest.mark.slow
def test_an_adapted_draft_can_be_saved(
    taught: LLM, tiny_pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_no_update(taught, monkeypatch)
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


@pytest.mark.slow
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
        ("a tenth", "share of adapt must be"),
        ("110%", "share of adapt must be"),
    ],
)
def test_bad_settings_are_refused(adapt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        AdaptConfig.of(adapt)


def test_only_a_draft_model_adapts(tiny_pair: Any) -> None:
    with pytest.raises(InvalidRequest, match="needs method 'draft_model'"):
        LLM(tiny_pair.target, speculative_config={"method": "ngram"}, adapt=True)
    with pytest.raises(InvalidRequest, match="adapt=True"):
        LLM(tiny_pair.target, tiny_pair.draft).save_draft("somewhere")


# heads


CHAIN = {"method": "eagle3", "num_speculative_tokens": 3}
HEAD_FAST = FAST | {"every": 400, "steps": 10, "batch": 8}


@pytest.fixture(scope="module")
def head_pair(tiny_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with a random EAGLE-3 head in its folder, which drafts an eighth of its tokens."""
    folder = tmp_path_factory.mktemp("head") / "target"
    shutil.copytree(tiny_pair.target, folder)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    written = tiny.eagle3(vocab=vocab, draft_vocab=vocab // 8, taps=(1, 2, 3), embedding=False)
    return folder, tiny.save(folder / "heads" / "eagle3", *written)


@pytest.fixture(scope="module")
def taught_head(head_pair: tuple[Path, Path]) -> LLM:
    llm = LLM(*head_pair, dtype="float32", speculative_config={**CHAIN, "adapt": HEAD_FAST})
    with updates_within_steps(llm):
        for number in range(5):
            prompts = [f"# {number} {i}\n{prompt}" for i, prompt in enumerate(PROMPTS)]
            llm.generate(prompts, SamplingParams(max_tokens=48, temperature=0, ignore_eos=True))
    return llm


@pytest.mark.slow
def test_a_head_learns_tokens_that_it_could_not_draft(taught_head: LLM, head_pair: tuple[Path, Path]) -> None:
    history, inner = proposer(taught_head).history, proposer(taught_head).inner
    assert len(history) >= 3 and history[-1].after > 2 * history[0].before
    assert isinstance(inner, Eagle)
    before, after = read_eagle(head_pair[1]).ids(), inner.net.head.ids()
    assert (after.diff() > 0).all() and len(after) == len(before)
    assert not set(after.tolist()) <= set(before.tolist())


@pytest.mark.slow
def test_the_text_does_not_depend_on_the_version_of_the_head(taught_head: LLM, head_pair: tuple[Path, Path]) -> None:
    for temperature in (0, 1):
        params = SamplingParams(max_tokens=40, seed=7, temperature=temperature, ignore_eos=True)
        plain = LLM(head_pair[0], dtype="float32", speculative_config={"method": "none"}).generate(PROMPTS[:4], params)
        adapted = taught_head.generate(PROMPTS[:4], params)
        assert [o.outputs[0].token_ids for o in adapted] == [o.outputs[0].token_ids for o in plain]
        assert any(o.stats.drafted for o in adapted)


@pytest.mark.slow
def test_an_adapted_head_can_be_saved(
    taught_head: LLM, head_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_no_update(taught_head, monkeypatch)
    taught_head.save_draft(tmp_path / "head")
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    saved = LLM(head_pair[0], tmp_path / "head", dtype="float32", speculative_config=CHAIN)
    counts = [[o.stats.accepted for o in llm.generate(PROMPTS[:4], params)] for llm in (saved, taught_head)]
    assert counts[0] == counts[1]


def test_a_new_version_drafts_for_running_requests(head_pair: tuple[Path, Path]) -> None:
    """A version with the same weights drafts what the first one would have: no cached row is lost."""
    static, adapting = (
        LLM(*head_pair, dtype="float32", speculative_config={**CHAIN, **adapt}) for adapt in ({}, {"adapt": "10%"})
    )
    params = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
    expected = static.generate(PROMPTS[1], params)[0]
    learner, steps = proposer(adapting), []
    for number, piece in enumerate(adapting.stream(PROMPTS[1], params)):
        steps.append(piece.step)
        if number % 10 == 5 and isinstance(learner.inner, Eagle):
            learner.inner.replace(learner.student.version())
    assert [token for step in steps for token in step.tokens] == list(expected.outputs[0].token_ids)
    assert sum(len(step.draft) for step in steps) == expected.stats.drafted > 0
    assert learner.config.share == 0.1


@pytest.mark.parametrize("norms", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}])
def test_a_head_is_trained_as_the_runtime_computes_it(head_pair, tmp_path, norms):
    vocab = json.loads((head_pair[0] / "config.json").read_text())["vocab_size"]
    written = tiny.eagle3(vocab=vocab, taps=(1, 2, 3), embedding="fc_norm" in norms, **norms)
    head = tiny.save(tmp_path / "head", *written)
    config = {**CHAIN, "adapt": {"window": 32, "held_out": 2}}
    llm = LLM(head_pair[0], head, dtype="float32", speculative_config=config)
    llm.generate(PROMPTS[1], SamplingParams(max_tokens=40, ignore_eos=True))
    learner, ((sample, _), *_) = proposer(llm), proposer(llm).samples
    assert isinstance(learner.inner, Eagle) and sample.states is not None and len(sample.states) == len(sample.tokens)
    net, module = learner.inner.net, learner.student.module
    states = torch.from_numpy(sample.states).view(torch.bfloat16).float()
    expected = net.teacher_forced(sample.tokens[1:].tolist(), net.features(states[:-1]))
    embedded = net.embedding[torch.from_numpy(sample.tokens)][None]
    with torch.no_grad():
        (hidden,) = module(embedded, states[None], 1)
        torch.testing.assert_close(module.logits(hidden[0]), expected, rtol=1e-4, atol=1e-4)
    llm.save_draft(tmp_path / "saved")
    saved = read_eagle(tmp_path / "saved")
    assert {name for name in ("fc_norm", "norm_output", "norm_before_fc") if getattr(saved, name)} == {*norms}
    assert ("embed_tokens.weight" in saved.tensors) == ("fc_norm" in norms)


def test_the_default_head_of_a_target_adapts(head_pair: tuple[Path, Path], tmp_path: Path) -> None:
    llm = LLM(head_pair[0], dtype="float32", adapt=0.5)
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True))
    llm.save_draft(tmp_path / "head")
    assert read_eagle(tmp_path / "head").exact


def test_other_heads_are_refused(tiny_pair: Any, tmp_path: Path) -> None:
    vocab = json.loads((tiny_pair.target / "config.json").read_text())["vocab_size"]
    head = tiny.save(tmp_path, *tiny.eagle3(vocab=vocab, norm_before_residual=True, taps=(1, 2, 3), embedding=False))
    with pytest.raises(InvalidRequest, match="EAGLE-3 heads of one layer"):
        LLM(tiny_pair.target, head, speculative_config={**CHAIN, "adapt": True})

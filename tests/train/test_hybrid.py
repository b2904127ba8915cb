"""The hybrid mixture of experts: its parts are those of transformers, and what is trained loads there and here."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_chunk_gated_delta_rule

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.heads.loading import load_mtp
from foretoken.models.heads.mtp import has_mtp
from foretoken.models.loading import load_model
from foretoken.train.config import HeadConfig, MtpTrainConfig, RunOptions
from foretoken.train.data import Corpus
from foretoken.train.draft import train_draft
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.heads import train_head
from foretoken.train.hybrid import HYBRID, gated_delta_rule, short_convolution
from foretoken.train.mtp import MtpHead
from foretoken.train.shapes import HybridShape
from foretoken.train.target import train_target
from foretoken.train.trainer import StackedMuon

from .test_heads import compare_chain, runtime_and_training
from .tiny import STEPS, TINY

SMALL = HybridShape(
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    max_position_embeddings=128,
)


@pytest.fixture(scope="module")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hybrid") / "tiny-hybrid"
    train_target(RunOptions(out), corpus, SMALL, replace(STEPS, dropout=0.1), HYBRID)
    return out


@pytest.mark.parametrize("length", [5, 64, 130])
def test_the_delta_rule_and_its_gradients_are_those_of_transformers(length: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, length, 2, 16, requires_grad=True) for _ in range(3))
    g, beta = (-0.3 * torch.rand(2, length, 2)).requires_grad_(), torch.rand(2, length, 2, requires_grad=True)
    own = gated_delta_rule(q, k, v, g, beta)
    expected, _ = torch_chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    assert torch.allclose(own, expected, atol=1e-6)
    weights, inputs = torch.randn_like(own), (q, k, v, g, beta)
    for a, b in zip(
        torch.autograd.grad((own * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)


def test_repeated_keys_stay_exact() -> None:
    k = torch.ones(1, 64, 1, 16)
    v, full = torch.randn(1, 64, 1, 16), torch.ones(1, 64, 1)
    out = gated_delta_rule(k, k, v, torch.zeros(1, 64, 1), full)
    assert torch.allclose(out, v / 4, atol=1e-4)  # the last value replaces the others


def test_the_short_convolution_is_a_convolution() -> None:
    x, weight = torch.randn(2, 30, 8, requires_grad=True), torch.randn(8, 1, 4, requires_grad=True)
    own, expected = short_convolution(x, weight), F.conv1d(x.mT, weight, padding=3, groups=8)[..., :30].mT
    assert torch.allclose(own, expected, atol=1e-6)
    weights = torch.randn_like(own)
    pairs = (torch.autograd.grad((out * weights).sum(), (x, weight)) for out in (own, expected))
    for a, b in zip(*pairs, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_stacked_muon_takes_the_steps_of_torch() -> None:
    torch.manual_seed(0)
    shapes = ((64, 96), (64, 96), (96, 32), (1, 32))
    ours, theirs = ([torch.nn.Parameter(torch.ones(s)) for s in shapes] for _ in range(2))
    stack = torch.nn.Parameter(torch.ones(2, 64, 96))
    both: Any = [*ours, stack]
    own = StackedMuon(both, lr=3e-3, weight_decay=0.1)
    other = torch.optim.Muon(theirs, lr=3e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = b.grad = torch.randn_like(a)
        stack.grad = torch.stack([p.grad for p in ours[:2] if p.grad is not None])
        own.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(stack, torch.stack(tuple(ours[:2])))


def test_the_trained_model_is_that_of_transformers_and_of_the_runtime(trained: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained)
    model = HYBRID.new(SMALL, tokenizer, STEPS)
    reference = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    state = {name: value for name, value in reference.state_dict().items() if name != "lm_head.weight"}
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    ids = torch.randint(1, len(tokenizer), (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = reference(ids).logits
        assert torch.allclose(model.eval()(ids)[0], expected, atol=1e-5)
    native = load_model(trained, "float32", "cpu", "native")
    handle = native.open(ids[0, :1].tolist())
    scored = native.score([handle], [Draft.chain(ids[0, 1:].tolist())])[0].logits
    assert torch.allclose(scored, expected[0], atol=1e-4)
    native.close(handle)


def test_a_draft_is_distilled_from_a_hybrid(trained: Path, corpus: Corpus, tmp_path: Path) -> None:
    figures = train_draft(RunOptions(tmp_path / "draft", "cpu"), trained, corpus, TINY, STEPS)
    assert 0 < figures["overlap"] <= 1
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["model_type"] == "llama"


def test_the_checkpoint_has_an_mtp_layer_and_says_how_it_was_made(trained: Path) -> None:
    assert has_mtp(trained)
    facts = json.loads((trained / "provenance.json").read_text())
    assert facts["command"].startswith("foretoken train hybrid tiny-hybrid --hidden 32 --layers 4 --heads 2")
    assert "--experts 4 --experts-per-token 2" in facts["command"]
    assert "--dropout 0.1" in facts["command"]
    assert HybridShape.of(json.loads((trained / "config.json").read_text())) == SMALL


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_experts_per_tok": 5}, "4 experts, fewer than 5"),
        ({"linear_num_value_heads": 3, "linear_num_key_heads": 2}, "3 heads do not divide among 2"),
        ({"head_dim": 12}, "head_dim is 12"),
        ({"num_experts": 0}, "num_experts must be an integer of at least 1"),
    ],
)
def test_sizes_that_cannot_work_are_refused(change: dict[str, int], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        replace(SMALL, **change)


def test_the_mtp_layer_is_trained_further_and_drafts_as_it_was_trained(trained, corpus, tmp_path):
    frozen, settings = FrozenTarget(trained, torch.device("cpu")), MtpTrainConfig(depths=2, single_share=0.0)
    own = {n: t for n, t in load_file(trained / "model.safetensors").items() if n.startswith("mtp.")}
    head = MtpHead(settings, frozen, torch.ones(frozen.vocab)).eval()
    assert {n: t.tolist() for n, t in head.weights().items()} == {n: t.tolist() for n, t in own.items()}
    out = tmp_path / "mtp"
    config = replace(STEPS, steps=2, window=24)
    data = HeadConfig(windows=6, held_out=2)
    train_head("mtp", RunOptions(out, "cpu"), trained, corpus, settings, config, data)
    loaded, states, expected = runtime_and_training(
        "mtp", settings, out, trained, lambda model: load_mtp(model, None, out, trained)
    )
    for row in (0, 5, 13):
        compare_chain(loaded.net, states, row, [logits[0, row] for logits in expected])

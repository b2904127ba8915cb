"""The argmax and likeliest tokens of a pass, and the vocabulary head on its own, agree with the logits of a pass."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from foretoken.core.distributions import NodeDistributions
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.history import History
from foretoken.core.native import sampling
from foretoken.core.sampling import SamplingLaw
from foretoken.models.base import Model, Scores
from foretoken.models.decoder import Decoder
from foretoken.models.loading import load_model
from foretoken.models.toy import ToyModel

from .plain import text
from .tiny import ARCHITECTURES, only_runner

HIDDEN, VOCAB = 64, 331  # the last unit of 32 outputs is padded
DRAFTS = [Draft.empty(), Draft.chain([5, 6, 7]), Draft.tree([5, 6, 7, 8], (-1, 0, 0, 1)), Draft.chain([9] * 40)]


@pytest.fixture(autouse=True, params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def decoder(head: torch.Tensor, dtype: torch.dtype, quantization: str | None = None, **changes: object) -> Decoder:
    """A model of one layer with this vocabulary head [VOCAB, HIDDEN]."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    at = "model.layers.0"
    weights = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
        **{f"{at}.{name}_layernorm.weight": torch.ones(HIDDEN) for name in ("input", "post_attention")},
        **{f"{at}.self_attn.{name}_proj.weight": random(HIDDEN, HIDDEN) * 0.2 for name in "qkvo"},
        **{f"{at}.mlp.{name}_proj.weight": random(HIDDEN, HIDDEN) * 0.2 for name in ("gate", "up", "down")},
    }
    config = {
        "model_type": "cohere" if "logit_scale" in changes else "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "intermediate_size": HIDDEN,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **changes,
    }
    with only_runner("compiled"):
        return Decoder(config, weights, dtype, torch.device("cpu"), quantization=quantization)


def both(model: Decoder) -> Iterator[tuple[torch.Tensor, Scores]]:
    """Yields each draft's logits, and its scores without them, from one pass over all drafts and from single ones."""
    for drafts in (DRAFTS, *([draft] for draft in DRAFTS)):
        results = []
        for argmax_only in (False, True):
            handles = [model.open(text(5 + i, i)) for i in range(len(drafts))]
            for i, handle in enumerate(handles):
                handle.argmax_only, handle.ranks = argmax_only, 4 + i
            results.append(model.score(handles, drafts))
            for handle in handles:
                model.close(handle)
        for full, scores in zip(*results, strict=True):
            assert full.ranked is not None and scores.ranked is not None
            assert np.array_equal(full.ranked, scores.ranked)
            yield full.logits, scores


def check(model: Decoder) -> set[int]:
    """Compares both for all drafts. Returns the tokens."""
    seen: set[int] = set()
    kernels = sampling.kernels()
    assert kernels is not None
    for logits, scores in both(model):
        assert scores.argmax is not None and not len(scores.logits)
        assert list(scores.argmax) == kernels.best(logits)
        assert scores.ranked is not None and scores.ranked.shape[1] >= 4
        assert np.array_equal(scores.ranked, kernels.largest(logits, scores.ranked.shape[1]))
        seen.update(scores.argmax)
    return seen


@pytest.mark.parametrize("numbers", ["float32", "bfloat16", "int8", "int4"])
def test_equals_the_argmax_of_the_logits(numbers: str) -> None:
    quantization = numbers if numbers.startswith("int") else None
    head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    model = decoder(head, torch.float32 if numbers == "float32" else torch.bfloat16, quantization)
    assert len(check(model)) > 10


@pytest.mark.parametrize("numbers", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1, 40, 300])
def test_lowest_token_on_ties(spread: int, numbers: torch.dtype) -> None:
    few = torch.randn(spread, HIDDEN, generator=torch.Generator().manual_seed(1))
    head = few.repeat(-(-VOCAB // spread), 1)[:VOCAB]  # every logit occurs again ``spread`` tokens further on
    assert max(check(decoder(head, numbers))) < spread


def test_padding_is_never_the_argmax() -> None:
    head = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1)).expand(VOCAB, HIDDEN)
    for sign in (1.0, -1.0):  # so that all logits of a row are negative with one of them, and padding has 0
        assert check(decoder(sign * head.clone(), torch.float32)) == {0}


def test_no_token_where_a_logit_is_not_finite() -> None:
    head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    head[200] = 3e38 * head[200].sign()
    assert check(decoder(head, torch.float32)) & {-1}


def test_only_a_batch_without_readers_of_logits_has_none() -> None:
    model = decoder(torch.randn(VOCAB, HIDDEN), torch.float32)
    handles = [model.open(text(5, i)) for i in range(2)]
    handles[0].argmax_only = True
    scores = model.score(handles, DRAFTS[:2])
    assert all(each.argmax is None and len(each.logits) for each in scores)


def test_distributions_of_an_argmax() -> None:
    rows = NodeDistributions(SamplingLaw(temperature=0.0), torch.empty(0, 5), lambda _: History([1], 1), [3, -1])
    assert rows.shape == (2, 5)
    assert rows.certain(0) == 3 and rows.certain(1) == -1
    assert rows[0].tolist() == [0.0, 0.0, 0.0, 1.0, 0.0] and rows[1].isnan().all()
    assert list(rows.chances([0, 0], [3, 4])) == [1.0, 0.0]
    assert "NaN" in str(rows.refusal(1))


def test_the_argmax_is_not_used_if_parameters_change_logits() -> None:
    assert SamplingLaw(temperature=0.0).takes_argmax
    for law in (SamplingLaw(), SamplingLaw(0.0, logit_bias=((1, 1.0),)), SamplingLaw(0.0, presence_penalty=1.0)):
        assert not law.takes_argmax


IDS = [5, 9, 3, 77, 20]


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("runner", ["compiled", "torch"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma2"])
@pytest.mark.slow
def test_the_head_alone_gives_the_logits_of_a_pass(name, runner, dtype, quantization, tmp_path):
    with only_runner(runner):
        model = load_model(ARCHITECTURES[name].save(tmp_path), dtype, "cpu", quantization=quantization)
    tolerance = 0.0 if runner == "compiled" else 1e-5 if dtype == "float32" and not quantization else 0.1
    _check(model, tolerance)


def test_the_head_alone_of_a_transformers_module(tmp_path: Path) -> None:
    _check(load_model(ARCHITECTURES["gpt2"].save(tmp_path), "float32", "cpu"), 1e-5)


def _check(model: Model, tolerance: float) -> None:
    handle = model.open(IDS)
    scores = model.score([handle], [Draft.chain([4, 8])], (model.num_layers,))[0]
    again = model.unembed(scores.taps[model.num_layers][-3:])
    assert (again - scores.logits).abs().max() <= tolerance * scores.logits.abs().max()
    one = model.unembed(scores.taps[model.num_layers][-1:])
    assert one.shape == (1, model.vocab_size)
    torch.testing.assert_close(one, again[-1:], rtol=1e-5, atol=1e-5)


def test_a_model_without_a_head_refuses() -> None:
    with pytest.raises(InvalidRequest, match="ToyModel"):
        ToyModel().unembed(torch.zeros(1, 8))

"""Encoder-decoders on both runtimes: whatever shares a pass, its rows equal transformers' full forward pass."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.models.trees import repeating
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Model
from foretoken.models.families.architecture import RelativeBuckets
from foretoken.models.loading import load_model
from foretoken.models.runners.choose import report_fallback
from foretoken.models.runners.native.build import kernels_available
from foretoken.models.seq2seq import EncoderDecoder

from .tiny import FAMILIES, build, load, save

TOLERANCE = 1e-4
LONG = [7 + i * i % 83 for i in range(70)]
SOURCES = ([5, 6, 7, 8, 9, 10, 11, 3], [20, 21, 22, 3], [2], LONG)
TREE = repeating((-1, 0, -1, 2), 9)


class Pair(NamedTuple):
    model: Model
    module: Any

    def reference(self, source: Sequence[int], *paths: Sequence[int]) -> Tensor:
        with torch.no_grad():
            rows = [
                self.module(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([path])).logits[0, -1]
                for path in paths
            ]
        return torch.stack(rows)


@pytest.fixture(scope="module", params=[(family, kernels) for kernels in (True, False) for family in FAMILIES], ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    (family, kernels), folder = request.param, tmp_path_factory.mktemp("seq2seq")
    module = save(family, folder)
    return Pair(load(folder, kernels), module)


def near(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() < TOLERANCE * max(1.0, float(expected.std())))


@pytest.mark.slow
def test_a_ragged_batch_with_trees_equals_transformers(pair: Pair) -> None:
    texts = ([0, 4, 5], [0], [0, *range(30, 75)], [0, 8])
    handles = [pair.model.open(text, source) for text, source in zip(texts, SOURCES, strict=True)]
    drafts = [TREE, Draft.empty(), Draft.chain([3, 4]), TREE]
    for text, source, draft, scores in zip(texts, SOURCES, drafts, pair.model.score(handles, drafts), strict=True):
        paths = [[*text, *(draft.ids[i] for i in draft.path(node))] for node in range(-1, len(draft))]
        assert near(scores.logits, pair.reference(source, *paths))
    emitted = [[10, 10, 50], [7], [9], [9, 10]]
    pair.model.commit(handles, emitted)
    after = pair.model.score(handles, [Draft.chain([1]), TREE, Draft.empty(), Draft.empty()])
    for handle, source, scores in zip(handles, SOURCES, after, strict=True):
        assert near(scores.logits[:1], pair.reference(source, handle.tokens))
    assert near(after[0].logits[1:], pair.reference(SOURCES[0], [*handles[0].tokens, 1]))
    for handle in handles:
        pair.model.close(handle)


def test_a_reused_slot_reads_its_own_source(pair: Pair) -> None:
    for source in SOURCES:
        handle = pair.model.open([0], source)
        assert near(pair.model.score([handle], [Draft.empty()])[0].logits, pair.reference(source, [0]))
        pair.model.close(handle)


def test_taps_equal_transformers_hidden_states(pair: Pair) -> None:
    handle, layers = pair.model.open([0, 4, 5], SOURCES[0]), (0, 1, pair.model.num_layers)
    (scores,) = pair.model.score([handle], [Draft.chain([6])], layers)
    with torch.no_grad():
        output = pair.module(
            input_ids=torch.tensor([SOURCES[0]]),
            decoder_input_ids=torch.tensor([[0, 4, 5, 6]]),
            output_hidden_states=True,
        )
    for layer in layers:
        assert near(scores.taps[layer], output.decoder_hidden_states[layer][0])
    assert near(pair.model.unembed(scores.taps[pair.model.num_layers][-1:]), scores.logits[-1:])
    pair.model.close(handle)


def test_a_missing_or_long_source_is_refused(tmp_path: Path) -> None:
    save("bart", tmp_path, max_position_embeddings=32)
    model = load_model(tmp_path, dtype="float32")
    with pytest.raises(InvalidRequest, match="encoder-decoder"):
        model.admit([0], [])
    with pytest.raises(InvalidRequest, match="at most 32"):
        model.admit([0], [3] * 40)
    with pytest.raises(InvalidRequest, match="at most 32"):
        model.open([0], [3] * 40)
    handle = model.open([0])
    with pytest.raises(InvalidRequest, match="encoder-decoder"):
        model.score([handle], [Draft.empty()])


def test_a_separate_vocabulary_head_is_loaded(tmp_path: Path) -> None:
    """Checkpoints of T5 1.1 have one."""
    from safetensors.torch import load_file, save_file

    save("t5-1.1", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = torch.randn(101, 64, generator=torch.Generator().manual_seed(0))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(tmp_path, dtype="float32")
    module = build("t5-1.1")
    with torch.no_grad():
        hidden = module.decoder(
            input_ids=torch.tensor([[0, 4]]),
            encoder_hidden_states=module.encoder(torch.tensor([SOURCES[0]])).last_hidden_state,
        ).last_hidden_state[0, -1:]
    (scores,) = model.score([model.open([0, 4], SOURCES[0])], [Draft.empty()])
    assert near(scores.logits, hidden @ weights["lm_head.weight"].T)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantizing_changes_the_distribution_a_little(tmp_path: Path, kernels: bool, scheme: str) -> None:
    save("t5-1.1", tmp_path)
    distributions = []
    for quantization in (None, scheme):
        model = load(tmp_path, kernels, quantization=quantization)
        (scores,) = model.score([model.open([0, 4], SOURCES[0])], [Draft.empty()])
        distributions.append(scores.logits.softmax(-1))
    assert 0 < float((distributions[0] - distributions[1]).abs().sum() / 2) < (0.1 if scheme == "int8" else 0.5)


def test_bits_do_not_depend_on_the_weight_format(tmp_path: Path) -> None:
    save("t5", tmp_path)
    logits = []
    for weight_format in ("raw", "packed"):
        model = load(tmp_path, True, dtype="bfloat16", weight_format=weight_format)
        (scores,) = model.score([model.open([0, 4], LONG)], [TREE])
        logits.append(scores.logits)
    assert torch.equal(*logits)


def test_narrow_heads_fall_back_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if not kernels_available():
        pytest.skip("there are no compiled kernels here")
    report_fallback.cache_clear()
    module = save("t5", tmp_path, d_kv=8)
    pair = Pair(load_model(tmp_path, dtype="float32"), module)
    assert "heads of a multiple of 16 and at most 512, not 8" in caplog.text
    (scores,) = pair.model.score([pair.model.open([0, 4], LONG)], [Draft.empty()])
    assert near(scores.logits, pair.reference(LONG, [0, 4]))
    with pytest.raises(InvalidRequest, match="needs the compiled kernels: the kernels need heads"):
        load_model(tmp_path, dtype="bfloat16", weight_format="packed")


def test_equal_encoders_are_shared(tmp_path: Path) -> None:
    save("t5", tmp_path / "target", num_decoder_layers=2)
    save("t5", tmp_path / "other", d_ff=64)
    target, twin, other = (load_model(tmp_path / name, dtype="float32") for name in ("target", "target", "other"))
    assert isinstance(target, EncoderDecoder) and isinstance(twin, EncoderDecoder)
    assert twin.share(target) and twin.runner.encoder is target.runner.encoder
    assert not other.share(target)


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("count, farthest", [(32, 128), (12, 20)])
def test_buckets_are_those_of_the_papers_code(both_ways: bool, count: int, farthest: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention, T5Config

    numbers = {"relative_attention_num_buckets": count, "relative_attention_max_distance": farthest}
    attention = T5Attention(
        T5Config(is_decoder=not both_ways, **numbers), has_relative_attention_bias=True, layer_idx=0
    )
    bias = attention.relative_attention_bias.weight
    with torch.no_grad():
        bias.copy_(torch.arange(count)[:, None].expand_as(bias))  # the bias of a pair is then its bucket
        pairs = attention.compute_bias(farthest + 1, farthest + 1)[0, 0]
    expected = [*pairs[-1].tolist(), *pairs[0, 1:].tolist()]  # keys before the last query, and behind the first
    assert RelativeBuckets(count, farthest, both_ways).by_distance().tolist() == expected

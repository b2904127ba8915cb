"""Latent attention: the cache is as small as it should be, and rows have the bits of plain decoding."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.models.plain import text

from foretoken.core.draft import Draft
from foretoken.models.decoder import Decoder
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.torch_runner import TorchRunner

from .plain import check_chains, check_prefix_cache_hits, check_tree, one_by_one
from .test_native import needs_kernels
from .tiny import ARCHITECTURES, LATENT
from .trees import repeating

CPU = torch.device("cpu")
KINDS = {
    "float32": (torch.float32, None, "raw"),
    "bfloat16": (torch.bfloat16, None, "raw"),
    "packed": (torch.bfloat16, None, "packed"),
    "int8": (torch.bfloat16, "int8", "raw"),
    "int4": (torch.float32, "int4", "raw"),
}
if torch.cuda.is_available():
    KINDS |= {f"{kind}, cuda": KINDS[kind] for kind in ("float32", "bfloat16", "int8")}
ON_CUDA = [kind for kind in KINDS if kind.endswith("cuda")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ARCHITECTURES["deepseek-v3"].save(tmp_path_factory.mktemp("deepseek"))


def loaded(path: Path, kind: str) -> Decoder:
    dtype, quantization, weight_format = KINDS[kind]
    device = torch.device("cuda") if kind in ON_CUDA else CPU
    return Decoder(load_config(path), open_weights(path), dtype, device, None, quantization, weight_format)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_what_shares_their_pass(kind: str, checkpoint: Path) -> None:
    """Chains, alone and beside sequences of other lengths, and a prompt in parts, have the bits of plain decoding."""
    model = loaded(checkpoint, kind)
    assert isinstance(model.runner, NativeRunner) == (model.device == CPU) and model.batch_invariant
    prompt, continuation = text(150, 1), text(20, 2)
    check_chains(model, prompt, continuation, (1, 3, 19), (1, 15, 63, 64, 200))
    parts = model.open(prompt[:70])
    model.score([parts], [Draft.empty()])
    model.commit([parts], [prompt[70:]])
    expected = one_by_one(model, prompt, continuation[:1])[0]
    assert torch.equal(model.score([parts], [Draft.empty()])[0].logits[0], expected)


@needs_kernels
@pytest.mark.parametrize("kind", ["float32", "bfloat16", *ON_CUDA])
@pytest.mark.parametrize("length", [9, 61, 64, 79])
def test_nodes_of_trees_have_the_bits_of_chains(kind: str, length: int, checkpoint: Path) -> None:
    """Branches begin and cross at every place of a block of sixteen keys, and accepted ones move."""
    draft = repeating((-1, 0, -1, 2, 1, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18))
    check_tree(loaded(checkpoint, kind), text(length, 3), draft, leaf=19)


@needs_kernels
@pytest.mark.parametrize("kind", ["bfloat16", "int8", *ON_CUDA])
def test_prefix_cache_hits_give_the_same_bits(kind: str, checkpoint: Path) -> None:
    check_prefix_cache_hits(loaded(checkpoint, kind), text(300, 4))


@needs_kernels
def test_the_cache_has_one_latent_and_one_key_for_all_heads(checkpoint: Path) -> None:
    numbers = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    for kind, size in (("float32", 4), ("bfloat16", 2), *((kind, 2) for kind in ON_CUDA if kind.startswith("bf"))):
        assert loaded(checkpoint, kind).kv_bytes_per_token == 2 * numbers * size


def test_sizes_that_kernels_do_not_have_are_computed_by_torch_operators(tmp_path: Path) -> None:
    tiny = ARCHITECTURES["deepseek-v2"]
    odd = replace(tiny, config={**tiny.config, "v_head_dim": 24, "kv_lora_rank": 40})
    path = odd.save(tmp_path)
    model, tokens = Decoder(load_config(path), open_weights(path), torch.float32, CPU), text(20, 5)
    assert isinstance(model.runner, TorchRunner)
    with torch.no_grad():
        expected = odd.build()(torch.tensor([tokens])).logits[0, -1]
    assert (model.score([model.open(tokens)], [Draft.empty()])[0].logits[0] - expected).abs().max() < 1e-4

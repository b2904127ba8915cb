"""KV caches of int8 and of bfloat16: what they hold, and rows with the bits of plain decoding."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.native import build, cpu
from foretoken.models.decoder import Decoder
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.loading import load_model

from .dense import saved
from .plain import check_tree, one_by_one, text
from .test_native import instructions, needs_kernels  # noqa: F401
from .tiny import ARCHITECTURES
from .trees import repeating

on_devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_kernels), *(["cuda"] if torch.cuda.is_available() else [])]
)
FAMILIES = ("llama", "gemma2", "gpt-oss", "bloom", "qwen3.5")  # windows and caps, sinks, ALiBi, recurrent layers


class Int8Cache(DynamicCache):
    """transformers' cache, whose keys and values are rounded to int8 with a scale for each token and head."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(rounded(key_states), rounded(value_states), layer_idx, *args, **kwargs)


def rounded(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (x / scale).round() * scale


def opened(path: Path, kv_cache_dtype: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    return Decoder(load_config(path), open_weights(path), dtype, torch.device(device), kv_cache_dtype=kv_cache_dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ARCHITECTURES["llama"].save(tmp_path_factory.mktemp("llama"))


@on_devices
@pytest.mark.parametrize("family", FAMILIES)
def test_int8_keys_and_values_are_those_of_transformers_rounded(device: str, family: str, tmp_path: Path) -> None:
    """Rounding of a number near the middle may go either way, so that few logits differ by more than float32 does."""
    tokens = text(150, 1)
    if family in ARCHITECTURES:
        module = ARCHITECTURES[family].build()
        module.save_pretrained(tmp_path)
    else:
        module = saved(family, tmp_path)
    model = opened(tmp_path, "int8", device=device)
    with torch.no_grad():
        cache = Int8Cache(config=module.config)
        expected = module(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0, 99:]
        exact = module(torch.tensor([tokens]), use_cache=False).logits[0, 99:]
    scores = model.score([model.open(tokens[:100])], [Draft.chain(tokens[100:])])[0].logits
    error, loss = (scores - expected).abs(), (exact - expected).abs()
    assert error.max() < 0.2 * loss.max() and error.mean() < 0.05 * loss.mean(), (error.max(), loss.max())


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set_rounds_equally(instructions, dtype, folder, monkeypatch):  # noqa: F811
    def scores() -> torch.Tensor:
        model = opened(folder, "int8", dtype)
        return model.score([model.open(text(100, 2))], [repeating((-1, 0, -1, 2, 1))])[0].logits

    here = scores()
    monkeypatch.delenv(cpu.VARIABLE)
    near = 0.02 if dtype == torch.float32 else 0.5
    assert (here - scores()).abs().max() < near


@on_devices
@pytest.mark.parametrize("length", [9, 61, 64, 79])
def test_nodes_of_trees_have_the_bits_of_chains(device: str, length: int, folder: Path) -> None:
    """Branches begin and cross at every place of a page and of a word of four keys, and accepted ones move."""
    draft = repeating((-1, 0, -1, 2, 1, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18))
    check_tree(opened(folder, "int8", device=device), text(length, 3), draft, leaf=19)


@on_devices
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "auto"])
@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", "qwen3.5"])
def test_chunks_and_prefix_cache_hits_give_the_same_bits(device, family, kv_cache_dtype, tmp_path):
    model = opened(ARCHITECTURES[family].save(tmp_path), kv_cache_dtype, torch.bfloat16, device)
    if not model.enable_prefix_cache(2**24):
        pytest.skip("CUDA has no prefix cache of this family: runners/cuda/runner.py")
    prompt = text(300, 4)
    expected = one_by_one(model, prompt[:1], prompt[1:])[-1]
    for ends in ([150, 299], [64, 200, 299], [299], [299]):
        handle = model.open(prompt[: ends[0]])
        for start, end in pairwise(ends):
            model.score([handle], [Draft.empty()])
            model.commit([handle], [prompt[start:end]])
        scores = model.score([handle], [Draft.empty()])[0].logits
        model.commit([handle], [()])
        assert torch.equal(scores[0], expected), ends
        model.close(handle)
    model.check()


@on_devices
def test_an_int8_cache_takes_a_byte_for_each_number_and_four_for_each_head(device: str, folder: Path) -> None:
    a = opened(folder, "auto", device=device).architecture
    numbers, heads = 2 * a.layers * a.kv_heads * a.head_dim, 2 * a.layers * a.kv_heads
    sizes = {name: opened(folder, name, device=device).kv_bytes_per_token for name in ("auto", "bfloat16", "int8")}
    assert sizes == {"auto": 4 * numbers, "bfloat16": 2 * numbers, "int8": numbers + 4 * heads}
    assert opened(folder, "bfloat16", torch.bfloat16, device).kv_bytes_per_token == 2 * numbers


def test_unsupported_types_of_the_kv_cache_are_refused(folder, tmp_path, monkeypatch):
    with pytest.raises(InvalidRequest, match="kv_cache_dtype 'fp8' is not known; known: auto, bfloat16, int8"):
        load_model(folder, kv_cache_dtype="fp8")
    with pytest.raises(InvalidRequest, match="'int8' needs the native decoder"):
        load_model(folder, backend="hf", kv_cache_dtype="int8")
    monkeypatch.setenv(build.SWITCH, "0")
    with pytest.raises(InvalidRequest, match=r"needs the compiled kernels.*FORETOKEN_NATIVE=0 is set; leave it out"):
        opened(folder, "int8")
    assert opened(folder, "bfloat16", torch.bfloat16).kv_bytes_per_token


@needs_kernels
def test_compressed_latents_are_not_rounded_further(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="a deepseek_v3 caches one compressed latent for all heads"):
        opened(ARCHITECTURES["deepseek-v3"].save(tmp_path), "int8")

"""Packed weights on disk: the same logits as from the checkpoint, and never from a damaged or an old file."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken import LLM, SamplingParams, zoo
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Handle
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.layers import Layers, Source, read_ends
from foretoken.models.loading import load_model
from foretoken.models.runners.native import cache
from foretoken.models.runners.native.build import Kind, packs_groups
from foretoken.models.runners.native.cache import WeightCache
from foretoken.models.runners.native.describe import Description
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.pass_plan import PassPlan

from .gguf_files import K, tiny_checkpoint, write_both
from .test_native import CONFIG, weights
from .tiny import ARCHITECTURES

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not packs_groups(torch.bfloat16), reason="no compiled kernels here")]
PROMPT = list(range(1, 30))


@pytest.fixture(autouse=True)
def _small_models_too(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MIN_BYTES", 1)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one when weights are packed."""
    found: list[str] = []
    describe = Description.model

    def spied(self: Description, *given: Any) -> Any:
        found.append("packed")
        return describe(self, *given)

    monkeypatch.setattr(Description, "model", spied)
    return found


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_both(tiny_checkpoint("llama"), "llama", tmp_path, K.Q4_0)[0]


def load(path: Path, quantization: str | None = None, dtype: str = "float32") -> Decoder:
    """Loads a model and waits until its weights are on disk."""
    model = load_model(path, dtype, "cpu", quantization=quantization)
    cache.wait()
    assert isinstance(model, Decoder) and isinstance(model.runner, NativeRunner)
    return model


def logits(model: Decoder) -> Tensor:
    handle = model.open(PROMPT)
    result = model.score([handle], [Draft.chain([3, 4, 5])])[0].logits
    model.close(handle)
    return result


def stored(folder: Path) -> list[Path]:
    return sorted((folder / "weights").iterdir()) if (folder / "weights").exists() else []


@pytest.mark.parametrize("kind", [K.Q4_0, K.Q4_K, K.Q8_0, K.Q6_K, K.MXFP4], ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_logits_of_a_gguf_file_are_the_same_from_the_cache(tmp_path, own_cache, packed, architecture, kind):
    file, _ = write_both(tiny_checkpoint(architecture), architecture, tmp_path, kind)
    expected = logits(load(file))
    assert packed == ["packed"] and len(stored(own_cache)) == 1
    model = load(file)
    assert torch.equal(logits(model), expected) and packed == ["packed"]
    hidden = torch.ones(2, model.hidden_size)
    assert model.unembed(hidden).shape == (2, model.vocab_size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "architecture, quantization",
    [*(("llama", q) for q in ("int8", "int4", "int4-g64")), *((n, "int8") for n in ("qwen3.5", "bamba", "lfm2"))],
)
def test_weights_that_were_quantized_on_loading_are_kept(
    tmp_path: Path, own_cache: Path, packed: list[str], quantization: str, dtype: str, architecture: str
) -> None:
    folder = ARCHITECTURES[architecture].save(tmp_path / "model")
    expected = logits(load(folder, quantization, dtype))
    assert torch.equal(logits(load(folder, quantization, dtype)), expected) and packed == ["packed"]
    load(folder, None, dtype)  # is only rearranged
    assert len(stored(own_cache)) == 1


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_texts_are_the_same_from_the_cache(packed: list[str], quantization: str) -> None:
    texts = []
    prompts = ["def read(path):\n", "class Queue:\n"]
    for params in (SamplingParams(max_tokens=24, temperature=0.0), SamplingParams(max_tokens=24, seed=3)):
        for _ in range(2):
            llm = LLM(zoo.path("target"), zoo.path("draft"), quantization=quantization)
            texts.append([output.outputs[0].text for output in llm.generate(prompts, params)])
            cache.wait()
    assert texts[0] == texts[1] and texts[2] == texts[3] and packed == ["packed"] * (1 + 4)  # the draft stays bfloat16


def test_weights_in_twelve_bits_are_the_same_from_the_cache(gguf: Path) -> None:
    architecture = Architecture.of(CONFIG, None)
    source = Source(weights(), architecture, torch.bfloat16)
    place = WeightCache((gguf,), {})
    fresh = NativeRunner(architecture, Layers(source), read_ends(source), torch.bfloat16, compress=True, cache=place)
    cache.wait()
    mapped = NativeRunner.cached(architecture, torch.bfloat16, place)
    assert mapped is not None and mapped.kinds == fresh.kinds and Kind.PACKED in mapped.kinds
    plan = PassPlan.of([Handle(0, PROMPT, 0)], [Draft.chain([3, 4, 5])], [0])
    results = []
    for runner in (fresh, mapped):
        runner.acquire()
        results.append(runner.run(plan, (0, 1), logits=True))
    first, second = (result.logits for result in results)
    assert first is not None and second is not None and torch.equal(first, second)


def test_other_settings_and_other_code_make_other_files(gguf, own_cache, packed, monkeypatch):
    load(gguf)
    load(gguf, None, "bfloat16")
    load(gguf, "int8")
    monkeypatch.setattr(cache, "_code", lambda: "changed")
    load(gguf)
    assert len(packed) == len(stored(own_cache)) == 4


def test_a_changed_checkpoint_is_noticed(gguf: Path, tmp_path: Path, packed: list[str]) -> None:
    before = logits(load(gguf))
    size = gguf.stat().st_size
    (tmp_path / "other").mkdir()
    other, _ = write_both(tiny_checkpoint("llama", seed=5), "llama", tmp_path / "other", K.Q4_0)
    gguf.write_bytes(other.read_bytes())
    assert gguf.stat().st_size == size
    after = logits(load(gguf))
    assert len(packed) == 2 and not torch.equal(before, after)
    assert torch.equal(after, logits(load_model(other, "float32", "cpu")))  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["empty", "head", "short", "block", "directory", "longer"])
def test_a_damaged_file_is_made_again(gguf, own_cache, packed, damage, caplog):
    expected = logits(load(gguf))
    (file,) = stored(own_cache)
    content = bytearray(whole := file.read_bytes())
    if damage in ("head", "block", "directory"):
        content[{"head": 9, "block": len(content) // 2, "directory": len(content) - 20}[damage]] ^= 1
    elif damage == "longer":
        content[4:4] = b"x"
    else:
        content = content[: {"empty": 0, "short": len(content) - 5000}[damage]]
    file.write_bytes(content)
    assert torch.equal(logits(load(gguf)), expected)
    assert len(packed) == 2 and file.read_bytes() == whole and "damaged" in caplog.text


def test_every_changed_byte_is_noticed(gguf: Path, own_cache: Path) -> None:
    from foretoken.models.runners.native.weight_image import DamagedImage, open_image

    load(gguf)
    (file,) = stored(own_cache)
    content = bytearray(file.read_bytes())
    image = open_image(file)
    starts = [0, 8, 16, 24, *(4096 + 997 * i for i in range((len(content) - 4096) // 997))]
    unnoticed = 0
    for at in starts:
        changed = content.copy()
        changed[at] ^= 128
        file.write_bytes(changed)
        try:
            open_image(file)
        except DamagedImage:
            continue
        unnoticed += 1
        assert not content[at] and at >= 4096  # padding between blocks, which nothing reads
    assert unnoticed < len(starts) / 2 and image.spec.layer_count == 2


def test_the_least_recently_used_files_are_deleted(tmp_path, own_cache, packed, monkeypatch):
    files = []
    for seed in range(3):
        (tmp_path / str(seed)).mkdir()
        files.append(write_both(tiny_checkpoint("llama", seed=seed), "llama", tmp_path / str(seed), K.Q4_0)[0])
    load(files[0])
    (first,) = stored(own_cache)
    size = first.stat().st_size
    monkeypatch.setenv(cache.BOUND, str(int(2.5 * size)))
    os.utime(first, (1, 1))
    load(files[1])
    (second,) = set(stored(own_cache)) - {first}
    os.utime(second, (2, 2))
    load(files[0])  # is used again
    (own_cache / "weights" / "old.partial").write_bytes(b"")
    os.utime(own_cache / "weights" / "old.partial", (1, 1))
    load(files[2])
    assert first.exists() and not second.exists() and len(stored(own_cache)) == 2
    assert len(packed) == 3


def test_the_cache_can_be_turned_off(gguf, own_cache, packed, monkeypatch):
    for bound in ("0", "1KiB"):  # none, and too small for it
        monkeypatch.setenv(cache.BOUND, bound)
        load(gguf)
        assert not stored(own_cache)
    monkeypatch.setenv(cache.BOUND, "many")
    with pytest.raises(InvalidRequest, match="FORETOKEN_WEIGHT_CACHE must be a size such as 20GiB"):
        load(gguf)
    assert len(packed) == 2


def test_small_models_are_not_kept(gguf: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MIN_BYTES", gguf.stat().st_size + 1)
    load(gguf)
    assert not stored(own_cache)


def test_files_belong_to_their_owner_alone(gguf: Path, own_cache: Path) -> None:
    load(gguf)
    (file,) = stored(own_cache)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_written_is_reported(gguf, own_cache, caplog):
    (own_cache / "weights").write_text("in the way")
    expected = logits(load(gguf))
    assert "cannot be kept" in caplog.text and torch.equal(logits(load(gguf)), expected)


def test_several_threads_may_keep_the_same_model(gguf: Path, own_cache: Path, packed: list[str]) -> None:
    models = [load_model(gguf, "float32", "cpu") for _ in range(3)]
    cache.wait()
    assert len(stored(own_cache)) == 1
    assert torch.equal(logits(load(gguf)), logits(models[0]))  # type: ignore[arg-type]

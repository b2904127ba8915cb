"""GGUF files: every type and architecture gives the weights and logits of the checkpoint it was made from."""

import json
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as K
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from foretoken import LLM, SamplingParams, zoo
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.native.build import SWITCH
from foretoken.models.base import Model
from foretoken.models.decoder import Decoder
from foretoken.models.formats.checkpoint import load_config, open_weights, resolve
from foretoken.models.formats.gguf.blocks import LAYOUTS, groups_of
from foretoken.models.formats.gguf.header import Header
from foretoken.models.formats.gguf.weights import GGUFWeights
from foretoken.models.formats.quantize import flat
from foretoken.models.loading import load_model
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.student import Student

from .gguf_files import FAMILIES, add_weights, finish, random_blocks, tiny_checkpoint, write_both
from .test_native import needs_kernels
from .tiny import only_runner

pytestmark = pytest.mark.slow

IDS = [3 + (17 * at) % 300 for at in range(40)]
MIXED = {"token_embd.weight": K.Q6_K, "attn_v.weight": K.Q6_K, "ffn_down.weight": K.Q6_K, "weight": K.Q4_K}


def logits(model: Model) -> Tensor:
    """Returns the logits behind a text that is longer than the windows of the tiny models."""
    handle = model.open(IDS)
    result = model.score([handle], [Draft.empty()])[0].logits
    model.close(handle)
    return result


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_a_quantized_type_equals_the_reference_bit_for_bit(kind: K) -> None:
    raw = random_blocks(kind, 48, 512, seed=int(kind), scale=1.0)
    expected = torch.from_numpy(gguf.dequantize(raw, kind))
    groups = groups_of(kind, raw)
    layout = LAYOUTS[kind]
    assert groups.codes.shape == (48, 512) and flat(groups.scales).shape == (48, 512 // layout.group)
    assert (groups.offsets is not None) == layout.offsets
    assert int(groups.codes.max()) < 2**layout.bits
    assert torch.equal(groups.dequantize(layout).view(torch.int32), expected.view(torch.int32))


def test_all_types_of_the_issue_are_read() -> None:
    names = "Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K Q2_K Q3_K IQ4_NL IQ4_XS MXFP4"
    assert {kind.name for kind in LAYOUTS} == set(names.split())


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("kinds", [K.F32, MIXED], ids=["F32", "mixed"])
def test_logits_equal_those_of_the_dequantized_checkpoint(architecture, kinds, tmp_path, monkeypatch):
    """With torch's operators, which dequantize the matrices; compiled kernels also quantize activations."""
    monkeypatch.setenv(SWITCH, "0")
    module = tiny_checkpoint(architecture)
    file, folder = write_both(module, architecture, tmp_path, kinds)
    ours, reference = (logits(load_model(path, dtype="float32")) for path in (file, folder))
    if architecture == "llama":  # its rotary factors are rounded to float32
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5 * float(reference.std()))
    else:
        assert torch.equal(ours, reference)
    if kinds is K.F32:
        with torch.no_grad():
            alone = module(torch.tensor([IDS])).logits[0, -1:]
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("architecture", FAMILIES)
def test_compiled_logits_are_near_those_of_the_dequantized_checkpoint(architecture: str, tmp_path: Path) -> None:
    # Rounded activations may choose other experts, so all are chosen.
    more = {"num_experts_per_tok": 4} if "num_experts_per_tok" in FAMILIES[architecture][1] else {}
    levels = [(K.Q4_0, 0.05), (K.Q4_K, 0.05), (MIXED, 0.2)]  # mixed blocks have far larger weights,
    module = tiny_checkpoint(architecture, **more)
    for kinds, near in levels[:2] if architecture == "granitemoe" else levels:  # which saturate Granite's softmaxes
        file, folder = write_both(module, architecture, tmp_path, kinds)
        ours, reference = (load_model(path, dtype="float32") for path in (file, folder))
        assert isinstance(ours, Decoder) and isinstance(ours.runner, NativeRunner)
        exact = logits(reference)
        assert (logits(ours) - exact).abs().max() < near * exact.abs().max()


PLAIN = {"attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize("architecture, settings", [("llama", PLAIN), ("qwen2", {})])
def test_transformers_reads_the_same_model_from_the_file(architecture, settings, tmp_path, monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    module = tiny_checkpoint(architecture, **settings)
    file, _ = write_both(module, architecture, tmp_path, K.Q8_0)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = other(torch.tensor([IDS[:8]])).logits[0, -1:]
    model = load_model(file, dtype="float32")
    handle = model.open(IDS[:8])
    ours = model.score([handle], [Draft.empty()])[0].logits
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [*LAYOUTS, K.F32, K.F16, K.BF16], ids=lambda kind: kind.name)
def test_every_tensor_equals_the_checkpoint(kind: K, tmp_path: Path) -> None:
    file, folder = write_both(tiny_checkpoint("llama"), "llama", tmp_path, kind)
    weights, expected = GGUFWeights(file), load_file(folder / "model.safetensors")
    assert set(weights) == set(expected) and len(weights) == len(expected)
    for name, tensor in expected.items():
        assert weights.shapes[name] == tuple(tensor.shape)
        assert torch.equal(weights[name].float(), tensor), name
    grouped = weights.grouped("model.layers.0.self_attn.q_proj.weight")
    assert (grouped is None) == (kind not in LAYOUTS)
    if grouped is not None:
        part = grouped.rows(17, 90).dequantize(grouped.layout)
        assert torch.equal(part, expected["model.layers.0.self_attn.q_proj.weight"][17:90])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_int8_and_bfloat16_load_from_a_file(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    file, folder = write_both(tiny_checkpoint("qwen3"), "qwen3", tmp_path, MIXED)
    for quantization in (None, "int8"):
        ours, reference = (logits(load_model(p, dtype=dtype, quantization=quantization)) for p in (file, folder))
        assert torch.equal(ours, reference)


def test_the_configuration_is_the_checkpoint_s(tmp_path: Path) -> None:
    file, folder = write_both(tiny_checkpoint("gemma3"), "gemma3", tmp_path, K.F16)
    ours, reference = load_config(file), load_config(folder)
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "rms_norm_eps")
    assert [ours[key] for key in same] == [reference[key] for key in same]
    assert ours["model_type"] == "gemma3_text" and ours["rope_theta"] == 1e6


def test_a_folder_with_one_file_stands_for_it(tmp_path: Path) -> None:
    file, folder = write_both(tiny_checkpoint("qwen2"), "qwen2", tmp_path, K.Q8_0)
    assert resolve(file) == file and resolve(tmp_path) == file
    assert resolve(tmp_path, gguf_file="model.gguf") == file
    assert resolve(folder) == folder
    (tmp_path / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(ModelLoadError, match="gguf_file="):
        resolve(tmp_path)
    with pytest.raises(ModelLoadError, match=r"model\.gguf, other\.gguf"):
        resolve(tmp_path, gguf_file="third.gguf")
    assert load_model(tmp_path, gguf_file="other.gguf", dtype="float32").vocab_size == 320


@pytest.mark.parametrize("name", ["org/name:Q4_K_M", "org/name:q4_k_m"])
def test_a_tag_of_the_hub_downloads_that_file_alone(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    from fnmatch import fnmatch

    import huggingface_hub

    repository = ["name-Q4_K_M.gguf", "name-Q8_0.gguf", "name-IQ4_K_M.gguf", "README.md", "config.json"]
    asked = []

    def snapshot_download(hub_id: str, allow_patterns: list[str]) -> str:
        asked.append(hub_id)
        for file in repository:
            if any(fnmatch(file, pattern) for pattern in allow_patterns):
                (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve(name) == tmp_path / "name-Q4_K_M.gguf" and asked == ["org/name"]
    assert [file.name for file in tmp_path.iterdir()] == ["name-Q4_K_M.gguf"]
    assert resolve("org/name", gguf_file="name-Q8_0.gguf") == tmp_path / "name-Q8_0.gguf"
    with pytest.raises(ModelLoadError, match="no GGUF files that end with 'Q2_K'"):
        resolve("org/name:Q2_K")


def test_a_file_runs_on_the_native_decoder_only(tmp_path: Path) -> None:
    file, _ = write_both(tiny_checkpoint("qwen2"), "qwen2", tmp_path, K.Q8_0)
    with pytest.raises(InvalidRequest, match="native decoder"):
        load_model(file, backend="hf")


def test_a_draft_in_a_file_does_not_learn(tmp_path: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(zoo.path("draft"), dtype=torch.float32)
    file, _ = write_both(module, "llama", tmp_path, K.Q8_0)
    with pytest.raises(ModelLoadError, match="GGUF file, which cannot be trained further"):
        Student(file, load_model(zoo.path("draft")), 1e-3, 1)


def test_weights_are_not_kept_in_memory_twice(tmp_path: Path) -> None:
    file, _ = write_both(tiny_checkpoint("qwen2"), "qwen2", tmp_path, K.Q4_0)
    weights = open_weights(file)
    assert isinstance(weights, GGUFWeights)
    grouped = weights.grouped("model.layers.1.mlp.down_proj.weight")
    assert grouped is not None and grouped.shape == (256, 512)
    block, size = GGML_QUANT_SIZES[K.Q4_0]
    assert np.prod(grouped.shape) // block * size < file.stat().st_size


def test_the_bundled_pair_writes_the_same_text_from_files(tmp_path: Path) -> None:
    """Files of bfloat16 hold the checkpoints' own weights and tokenizer, so every token is the same."""
    files = []
    for role in ("target", "draft"):
        tokenizer = json.loads((zoo.path(role) / "tokenizer.json").read_text(encoding="utf-8"))["model"]

        def add_tokenizer(writer: Any, model: Any = tokenizer) -> None:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("gpt-2")
            writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
            writer.add_token_types([3] + [1] * (len(model["vocab"]) - 1))
            writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
            writer.add_eos_token_id(0)

        (tmp_path / role).mkdir()
        module = AutoModelForCausalLM.from_pretrained(zoo.path(role), dtype=torch.float32)
        files.append(write_both(module, "llama", tmp_path / role, K.BF16, add_tokenizer)[0])
    prompts = ["import os\n", "def read(path):\n    "]
    params = SamplingParams(max_tokens=24, temperature=0.0)
    expected = LLM(zoo.path("target"), draft_model=zoo.path("draft")).generate(prompts, params)
    results = LLM(files[0], draft_model=files[1].parent).generate(prompts, params)
    for result, reference in zip(results, expected, strict=True):
        assert result.outputs[0].text == reference.outputs[0].text
        assert result.outputs[0].token_ids == reference.outputs[0].token_ids


FIRST = "model-00001-of-00003.gguf"


def write_split(folder: Path, name: str = "model") -> Path:
    """Writes a model in three files. Returns the first."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 2 * 11 + 3
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", "qwen3", split_max_tensors=count // 3 + 1)
    add_weights(writer, tiny_checkpoint("qwen3"), "qwen3", K.Q4_0)
    finish(writer)
    first, *_ = parts = sorted(folder.glob(f"{name}-*.gguf"))
    assert len(parts) == 3
    return first


def test_the_first_file_and_the_folder_stand_for_all(tmp_path: Path) -> None:
    whole, _ = write_both(tiny_checkpoint("qwen3"), "qwen3", tmp_path, K.Q4_0)
    first = write_split(tmp_path / "split")
    assert resolve(tmp_path / "split") == first
    assert resolve(tmp_path / "split", FIRST) == first
    assert len({tensor.path for tensor in Header.read(first).tensors.values()}) == 3
    assert GGUFWeights(first).files == tuple(sorted(first.parent.glob("*.gguf")))
    scores = []
    with only_runner("torch"):
        for name in (whole, first, tmp_path / "split"):
            model = load_model(name, "float32")
            scores.append(model.score([model.open([3, 4, 5])], [Draft.empty()])[0].logits)
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[0], scores[2])


@pytest.mark.parametrize("name", ["model-Q4_0", "Q4_0/model-Q4_0"])
def test_a_tag_of_the_hub_downloads_all_parts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / Path(name).parent
    first = write_split(folder, Path(name).name)
    write_split(tmp_path, "model-Q8_0")
    asked: list[str] = []

    def snapshot_download(hub_id: str, allow_patterns: list[str]) -> str:
        names = [file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.gguf")]
        asked[:] = huggingface_hub.utils.filter_repo_objects(names, allow_patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("org/name:Q4_0") == first
    assert len(asked) == 3 and all("Q4_0" in file for file in asked)
    assert resolve("org/name", first.relative_to(tmp_path).as_posix()) == first
    assert len(asked) == 3


def change(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def test_parts_that_are_missing_or_of_another_model_are_refused(tmp_path: Path) -> None:
    first = write_split(tmp_path / "a")
    second = first.with_name("model-00002-of-00003.gguf")
    with pytest.raises(ModelLoadError, match=f"not the first of the 3 parts.*{FIRST}"):
        Header.read(second)
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(ModelLoadError, match=r"00002-of-00003\.gguf is not beside it"):
        Header.read(first)
    second.write_bytes(first.with_name("model-00003-of-00003.gguf").read_bytes())
    with pytest.raises(ModelLoadError, match="it is not part 2"):
        Header.read(first)
    second.write_bytes(content[:-40])
    with pytest.raises(ModelLoadError, match="damaged or truncated"):
        Header.read(first)
    second.write_bytes(content)
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(ModelLoadError, match="one of 3 parts; expected a name like"):
        Header.read(renamed)
    change(first, b"blk.0.attn_q.weight", b"blk.0.attn_Q.weight")
    Header.read(first)  # the name is unknown, but no part has it twice


def test_wrong_counts_are_refused(tmp_path: Path) -> None:
    def write(count: Any, total: int) -> Path:
        file = tmp_path / FIRST
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_uint16("split.no", 0)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", total)
        finish(writer)
        return file

    with pytest.raises(ModelLoadError, match=r"split\.count is 60000"):
        Header.read(write(60000, 0))
    first = write_split(tmp_path / "b")
    total = len(Header.read(first).tensors)
    change(
        first,
        b"split.tensors.count\x05\x00\x00\x00" + total.to_bytes(4, "little"),
        b"split.tensors.count\x05\x00\x00\x00\x01\x00\x00\x00",
    )
    with pytest.raises(ModelLoadError, match=f"have {total} tensors, and it claims 1"):
        Header.read(first)

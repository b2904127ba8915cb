"""Folders of quantized checkpoints: compressed-tensors reads the same numbers, and our loader the same model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from tests.models.gguf_files import tiny_checkpoint
from tests.models.heads import tiny as heads
from tests.models.seq2seq.tiny import save as save_seq2seq
from tests.models.tiny import ARCHITECTURES, only_runner
from torch import Tensor
from transformers import AutoModelForCausalLM

from foretoken import zoo
from foretoken.core.draft import Draft
from foretoken.models.families.experts import EXPERT_FAMILIES
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.formats.prequantized import unpacked
from foretoken.models.formats.quantize import quantize
from foretoken.models.heads.eagle import read_eagle
from foretoken.models.heads.medusa import read_medusa
from foretoken.models.loading import load_model
from foretoken.quantize import folder, quantize_checkpoint
from foretoken.quantize.rounding import Rounding, Scheme

pytestmark = pytest.mark.slow

IDS = [3 + (17 * at) % 90 for at in range(40)]
INT4 = ("int4", "int4-g64", "int4-g128")


def logits(path: Path, **options: Any) -> Tensor:
    model = load_model(path, dtype="float32", **options)
    return model.score([model.open(IDS)], [Draft.chain([5, 6])])[0].logits


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint whose matrices are multiples of 128 wide."""
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint("qwen3").save_pretrained(path)
    return path


@pytest.mark.parametrize("scheme", INT4)
def test_compressed_tensors_reads_the_same_numbers(scheme: str, llama: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama, tmp_path / "q", scheme, lm_head=True)
    config = load_config(tmp_path / "q")
    parsed = QuantizationConfig.model_validate(config["quantization_config"])
    stored, original = load_file(tmp_path / "q" / "model.safetensors"), load_file(llama / "model.safetensors")
    ours = unpacked(open_weights(tmp_path / "q"), config)
    assert set(ours) == set(original)
    for name, tensor in original.items():
        stem = name.removesuffix(".weight")
        if f"{stem}.weight_packed" not in stored:
            assert torch.equal(ours[name], tensor)
            assert tensor.ndim == 1 or "embed_tokens" in name
            continue
        parts = {k: stored[f"{stem}.{k}"] for k in ("weight_packed", "weight_scale", "weight_shape")}
        theirs = PackedQuantizationCompressor.decompress(parts, parsed.config_groups["group_0"])["weight"]
        assert torch.equal(theirs, ours[name])
        assert (theirs - tensor).square().mean() < 0.02 * tensor.square().mean()


@pytest.mark.parametrize("runner", ["torch", "compiled"])
@pytest.mark.parametrize("scheme", [*INT4, "int8"])
def test_logits_equal_those_of_quantizing_on_loading(scheme, runner, llama, tmp_path, monkeypatch):
    """Without a search for scales, which loading does not make."""
    monkeypatch.setattr(folder, "symmetric_scales", by_largest)
    quantize_checkpoint(llama, tmp_path / "q", scheme, lm_head=True)
    with only_runner(runner):
        assert torch.equal(logits(tmp_path / "q"), logits(llama, quantization=scheme))


def by_largest(x: Tensor, low: int, importance: Tensor) -> Tensor:
    return x.gather(-1, x.abs().argmax(-1, keepdim=True))[..., 0] / low


@pytest.mark.parametrize("scheme", ["int4-g64", "int8"])
def test_transformers_loads_the_folder(scheme: str, llama: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama, tmp_path / "q", scheme)
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = module(torch.tensor([[*IDS, 5, 6]])).logits[0, -3:]
    with only_runner("torch"):
        ours = logits(tmp_path / "q")
    near = 1e-3 if scheme == "int4-g64" else 0.05  # its int8 activations have one code more
    assert (ours - theirs).abs().max() < near * theirs.abs().max()


def choose_all_experts(folder: Path) -> None:
    """Has every row take all routed experts: rounding changes which of nearly equal ones are chosen, and then all."""
    config = json.loads((folder / "config.json").read_text())
    if "n_routed_experts" in config:
        config |= {"num_experts_per_tok": config["n_routed_experts"], "topk_group": config.get("n_group") or 1}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", [name for name, tiny in ARCHITECTURES.items() if tiny.native and tiny.torch])
def test_every_family_is_written_and_read(family: str, tmp_path: Path) -> None:
    source = ARCHITECTURES[family].save(tmp_path / "source")
    choose_all_experts(source)
    quantize_checkpoint(source, tmp_path / "int4", "int4")
    config = load_config(tmp_path / "int4")
    tensors = unpacked(open_weights(tmp_path / "int4"), config)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({name: tensors[name].contiguous() for name in tensors}, plain / "model.safetensors")
    (plain / "config.json").write_text((source / "config.json").read_text())
    with only_runner("torch"):
        assert torch.equal(logits(tmp_path / "int4"), logits(plain))
    exact = logits(source)
    for scheme in ("int8", "bfloat16"):
        quantize_checkpoint(source, tmp_path / scheme, scheme)
        assert (logits(tmp_path / scheme) - exact).abs().max() < 0.1 * exact.abs().max()


def test_routers_stay_as_they_are(tmp_path: Path) -> None:
    writer, router = folder.FolderWriter(tmp_path, {}, Scheme.of("int8")), torch.randn(8, 64)
    for family in EXPERT_FAMILIES.values():
        assert writer.put(f"model.layers.1.{family.experts.names.router}.weight", router, Rounding()) is router


def test_matrices_that_groups_do_not_divide_stay_as_they_are(tmp_path: Path) -> None:
    source = ARCHITECTURES["qwen3"].save(tmp_path / "source")  # its MLPs have 48 neurons
    quantize_checkpoint(source, tmp_path / "q", "int4-g32")
    left = load_config(tmp_path / "q")["quantization_config"]["ignore"]
    assert left == sorted(["lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(2))])


def test_encoder_decoders_are_quantized(tmp_path: Path) -> None:
    save_seq2seq("t5", tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "q", "int8")
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert stored["encoder.block.0.layer.0.SelfAttention.q.weight"].dtype == torch.int8
    assert stored["shared.weight"].is_floating_point()
    load_model(tmp_path / "q", dtype="float32")


def test_large_checkpoints_are_written_in_shards(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_checkpoint(llama, tmp_path / "whole", "int4")
    monkeypatch.setattr(folder, "SHARD", 200_000)
    quantize_checkpoint(llama, tmp_path / "parts", "int4")
    shards = sorted(file.name for file in (tmp_path / "parts").glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert set(index["weight_map"]) == set(whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert torch.equal(logits(tmp_path / "parts"), logits(tmp_path / "whole"))


def test_tokenizer_template_and_settings_come_along(tmp_path: Path) -> None:
    source = zoo.path("draft")
    quantize_checkpoint(source, tmp_path / "q", "int4-g64")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "q" / name).read_bytes() == (source / name).read_bytes()
    config = load_config(tmp_path / "q")
    assert {k: v for k, v in config.items() if k != "quantization_config"} == load_config(source)


def test_eagle_and_medusa_heads_are_quantized(tmp_path: Path) -> None:
    eagle = heads.save(tmp_path / "eagle", *heads.eagle3())
    quantize_checkpoint(eagle, tmp_path / "q", "int4")
    before, after = read_eagle(eagle), read_eagle(tmp_path / "q")
    assert before.tensors.keys() == after.tensors.keys()
    for name, tensor in before.tensors.items():
        exact = tensor.ndim == 1 or name == "lm_head.weight" or "embed" in name
        same = torch.equal(after.tensors[name].float(), tensor.float())
        assert same == exact or tensor.shape[-1] % 32, name
    medusa = heads.save(tmp_path / "medusa", *heads.medusa())
    quantize_checkpoint(medusa, tmp_path / "m", "int4")
    assert read_medusa(tmp_path / "m").depth == read_medusa(medusa).depth


def test_int8_is_that_of_loading() -> None:
    writer = folder.FolderWriter(Path(), {}, Scheme.of("int8"))
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    values = writer.put("model.layers.0.mlp.up_proj.weight", weight, Rounding())
    assert torch.equal(values, quantize(weight).dequantize())

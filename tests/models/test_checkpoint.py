"""Checkpoints that are whole, sharded, missing, truncated or pickled; and what ``auto`` chooses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.core.draft import Draft
from foretoken.core.errors import ForetokenError, InvalidRequest, ModelLoadError
from foretoken.models.checkpoint import (
    load_config,
    load_model,
    load_tokenizer,
    open_weights,
    resolve,
    resolve_device,
    resolve_dtype,
)
from foretoken.models.decoder import Decoder
from foretoken.models.hf import HFModel

from .tiny import ARCHITECTURES, Tiny

BACKENDS = ["native", "hf"]
CPU = torch.device("cpu")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return ARCHITECTURES["llama"].save(tmp_path / "llama")


def one_line(error: pytest.ExceptionInfo[ForetokenError]) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


def load(path: Path, backend: str = "native") -> None:
    load_model(path, "float32", "cpu", backend)


def test_auto_takes_the_native_decoder_where_it_fits(llama: Path, tmp_path: Path) -> None:
    assert isinstance(load_model(llama, "float32", "cpu"), Decoder)
    assert isinstance(load_model(str(llama), "float32", "cpu", "hf"), HFModel)
    gpt2 = ARCHITECTURES["gpt2"].save(tmp_path / "gpt2")
    assert isinstance(load_model(gpt2, "float32", "cpu"), HFModel)
    with pytest.raises(ModelLoadError, match=r"gpt2.*backend='hf'"):
        load(gpt2)
    with pytest.raises(InvalidRequest, match="backend"):
        load(gpt2, "fast")


def test_dtype_and_length_are_taken(llama: Path) -> None:
    for backend in BACKENDS:
        model = load_model(llama, "bfloat16", "cpu", backend, max_length=40)
        assert (model.dtype, model.max_length, model.vocab_size) == (torch.bfloat16, 40, 101)
        handle = model.open([5, 6, 7])
        assert model.score([handle], [Draft.empty()])[0].logits.shape == (1, 101)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sharded_equals_single(llama: Path, tmp_path: Path, backend: str) -> None:
    sharded = tmp_path / "sharded"
    ARCHITECTURES["llama"].build().save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    weights, single = open_weights(sharded), open_weights(llama)
    assert set(weights) == set(single) and len(weights) == len(single)
    assert all(torch.equal(weights[name], single[name]) for name in single)
    rows = []
    for path in (llama, sharded):
        model = load_model(path, "float32", "cpu", backend)
        rows.append(model.score([model.open([4, 5, 6])], [Draft.empty()])[0].logits)
    if backend == "hf":  # its products may round by where a file was mapped; the weights were equal bit by bit
        torch.testing.assert_close(*rows)
    else:
        assert torch.equal(*rows)


def test_weights_are_a_lazy_mapping(llama: Path) -> None:
    weights = open_weights(llama)
    assert "model.norm.weight" in weights and "nope" not in weights
    assert weights["model.norm.weight"].shape == (64,)
    with pytest.raises(KeyError):
        weights["nope"]


def test_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("no-such-model-here", "someone/no-such-model", "./missing", str(tmp_path / "missing"), "a b!", ""):
        with pytest.raises(ModelLoadError) as error:
            resolve(name)
        assert name in one_line(error)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve(file)
    assert resolve(str(tmp_path)) == tmp_path


def test_broken_configs(llama: Path) -> None:
    (llama / "config.json").write_text("{not json")
    with pytest.raises(ModelLoadError, match="JSON") as error:
        load(llama)
    one_line(error)
    (llama / "config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match="expected an object"):
        load_config(llama)
    (llama / "config.json").unlink()
    with pytest.raises(ModelLoadError, match="does not exist"):
        load(llama)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_weights(llama: Path, backend: str) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="has no weights"):
        load(llama, backend)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "weights.pt"])
def test_pickles_are_refused_with_the_way_to_convert(llama: Path, name: str) -> None:
    (llama / "model.safetensors").unlink()
    (llama / name).write_bytes(b"\x80\x04")
    for backend in BACKENDS:
        with pytest.raises(ModelLoadError, match="pickle") as error:
            load(llama, backend)
        assert name in one_line(error) and "save_pretrained" in one_line(error)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [0, 4, 500, -100])
def test_truncated_weights(llama: Path, backend: str, size: int) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match="truncated") as error:
        load(llama, backend)
    one_line(error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_missing_tensor(llama: Path, backend: str) -> None:
    file = llama / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="lacks") as error:
        load(llama, backend)
    assert "up_proj" in one_line(error)


def test_broken_shards(tmp_path: Path) -> None:
    ARCHITECTURES["llama"].build().save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    parsed = json.loads(index.read_text())
    parsed["weight_map"]["extra.weight"] = next(iter(parsed["weight_map"].values()))
    index.write_text(json.dumps(parsed))
    with pytest.raises(ModelLoadError, match="extra"):
        open_weights(tmp_path)
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(ModelLoadError, match="shards"):
        open_weights(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelLoadError, match="own folder"):
        open_weights(tmp_path)


def test_remote_code_is_not_run(llama: Path) -> None:
    config = load_config(llama)
    config |= {"model_type": "mystery", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (llama / "config.json").write_text(json.dumps(config))
    (llama / "code.py").write_text("raise SystemExit('this must never run')")
    with pytest.raises(ModelLoadError) as error:
        load_model(llama, "float32", "cpu")
    one_line(error)


@pytest.mark.parametrize(
    ("tiny", "reason"),
    [
        (Tiny("Falcon", {**ARCHITECTURES["falcon"].config, "alibi": True}), "ALiBi"),
        (Tiny("Bloom", {"vocab_size": 101, "hidden_size": 32, "n_layer": 1, "n_head": 4}), "ALiBi"),
        (Tiny("Mamba", {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}), "rewound"),
        (
            Tiny(
                "GPTNeo",
                {
                    "vocab_size": 101,
                    "hidden_size": 32,
                    "num_layers": 2,
                    "num_heads": 4,
                    "attention_types": [[["global", "local"], 1]],
                    "window_size": 3,
                    "max_position_embeddings": 64,
                    "initializer_range": 0.2,
                },
            ),
            "GPTNeoForCausalLM",
        ),
    ],
    ids=lambda p: p if isinstance(p, str) else p.family,
)
def test_models_that_cannot_be_speculated_on_are_refused(tiny: Tiny, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=reason) as error:
        load_model(tiny.save(tmp_path / "model"), "float32", "cpu")
    one_line(error)


def test_tokenizers(llama: Path) -> None:
    with pytest.raises(ModelLoadError, match="no tokenizer") as error:
        load_tokenizer(llama)
    one_line(error)


def test_dtypes_and_devices() -> None:
    assert resolve_dtype("bfloat16", CPU) == resolve_dtype(torch.bfloat16, CPU) == torch.bfloat16
    assert resolve_dtype("half", CPU) == torch.float16
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert resolve_dtype("auto", CPU) == (torch.bfloat16 if fast else torch.float32)
    for wrong in ("int3", torch.int64):
        with pytest.raises(InvalidRequest, match="dtype"):
            resolve_dtype(wrong, CPU)
    assert resolve_device("cpu") == CPU
    assert resolve_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(InvalidRequest, match="device"):
        resolve_device("abacus")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidRequest, match="CUDA"):
            resolve_device("cuda")

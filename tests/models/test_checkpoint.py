"""Checkpoints that are whole, sharded, missing, truncated or pickled; the choices of ``auto``."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from foretoken.core.draft import Draft
from foretoken.core.errors import ForetokenError, InvalidRequest, ModelLoadError
from foretoken.models import loading
from foretoken.models.decoder import Decoder
from foretoken.models.formats.checkpoint import load_config, load_tokenizer, open_weights, resolve
from foretoken.models.formats.weight_files import SafetensorsFile
from foretoken.models.heads.eagle import read_eagle
from foretoken.models.heads.medusa import read_blockwise, read_medusa
from foretoken.models.hf.model import HFModel
from foretoken.models.loading import load_model, resolve_device, resolve_dtype

from .families import tiny as tiny_module
from .heads import tiny as heads
from .seq2seq import tiny as seq2seq
from .tiny import ARCHITECTURES, Tiny, only_runner

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


def plant(path: Path, name: str, value: float) -> None:
    """Put one such number into a tensor on disk."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})


def test_auto_uses_the_native_decoder_if_supported(llama: Path, tmp_path: Path) -> None:
    assert isinstance(load_model(llama, "float32", "cpu"), Decoder)
    assert isinstance(load_model(str(llama), "float32", "cpu", "hf"), HFModel)
    other = tmp_path / "other"
    tiny_module("xglm").save_pretrained(other)
    assert isinstance(load_model(other, "float32", "cpu"), HFModel)
    with pytest.raises(ModelLoadError, match=r"model_type 'xglm'.*backend='hf'"):
        load(other)
    with pytest.raises(InvalidRequest, match="backend"):
        load(other, "fast")


def test_dtype_and_maximum_length_are_respected(llama: Path) -> None:
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
    if backend == "hf":  # its products may round by the address of a mapping; the weights were bitwise equal
        torch.testing.assert_close(*rows)
    else:
        assert torch.equal(*rows)


def test_weights_are_a_lazy_mapping(llama: Path) -> None:
    weights = open_weights(llama)
    assert "model.norm.weight" in weights and "nope" not in weights
    assert weights["model.norm.weight"].shape == (64,)
    with pytest.raises(KeyError):
        weights["nope"]


def test_unknown_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_broken_configs_are_refused(llama: Path) -> None:
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
def test_a_folder_without_weights_is_refused(llama: Path, backend: str) -> None:
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
def test_truncated_weights_are_refused(llama: Path, backend: str, size: int) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match="truncated") as error:
        load(llama, backend)
    one_line(error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_tensor_is_named(llama: Path, backend: str) -> None:
    file = llama / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="lacks") as error:
        load(llama, backend)
    assert "up_proj" in one_line(error)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_weight_that_is_not_finite_is_named(llama: Path, backend: str, value: float, name: str) -> None:
    plant(llama, name, value)
    with pytest.raises(ModelLoadError, match="NaN or infinite") as error:
        load(llama, backend)
    assert name in one_line(error)


def test_a_weight_that_is_not_finite_is_named_in_every_kind_of_checkpoint(tmp_path: Path) -> None:
    def refused(read: Callable[[Path], object], path: Path, name: str) -> None:
        plant(path, name, float("nan"))
        with pytest.raises(ModelLoadError, match="NaN or infinite") as error:
            read(path)
        assert name in one_line(error)

    seq2seq.save("t5", tmp_path / "t5")
    refused(load, tmp_path / "t5", "decoder.block.1.layer.2.DenseReluDense.wo.weight")
    refused(read_eagle, heads.save(tmp_path / "eagle3", *heads.eagle3()), "lm_head.weight")
    refused(read_medusa, heads.save(tmp_path / "medusa", *heads.medusa()), "blocks.2.layers.0.bias")
    refused(read_blockwise, heads.save(tmp_path / "blockwise", *heads.blockwise()), "heads.1.up.weight")


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_beyond_float16_are_named(llama: Path, backend: str) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    plant(llama, name, 1e5)
    load(llama, backend)
    with pytest.raises(ModelLoadError, match="float16") as error:
        load_model(llama, "float16", "cpu", backend)
    assert name in one_line(error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8])
def test_finite_weights_of_any_type_and_size_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    largest = torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max
    tensors = {"large": torch.full((40, 40), largest, dtype=dtype), "empty": torch.empty(0, 3, dtype=dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    assert weights["large"].dtype == dtype and weights["empty"].shape == (0, 3)


def test_broken_shards_are_refused(tmp_path: Path) -> None:
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
        load_model(tiny.save(tmp_path / "model"), "float32", "cpu", "hf")
    one_line(error)


def test_tokenizers_load_or_are_refused(llama: Path) -> None:
    with pytest.raises(ModelLoadError, match="no tokenizer") as error:
        load_tokenizer(llama)
    one_line(error)


def test_dtypes_are_named_or_chosen_by_the_cpu() -> None:
    assert resolve_dtype("bfloat16", CPU) == resolve_dtype(torch.bfloat16, CPU) == torch.bfloat16
    assert resolve_dtype("half", CPU) == torch.float16
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert resolve_dtype("auto", CPU) == (torch.bfloat16 if fast else torch.float32)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kernels", [True, False])
def test_compiled_kernels_take_bfloat16_on_every_cpu(compiled, kernels, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(loading, "kernels_available", lambda: kernels)
    expected = torch.bfloat16 if compiled and kernels else torch.float32
    assert resolve_dtype("auto", CPU, compiled) == expected


@pytest.mark.parametrize("wrong", ["int3", torch.int64], ids=str)
def test_other_dtypes_are_refused(wrong: str | torch.dtype) -> None:
    with pytest.raises(InvalidRequest, match="dtype"):
        resolve_dtype(wrong, CPU)


def test_the_device_is_a_gpu_where_there_is_one() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_other_devices_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="device"):
        resolve_device("abacus")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(InvalidRequest, match="CUDA"):
        resolve_device("cuda")


@pytest.mark.parametrize("runner", ["torch", "compiled"])
def test_a_long_maximum_length_takes_no_memory(llama: Path, runner: str) -> None:
    config = load_config(llama) | {"max_position_embeddings": 2**31 - 1}
    (llama / "config.json").write_text(json.dumps(config))
    with only_runner(runner):
        model = load_model(llama, "float32", "cpu")
        logits = model.score([model.open([4, 5, 6])], [Draft.empty()])[0].logits
    assert model.max_length == 2**31 - 1 and logits.isfinite().all()


def test_folders_without_a_model_are_named_in_whole_sentences(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError) as error:
        load_tokenizer(tmp_path / "empty")
    assert one_line(error) == (
        f"{tmp_path / 'empty'} is no checkpoint: it has neither config.json nor a tokenizer; expected the folder of a "
        "model or a *.gguf file"
    )
    with pytest.raises(ModelLoadError) as error:
        load_tokenizer(llama)  # without a tokenizer
    assert f"no tokenizer loads from {llama}; expected tokenizer.json" in one_line(error)
    assert not one_line(error).rstrip(".").endswith(("of:", ":", ","))


MAPS = Path("/proc/self/maps")
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.complex64),
)
SHAPES = ((), (3,), (0, 4), (7, 5, 2), (90, 100))


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    """Those of one byte begin anywhere; some tensors are empty, and some are larger than a page."""
    file, generator = tmp_path / "model.safetensors", torch.Generator().manual_seed(1)
    tensors = {
        f"{dtype} {shape}": torch.randint(0, 2, shape, generator=generator).to(dtype)
        for dtype in DTYPES
        for shape in SHAPES
    }
    save_file(tensors, file, metadata={"format": "pt"})
    stored, expected = SafetensorsFile(file), load_file(file)
    assert stored.tensors.keys() == tensors.keys()
    for name, tensor in expected.items():
        read = stored.read(name)
        assert stored.tensors[name].shape == read.shape == tensor.shape
        assert read.dtype == tensor.dtype and torch.equal(read, tensor), name


def test_a_mapping_ends_with_its_tensor_and_changes_no_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(5000), "b": torch.ones(5000)}, file)
    stored = SafetensorsFile(file)
    tensor = stored.read("a")
    tensor += 3
    assert torch.equal(stored.read("a"), torch.zeros(5000))
    if MAPS.exists():
        assert str(file) in MAPS.read_text()
        del tensor
        assert str(file) not in MAPS.read_text()


@pytest.mark.parametrize("kept", [0, 7, 40, -1])
def test_a_file_that_ends_early_is_refused(kept: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(50)}, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(SafetensorError):
        SafetensorsFile(file)

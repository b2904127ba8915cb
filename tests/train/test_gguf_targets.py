"""GGUF files as targets of training, widening and conversion: a bfloat16 copy in the cache takes their place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import Pair
from tests.models.heads import tiny

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ModelLoadError
from foretoken.models.formats.checkpoint import open_weights
from foretoken.quantize import quantize_checkpoint
from foretoken.quantize.run import checkpoint_folder

from .test_cli import RUN, invoke

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


@pytest.fixture
def file(tiny_pair: Pair, tmp_path: Path) -> Path:
    quantize_checkpoint(tiny_pair.target, tmp_path / "target.gguf", "Q8_0")
    return tmp_path / "target.gguf"


def test_the_copy_holds_the_file_s_weights_and_is_written_once(file: Path, own_cache: Path) -> None:
    folder = checkpoint_folder(file)
    assert folder.name == "target" and folder.is_relative_to(own_cache) and checkpoint_folder(folder) == folder
    stored, written = open_weights(file), load_file(folder / "model.safetensors")
    assert set(written) == set(stored)
    assert all(torch.equal(written[name], stored[name].bfloat16()) for name in written)
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert checkpoint_folder(file) == folder and times == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    file.write_bytes(file.read_bytes() + b"\0")
    assert checkpoint_folder(file) != folder


def test_heads_and_drafts_are_trained_for_a_file(file: Path, texts: Path, tmp_path: Path) -> None:
    data = ["--data", texts, "--windows", "4", "--held-out", "2", "--device", "cpu", "--no-compile"]
    short = ["--steps", "2", "--batch", "2", "--window", "24"]
    invoke("train", "medusa", tmp_path / "medusa", "--model", file, *data, "--heads", "2", *short)
    invoke("train", "draft", tmp_path / "draft", file, "--corpus", texts, *RUN, "--device", "cpu")
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, speculative_tokens=2)
    alone = LLM(file, speculative_config={"method": "none"}, dtype="float32")
    plain = alone.generate("def f1", params)[0].outputs[0].token_ids
    for name in ("medusa", "draft"):
        output = LLM(file, tmp_path / name, dtype="float32").generate("def f1", params)[0].outputs[0]
        assert output.token_ids == plain and output.stats.drafted > 0


def test_a_file_is_widened_with_its_heads(file: Path, tmp_path: Path) -> None:
    sizes = ["--hidden", "128", "--intermediate", "96", "--layers", "3", "--heads", "8", "--kv-heads", "2"]
    head = tiny.save(tmp_path / "head", *tiny.blockwise())
    invoke("widen", file, tmp_path / "wide", *sizes, "--head", head)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    narrow, wide = (
        LLM(path, dtype="float32").generate("def f1", params)[0].outputs[0].token_ids
        for path in (checkpoint_folder(file), tmp_path / "wide")
    )
    assert narrow == wide
    assert (tmp_path / "wide" / "heads" / "blockwise" / "model.safetensors").exists()


def test_heads_are_converted_for_a_file(file: Path, tiny_pair: Any, tmp_path: Path) -> None:
    vocab = open_weights(file)["model.embed_tokens.weight"].shape[0]
    source = tiny.save(tmp_path / "head", *tiny.medusa(vocab=vocab))
    invoke("convert", source, tmp_path / "out", "--to", "medusa", "--target", file)
    head = load_file(tmp_path / "out" / "model.safetensors")["2.1.weight"]
    assert torch.equal(head, open_weights(file)["model.embed_tokens.weight"].to(head.dtype))


def test_a_damaged_file_is_named(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"bad\.gguf is damaged or truncated"):
        invoke("train", "medusa", tmp_path / "out", "--model", tmp_path / "bad.gguf", "--data", texts)
    assert not (tmp_path / "out").exists()

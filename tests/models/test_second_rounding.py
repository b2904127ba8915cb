"""Weights that are quantized already are not rounded again without a word."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from foretoken import LLM
from foretoken.core.errors import InvalidRequest
from foretoken.models.loading import load_model

from .gguf_files import K, tiny_checkpoint, write_both
from .test_packed import save_packed
from .test_quantize import COMPRESSED, TORCHAO, store
from .tiny import ARCHITECTURES

WARNING = "is quantized already, and quantization="


def warnings(caplog: pytest.LogCaptureFixture, path: Path, quantization: str | None) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "foretoken"):
        load_model(path, "float32", "cpu", quantization=quantization)
    return [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]


@pytest.mark.parametrize("kind", [K.Q4_1, K.Q8_0, K.Q4_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("quantization", ["int8", "int4", "int4-g64"])
def test_a_quantized_file_is_rounded_again_with_a_warning(
    kind: K, quantization: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, folder = write_both(tiny_checkpoint("llama", num_hidden_layers=1), "llama", tmp_path, kind)
    (said,) = warnings(caplog, file, quantization)
    assert str(file) in said and repr(quantization) in said and "leave it out" in said
    assert warnings(caplog, file, quantization) == []  # once for each checkpoint
    assert warnings(caplog, file, None) == warnings(caplog, folder, quantization) == []


@pytest.mark.parametrize("kind", [K.F16, K.BF16, K.F32], ids=lambda kind: kind.name)
def test_a_file_of_floats_is_rounded_once(kind: K, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, _ = write_both(tiny_checkpoint("llama", num_hidden_layers=1), "llama", tmp_path, kind)
    assert warnings(caplog, file, "int4") == []


@pytest.mark.parametrize("layout", ["awq", "gptq", "gptq 8 bits", "compressed w4 32 symmetric"])
def test_packed_folders_are_rounded_again_with_a_warning(
    layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_packed(layout, tmp_path / "dense", tmp_path / "packed", num_hidden_layers=1)
    assert len(warnings(caplog, tmp_path / "packed", "int8")) == 1
    assert warnings(caplog, tmp_path / "dense", "int8") == []


@pytest.mark.parametrize("settings", [COMPRESSED, TORCHAO], ids=["compressed-tensors", "torchao"])
def test_int8_stays_int8(settings: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = ARCHITECTURES["llama"].save(tmp_path / "llama")
    store(path, settings)
    assert warnings(caplog, path, "int8") == []
    with pytest.raises(InvalidRequest, match="is int8 already, so quantization='int4' would change nothing"):
        load_model(path, "float32", "cpu", quantization="int4")


def test_experts_of_four_bits_are_rounded_again_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, _ = write_both(tiny_checkpoint("gpt-oss"), "gpt-oss", tmp_path, K.MXFP4)
    assert len(warnings(caplog, file, "int8")) == 1


@pytest.mark.real
def test_a_real_file_is_rounded_again_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    from tests.real import real_model

    with caplog.at_level(logging.WARNING, "foretoken"):
        LLM(real_model("smollm2"), quantization="int4")
    assert any(WARNING in record.getMessage() for record in caplog.records)

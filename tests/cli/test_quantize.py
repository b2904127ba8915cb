"""``foretoken quantize``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.models.heads import tiny

from foretoken import zoo
from foretoken.models.formats.checkpoint import load_config, load_tokenizer
from foretoken.models.loading import load_model

DRAFT = str(zoo.path("draft"))


@pytest.mark.slow
def test_a_folder_and_a_file_are_written(run, tmp_path):
    result = run("quantize", DRAFT, str(tmp_path / "q"), "--scheme", "int4-g64")
    assert result.code == 0
    assert "int4-g64, 1.9 MB -> " in result.out and "loss" not in result.out
    assert load_config(tmp_path / "q")["quantization_config"]["format"] == "pack-quantized"
    load_model(tmp_path / "q")
    result = run("quantize", DRAFT, str(tmp_path / "q.gguf"), "--scheme", "q8_0", "--json")
    record = json.loads(result.out)
    assert record["scheme"] == "Q8_0" and record["bytes_after"] == (tmp_path / "q.gguf").stat().st_size
    assert record["loss_before"] is None and record["seconds"] > 0
    assert load_tokenizer(tmp_path / "q.gguf").encode("def f") == load_tokenizer(DRAFT).encode("def f")
    assert run("quantize", str(tmp_path / "q.gguf"), str(tmp_path / "f"), "--scheme", "bfloat16").code == 0
    load_model(tmp_path / "f")


@pytest.mark.slow
def test_text_from_a_file_or_standard_input_tells_the_loss(run, tmp_path):
    text = Path(zoo.__file__).read_text(encoding="utf-8") * 3
    (tmp_path / "text").write_text(text, encoding="utf-8")
    records = []
    for name, stdin in ((str(tmp_path / "text"), ""), ("-", text)):
        args = ("--scheme", "int4", "--calibration", name, "--json", "--force")
        result = run("quantize", DRAFT, str(tmp_path / "q"), *args, stdin=stdin)
        assert result.code == 0, result.err
        records.append(json.loads(result.out))
    assert records[0]["loss_after"] == records[1]["loss_after"]
    assert 0 < records[0]["loss_before"] < records[0]["loss_after"] < records[0]["loss_before"] + 0.5
    assert records[0]["loss_tokens"] > 0


@pytest.mark.slow
def test_refusals_are_one_line_and_leave_nothing(run, tmp_path):
    tiny.save(tmp_path / "there", {"model_type": "llama"}, {"x": torch.zeros(1)})
    (tmp_path / "file.gguf").write_bytes(b"x")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    q, gguf = str(tmp_path / "q"), str(tmp_path / "q.gguf")
    assert run("quantize", DRAFT, str(tmp_path / "int4"), "--scheme", "int4").code == 0
    for args, message in {
        (DRAFT, q, "--scheme", "int3"): "known: int8, int4",
        (DRAFT, q, "--scheme", "Q4_0"): "ends with .gguf",
        (DRAFT, gguf, "--scheme", "int4"): "a folder",
        (DRAFT, DRAFT, "--scheme", "int4", "--force"): "the same",
        (DRAFT, str(tmp_path / "there"), "--scheme", "int4"): "--force",
        (DRAFT, str(tmp_path / "file.gguf"), "--scheme", "Q4_0"): "--force",
        (str(tmp_path / "none"), q, "--scheme", "int4"): "there is no folder",
        (str(tmp_path / "int4"), q, "--scheme", "int4"): "quantized already",
        (str(tmp_path / "file.gguf"), q, "--scheme", "bfloat16"): "damaged",
        (str(zoo.path("eagle3")), gguf, "--scheme", "Q4_0"): "drafting heads",
        (DRAFT, q, "--scheme", "int4", "--calibration", str(tmp_path / "none")): "cannot read the calibration text",
        (DRAFT, q, "--scheme", "int4", "--calibration", str(tmp_path / "bytes")): "expected a text file in UTF-8",
    }.items():
        result = run("quantize", *args)
        assert (result.code, result.out) == (1, ""), args
        assert message in result.err and result.err.count("\n") == 1, result.err
        assert not Path(q).exists() and not Path(gguf).exists()
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize("scheme", ["int4", "Q4_0"])
def test_an_interrupted_run_leaves_what_was_there(run, tmp_path, monkeypatch, scheme):
    name = "q.gguf" if scheme == "Q4_0" else "q"
    assert run("quantize", DRAFT, str(tmp_path / name), "--scheme", scheme).code == 0
    before = sorted(file.name for file in tmp_path.rglob("*"))

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("foretoken.quantize.run.give_back", interrupt)
    assert run("quantize", DRAFT, str(tmp_path / name), "--scheme", scheme, "--force").code == 130
    assert sorted(file.name for file in tmp_path.rglob("*")) == before

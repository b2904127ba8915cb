"""Commands that write files: ``convert``, ``widen`` with heads, ``quantize`` and ``build-datastore``."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.models.heads import blocks, tiny

from foretoken import zoo
from foretoken.models.formats.checkpoint import load_config, load_tokenizer
from foretoken.models.heads.files import ends_of
from foretoken.models.loading import load_model
from foretoken.propose import retrieval as stores


def _tensors(folder):
    return load_file(folder / "model.safetensors")


def test_there_and_back(run, tmp_path):
    source = tiny.save(tmp_path / "a", *tiny.eagle3())
    assert run("convert", str(source), str(tmp_path / "b"), "--to", "speculators").code == 0
    result = run("convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "sglang").ok()
    assert result.out.endswith("tensors for sglang\n")
    before, after = _tensors(source), _tensors(tmp_path / "c")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert run("convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "vllm", "--force").code == 0


def test_a_shared_vocabulary_head_is_written_out(run, tiny_pair, tmp_path):
    embedding = _tensors(tiny_pair.target)["model.embed_tokens.weight"]
    source = tiny.save(tmp_path / "a", *tiny.medusa(vocab=embedding.shape[0]))
    run("convert", str(source), str(tmp_path / "b"), "--to", "medusa").refused("--target")
    assert not (tmp_path / "b").exists()
    run("convert", str(source), str(tmp_path / "b"), "--to", "medusa", "--target", str(tiny_pair.target)).ok()
    written = _tensors(tmp_path / "b")
    tied = json.loads((tiny_pair.target / "config.json").read_text())["tie_word_embeddings"]
    head = embedding if tied else _tensors(tiny_pair.target)["lm_head.weight"]
    assert torch.equal(written["2.1.weight"], head)


def test_block_drafters_change_their_layout(run, tiny_pair, tmp_path):
    embedding = _tensors(tiny_pair.target)["model.embed_tokens.weight"]
    source = tiny.save(tmp_path / "a", *blocks.dflash(vocab=embedding.shape[0]))
    run("convert", str(source), str(tmp_path / "b"), "--to", "speculators").refused("--target")
    there = ("--to", "speculators", "--target", str(tiny_pair.target))
    assert run("convert", str(source), str(tmp_path / "b"), *there).code == 0
    assert run("convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "vllm").code == 0
    before, after = _tensors(source), _tensors(tmp_path / "c")
    assert after.keys() - before.keys() == {"lm_head.weight"}
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert config["dflash_config"] == {"mask_token_id": 100, "target_layer_ids": [0, 1]}


def test_the_ends_of_multimodal_targets_are_found(run, tiny_pair, tmp_path):
    """Their language model's names have another prefix."""
    before = _tensors(tiny_pair.target)
    text = json.loads((tiny_pair.target / "config.json").read_text())
    tensors = {f"model.language_model.{name.removeprefix('model.')}": t for name, t in before.items()}
    config = {"model_type": "llava", "text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
    target = tiny.save(tmp_path / "target", config, tensors)
    embedding = before["model.embed_tokens.weight"]
    layer = {"mtp.fc.weight": torch.ones(64, 128)}
    source = tiny.save(tmp_path / "mtp", {"tie_word_embeddings": True}, layer)
    run("convert", str(source), str(tmp_path / "out"), "--to", "vllm", "--target", str(target)).ok()
    assert torch.equal(_tensors(tmp_path / "out")["model.embed_tokens.weight"], embedding)
    weights, name, _ = ends_of(target)
    assert torch.equal(weights[name], embedding)
    tiny.save(tmp_path / "none", config, layer)
    result = run("convert", str(source), str(tmp_path / "b"), "--to", "vllm", "--target", str(tmp_path / "none"))
    result.refused("has no embedding")


def test_refusals_are_one_line(run, tmp_path):
    source = tiny.save(tmp_path / "a", *tiny.blockwise())
    for args, message in {
        (str(source), str(tmp_path / "b"), "--to", "vllm"): "no other engine",
        (str(source), str(tmp_path / "b"), "--to", "onnx"): "sglang, vllm, speculators, medusa, original",
        (str(source), str(source), "--to", "vllm"): "same folder",
        (str(tmp_path / "none"), str(tmp_path / "b"), "--to", "vllm"): "does not exist",
    }.items():
        assert run("convert", *args).refused(message).err.count("\n") == 1
        assert not (tmp_path / "b").exists()


def test_a_model_is_no_heads(run, tiny_pair, tmp_path):
    for force in ((), ("--force",)):
        result = run("convert", str(tiny_pair.target), str(tmp_path / "b"), "--to", "vllm", *force)
        assert result.code == 1 and not (tmp_path / "b").exists()
        assert f"{tiny_pair.target} is a model, and convert writes EAGLE" in result.err
        assert "foretoken quantize" in result.err and "num_heads" not in result.err


def test_scale_up_takes_heads_along(run, tiny_pair, tmp_path):
    head = tiny.save(tmp_path / "head", *tiny.blockwise())
    sizes = ["--hidden", "128", "--intermediate", "96", "--layers", "3", "--heads", "8", "--kv-heads", "2"]
    run("widen", str(tiny_pair.target), str(tmp_path / "wide"), *sizes, "--head", str(head)).ok()
    assert _tensors(tmp_path / "wide" / "heads" / "blockwise")["heads.0.up.weight"].shape == (24, 128)


DRAFT = str(zoo.path("draft"))


@pytest.mark.slow
def test_a_folder_and_a_file_are_written(run, tmp_path):
    result = run("quantize", DRAFT, str(tmp_path / "q"), "--scheme", "int4-g64").ok()
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
        records.append(json.loads(run("quantize", DRAFT, str(tmp_path / "q"), *args, stdin=stdin).ok().out))
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
        assert run("quantize", *args).refused(message).err.count("\n") == 1
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


TEXT = "def greet(name):\n    return f'hello {name}, größe 5 €'\n\n" * 3


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.py").write_text(TEXT, encoding="utf-8")
    (folder / "sub" / "b.md").write_text("日本語 emoji 🙂\n", encoding="utf-8")
    (folder / "c.bin").write_bytes(b"\x00\xff")
    return folder


def build(run, pair, out, *data, extra=()):
    options = [part for path in data for part in ("--data", str(path))]
    return run("build-datastore", str(out), "--model", str(pair.target), *options, *extra)


def test_build_and_generate(run, pair, files, tmp_path, tokenizer):
    out = tmp_path / "store"
    facts = json.loads(build(run, pair, out, files, extra=("--json",)).ok().out)
    assert facts["tokens"] == len(tokenizer.encode(TEXT)) + len(tokenizer.encode("日本語 emoji 🙂\n"))
    assert facts["documents"] == 2
    config = json.dumps({"method": "retrieval", "model": str(out), "control": "fixed"})
    seeded = ("generate", "def greet(", "--model", str(pair.target), "--max-tokens", "12", "--dtype", "float32")
    seeded += ("--temperature", "1", "--seed", "3", "--json")
    plain = json.loads(run(*seeded, "--speculative-config", '{"method": "none"}').out)
    drafted = json.loads(run(*seeded, "--speculative-config", config).out)
    assert drafted["text"] == plain["text"]
    assert drafted["stats"]["drafts"] > 0


def test_the_bundled_target_is_the_default(run, pair, files, tmp_path):
    result = run("build-datastore", str(tmp_path / "store"), "--data", str(files / "a.py")).ok()
    assert "tokens of 1 file(s)" in result.out


def test_an_existing_datastore_is_replaced_and_other_folders_are_not(run, pair, files, tmp_path):
    out = tmp_path / "store"
    assert build(run, pair, out, files).code == 0
    refused = build(run, pair, out, files / "a.py")
    assert (refused.code, "--force" in refused.err) == (1, True)
    assert build(run, pair, out, files / "a.py", extra=("--force",)).code == 0
    for extra in ((), ("--force",)):
        refused = build(run, pair, files, tmp_path / "data" / "a.py", extra=extra)
        assert (refused.code, "contains" in refused.err) == (1, True)


@pytest.mark.parametrize("kind", ["missing", "no text files", "empty"])
def test_no_data(run, pair, tmp_path, kind):
    data, out = tmp_path / "data", tmp_path / "store"
    if kind != "missing":
        data.mkdir()
    if kind == "empty":
        (data / "a.txt").write_text("")
    result = build(run, pair, out, data)
    assert result.code == 1
    assert result.err.count("\n") == 1
    assert not out.exists()


def test_a_full_disk_leaves_nothing_behind(run, pair, files, tmp_path, monkeypatch):
    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stores.DatastoreWriter, "_flush", full)
    error = build(run, pair, tmp_path / "store", files).refused("No space left on device").err
    assert "nothing was left behind" in error
    assert sorted(path.name for path in tmp_path.iterdir() if "store" in path.name) == []


def test_a_truncated_datastore_is_one_clear_line(run, pair, files, tmp_path):
    out = tmp_path / "store"
    build(run, pair, out, files)
    file = out / "order-00000.bin"
    file.write_bytes(file.read_bytes()[:100])
    config = json.dumps({"method": "retrieval", "model": str(out), "control": "fixed"})
    result = run("generate", "def", "--model", str(pair.target), "--speculative-config", config)
    result.refused("order-00000.bin has 100 bytes")


@pytest.mark.slow
def test_a_prediction_from_a_file(run, pair, tmp_path):
    plain = f"generate --model {pair.target} --max-tokens 12 --dtype float32 --json", "def greet("
    text = json.loads(run(*plain, "--speculative-config", '{"method": "none"}').out)["text"]
    file = tmp_path / "prediction.txt"
    file.write_text(text, encoding="utf-8")
    config = ("--speculative-config", '{"method": "prediction", "control": "fixed"}')
    record = json.loads(run(*plain, *config, "--prediction-file", str(file)).out)
    assert record["text"] == text
    assert record["stats"]["drafted"] > 0
    missing = run(*plain, *config, "--prediction-file", str(tmp_path / "none.txt"))
    assert (missing.code, "none.txt" in missing.err) == (1, True)

"""``foretoken build-datastore`` and what generates from it."""

from __future__ import annotations

import json

import pytest

from foretoken.propose import datastore as stores

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
    result = build(run, pair, out, files, extra=("--json",))
    facts = json.loads(result.out)
    assert result.code == 0
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
    result = run("build-datastore", str(tmp_path / "store"), "--data", str(files / "a.py"))
    assert result.code == 0
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
    result = build(run, pair, tmp_path / "store", files)
    assert result.code == 1
    assert "No space left on device" in result.err
    assert "nothing was left behind" in result.err
    assert sorted(path.name for path in tmp_path.iterdir() if "store" in path.name) == []


def test_a_truncated_datastore_is_one_clear_line(run, pair, files, tmp_path):
    out = tmp_path / "store"
    build(run, pair, out, files)
    file = out / "order-00000.bin"
    file.write_bytes(file.read_bytes()[:100])
    config = json.dumps({"method": "retrieval", "model": str(out), "control": "fixed"})
    result = run("generate", "def", "--model", str(pair.target), "--speculative-config", config)
    assert result.code == 1
    assert "order-00000.bin has 100 bytes" in result.err


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

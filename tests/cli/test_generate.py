"""``foretoken generate`` on a tiny pair."""

import json
import shutil

import pytest

from foretoken.train.data import Corpus, train_tokenizer
from foretoken.train.shapes import LlamaShape
from foretoken.train.target import new_model, save

pytestmark = pytest.mark.slow

LENGTH = ("--max-tokens", "12", "--dtype", "float32")


@pytest.fixture
def names(pair):
    return ("--model", str(pair.target), "--draft-model", str(pair.draft))


def test_without_columnsit_is_the_bundled_pair(run, pair):
    record = json.loads(run("generate", "def f(x):", *LENGTH, "--json").ok().out)
    assert (record["model"], record["draft_model"]) == (str(pair.target), str(pair.draft))


def test_text_alone_goes_to_standard_output(run, names):
    record = json.loads(run("generate", "def f(x):", *names, *LENGTH, "--json").out)
    result = run("generate", "def f(x):", *names, *LENGTH, "--speculative-tokens", "4")
    text = record["text"]
    assert result.out == (text if text.endswith("\n") else text + "\n")
    assert result.err.startswith("12 tokens · ")
    assert "mean acceptance" in result.err
    assert "\x1b" not in result.out + result.err


def test_the_policys_decisions_are_explained_on_standard_error(run, names):
    result = run("generate", "x = [1, 2, 3]\n" * 8, *names, *LENGTH, "--explain-drafts", "--speculative-tokens", "3")
    heading, *lines = result.err.splitlines()
    columns = "token candidates drafted expected price speedup accepted sources"
    assert result.code == 0 and " ".join(heading.split()) == columns
    assert any("draft_model" in line or "suffix" in line for line in lines)


def test_an_empty_prompt_continues_from_bos(run, pair, tmp_path):
    folder = shutil.copytree(pair.target, tmp_path / "model")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "bos_token": settings["eos_token"]}))
    for prompt in ("", "-"):
        for more in (("--json",), ("--html", str(tmp_path / "page.html")), ()):
            told = run("generate", prompt, "--model", str(folder), *LENGTH, *more)
            assert told.code == 0 and "token" in told.out + told.err, told.err
    told = run("generate", "", "--model", str(pair.target), *LENGTH)
    told.refused("the prompt is empty, and this model has no token for the beginning")


def test_json_is_one_object(run, names):
    result = run("generate", "def f(x):", *names, *LENGTH, "--speculative-tokens", "4", "--json")
    record = json.loads(result.out)
    assert set(record) == {
        "model",
        "draft_model",
        "text",
        "token_ids",
        "finish_reason",
        "stop_reason",
        "exactness",
        "stats",
    }
    assert len(record["token_ids"]) == record["stats"]["tokens"] == 12
    assert record["finish_reason"] == "length"
    assert record["stats"]["drafts"] > 0
    assert result.err == ""


def test_json_holds_all_completions(run, names):
    record = json.loads(run("generate", "a", *names, *LENGTH, "--n", "3", "--temperature", "1", "--json").out)
    assert len(record["outputs"]) == 3
    assert record["text"] == record["outputs"][0]["text"]


def test_speculation_does_not_change_seeded_text(run, names):
    seeded = ("generate", "class A:", *names, *LENGTH, "--temperature", "1", "--seed", "5", "--json")
    texts = [json.loads(run(*seeded, "--speculative-tokens", k).out) for k in ("0", "1", "5")]
    assert {tuple(t["token_ids"]) for t in texts} == {tuple(texts[0]["token_ids"])}
    assert [t["exactness"] for t in texts] == ["trajectory"] * 3
    assert texts[0]["stats"]["drafts"] == 0 < texts[1]["stats"]["drafts"]


def test_runs_without_a_seed_differ(run, names):
    args = ("generate", "a", *names, *LENGTH, "--temperature", "2", "--json")
    assert len({json.loads(run(*args).out)["text"] for _ in range(3)}) > 1


def test_a_dash_reads_standard_input(run, names):
    assert (
        run("generate", "-", *names, *LENGTH, stdin="def f(x):").out
        == run("generate", "def f(x):", *names, *LENGTH).out
    )


def test_several_completions_are_numbered(run, names):
    result = run("generate", "a", *names, *LENGTH, "-n", "2", "--temperature", "1", "--no-stats")
    assert "--- 2 of 2\n" in result.out
    assert result.err == ""


def test_lookup_needs_no_draft(run, pair):
    args = ("generate", "x = 1\nx = 1\nx = 1\nx =", "--model", str(pair.target), *LENGTH)
    record = json.loads(run(*args, "--speculative-config", '{"method": "ngram", "control": "fixed"}', "--json").out)
    assert record["draft_model"] is None
    assert record["stats"]["drafted"] > 0


@pytest.mark.parametrize(
    "mode, no_color, coloured",
    [
        ("always", None, True),
        ("always", "1", True),
        ("auto", "1", False),
        ("never", None, False),
        ("auto", None, False),
    ],
)
def test_colours_follow_the_option_and_no_color(run, names, monkeypatch, mode, no_color, coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", no_color)
    result = run("generate", "def f(x):", *names, *LENGTH, "--color", mode)
    assert ("\x1b[1m" in result.out) == coloured


def test_a_prompt_beyond_the_context_is_refused_in_one_line(run, pair):
    assert run("generate", "a b c " * 400).refused("tokens").err.count("\n") == 1


def test_a_draft_with_another_vocabulary_is_refused(run, pair, tmp_path):
    text = ("def other():\n    return 0\n",)
    tokenizer = train_tokenizer(Corpus("other", text * 3, text), vocab_size=300)
    save(new_model(LlamaShape(32, 48, 1, 2, 2, 16, 512), tokenizer, seed=3), tokenizer, tmp_path / "other")
    run("generate", "a", "--model", str(pair.target), "--draft-model", str(tmp_path / "other")).refused("vocabulary")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "[" * 100_000),
        ("config.json", '{"model_type": ["llama"]}'),
        ("config.json", '{"model_type": "llama", "num_hidden_layers": -1}'),
        ("config.json", '{"model_type": "gpt2", "n_head": "x"}'),
        ("generation_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": {}}'),
        ("model.safetensors", "junk"),
    ],
)
def test_a_malformed_checkpoint_is_one_line_and_no_traceback(run, pair, tmp_path, file, text):
    model = shutil.copytree(pair.target, tmp_path / "model")
    (model / file).write_text(text)
    for names in (("--model", str(model)), ("--model", str(pair.target), "--draft-model", str(model))):
        if "--draft-model" in names and file in ("generation_config.json", "tokenizer_config.json"):
            continue  # a draft's are not read
        result = run("generate", "def f(x):", *names, *LENGTH)
        assert result.code == 1 and result.out == ""
        assert result.err.startswith("foretoken: error: ") and len(result.err.splitlines()) == 1
        assert "unexpected" not in result.err and str(model) in result.err

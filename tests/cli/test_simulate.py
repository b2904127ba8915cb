"""``foretoken simulate`` as a user meets it."""

import json
import sys

import pytest

SHORT = "simulate --tokens 200 --repeats 1"


def test_a_table_and_a_sentence(run, tmp_path):
    file = tmp_path / "found.json"
    result = run(SHORT, "--target-ms", "30", "--draft-ms", "5", "--lookahead", "5", "--output", str(file)).ok()
    for words in ("plain", "si", "dsi", "pearl", "dsd", "over plain", "Pipelining is profitable here"):
        assert words in result.out
    record = json.loads(file.read_text())
    assert record["pays"] and record["sweep"] is None and record["setting"]["verifiers"] == 2
    assert [one["strategy"] for one in record["outcomes"]] == ["plain", "si", "dsi", "pearl", "dsd"]
    assert run(SHORT).out == run(SHORT).out


def test_a_page_without_its_extra_is_refused_before_the_work(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run(SHORT, "--html", str(tmp_path / "page.html")).refused("pip install 'foretoken[report]'")
    assert not list(tmp_path.iterdir())


def test_json_is_one_document_on_standard_output(run, tmp_path):
    file = tmp_path / "result.json"
    assert json.loads(run(SHORT, "--json", "--output", str(file)).ok().out) == json.loads(file.read_text())


def test_a_sweep_says_where_pipelining_pays_and_draws_it(run, tmp_path):
    files = tmp_path / "found.json", tmp_path / "found.html"
    options = "--sweep rtt --values 0:200:3 --verifiers 3 --strategy plain --strategy dsd --strategy dsi"
    result = run(f"{SHORT} {options} --output {files[0]} --html {files[1]}").ok()
    assert "Pipelining is profitable from 0 to" in result.out and "of 0 to 200 tried" in result.out
    record = json.loads(files[0].read_text())
    assert record["sweep"]["values"] == [0.0, 0.1, 0.2]
    page = files[1].read_text()
    assert page.startswith("<!DOCTYPE html>") and "<svg" in page and "round trip, ms" in page and "http" not in page


def test_every_value_that_can_be_swept(run, tmp_path):
    for by, values in {"acceptance": "0.5,0.9", "verifiers": "1,3", "draft-ms": "3:9:2"}.items():
        file = tmp_path / f"{by}.html"
        result = run(SHORT, "--sweep", by, "--values", values, "--html", str(file)).ok()
        assert "Pipelining is profitable" in result.out and "<svg" in file.read_text()
    assert run(SHORT, "--acceptance", "0.9", "--acceptance", "0.5", "--html", str(tmp_path / "plain.html")).code == 0


@pytest.mark.slow
def test_invalid_options_are_refused(run, tmp_path):
    for options, words in [
        (("--acceptance", "2"), "from 0 to 1"),
        (("--draft-ms", "0"), "must take time"),
        (("--strategy", "magic"), "no strategy 'magic'"),
        (("--sweep", "rtt"), "needs --values"),
        (("--sweep", "rtt", "--values", "0:9"), "expected FROM:TO:COUNT"),
        (("--sweep", "verifiers", "--values", "1.5,2"), "whole numbers"),
        (("--repeats", "0"), "repeats"),
        (("--output", str(tmp_path)), "expected the name of a file"),
    ]:
        run(SHORT, *options).refused(words)

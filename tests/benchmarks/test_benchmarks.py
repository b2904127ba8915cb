"""Every benchmark runs for a few seconds on the bundled pair, so that none breaks unseen. Its figures mean nothing here."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from foretoken import zoo

FOLDER = Path(__file__).parents[2] / "benchmarks"
NGRAM = """--config '{"method": "ngram", "num_speculative_tokens": 4}'"""
COMMANDS = {
    "acceptance": "--config '{\"method\": \"ngram\"}' --count 1 --tokens 8 --nodes 4 --temperature 0 --batch 1",
    "adaptive": "--small --depth 2 --count 1 --tokens 8 --crowd 2 --repeats 1",
    "audits": f"{NGRAM} --budget 1 --no-peers",
    "editing": f"--dtype float32 {NGRAM} --turns 1 --tasks 1",
    "encoder_decoder": "--target SEQ2SEQ --count 1 --repeats 1 --depth 4 --batch 1 --no-peer",
    "exactness_grid": "--count 1 --max-tokens 8 --dtype float32 --depth 4 --temperature 0",
    "laws": "--rows 3 --vocabulary 512 --repeats 4",
    "mixture": "--target TARGET --count 1 --tokens 8 --repeats 1",
    "never_slower": "--small --proposer wrong --text code --temperature 0 --batch 1 --tokens 8 --requests 1 --repeats 1",
    "planner": "--small --count 2 --unseen 1 --max-tokens 8 --temperature 0 --batch 1 --depth 2 --nodes 8 --turns 3",
    "request_fuzz": "--pairs 4 --dtype float32 --no-heads",
    "structured": "--requests 2 --max-tokens 40",
    "suffix_store": "--tokens 2000 --bound 1000 --length 100 --follows 2",
    "two_workers": "--small --count 1 --tokens 8 --repeats 1 --transport thread",
}
"""Short forms of the benchmarks that take ``--json``, by module."""


def call(name: str, arguments: list[str]) -> str:
    """Runs the benchmark in this process and returns what it printed."""
    app = typer.Typer()
    app.command()(importlib.import_module(name).main)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_prints_a_table_and_writes_its_record(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(COMMANDS[name].replace("TARGET", str(zoo.path("target"))).replace("SEQ2SEQ", str(zoo.path("seq2seq-target"))))
    assert call(name, [*words, "--json", "result.json"])
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))

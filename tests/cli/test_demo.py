"""``foretoken demo`` on a tiny pair, and its two kinds of stage."""

import io
import json
import re

import pytest
from rich.console import Console

from foretoken.cli import demo as module
from foretoken.cli import lanes

SHORT = ("--size", "none", "--prompts", "2", "--max-tokens", "10", "--speculative-tokens", "3")


def test_plain_blocks_without_a_terminal(run, pair):
    result = run("demo", *SHORT).ok()
    assert "texts identical: yes" in result.out
    assert "~~draft, rejected~~" in result.out
    for word in ("plain", "speculative", "speed-up", "mean acceptance length", "--- 2 of 2"):
        assert word in result.out
    assert "\x1b" not in result.out


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_race_as_json_is_one_document(run, pair, temperature):
    record = json.loads(run("demo", *SHORT, "--temperature", temperature, "--json").ok().out)
    assert record["identical"] is True
    assert record["plain"]["tokens"] == record["speculative"]["tokens"] == 20
    assert record["speculative"]["mean_acceptance_length"] >= 1
    assert record["speedup"] > 0


def test_texts_that_differ_are_an_error(run, pair, monkeypatch):
    monkeypatch.setattr(module.Pair, "identical", property(lambda self: False))
    result = run("demo", *SHORT)
    assert result.code == 1
    assert "texts identical: NO" in result.out


def test_an_unknown_size_is_one_line(run, pair):
    result = run("demo", "--size", "99b", "--prompts", "1")
    assert result.code == 1
    assert result.err == "foretoken: error: unknown size '99b'; known: 0.7b, 1b, 3b, 7b\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width, kind", [(120, lanes.Lanes), (60, lanes.StackedLanes)])
def test_lanes_need_a_wide_terminal(width, kind):
    console = Console(file=Terminal(), force_terminal=True, width=width, color_system="standard")
    assert type(lanes.stage(console)) is kind


def test_two_lanes_fill_on_a_terminal(pair):
    screen = Terminal()
    console = Console(file=screen, force_terminal=True, width=140, height=40, color_system="standard")
    race = module.Race(None, prompts=1, max_tokens=10, temperature=0.0, speculative_tokens=3)
    show = lanes.stage(console)
    show.result(module.summarize(race, module.run_race(race, show)))
    drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    assert "╭─ plain · 10 tokens" in drawn
    assert "╭─ speculative · 10 tokens" in drawn
    assert "mean acceptance" in drawn
    assert "texts identical: yes" in drawn

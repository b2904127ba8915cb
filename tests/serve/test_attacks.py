"""A short form of ``benchmarks/attacks.py``: two attacks on a server in this process, and what counts as a failure."""

import asyncio
import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.serve.conftest import running

from foretoken import LLM
from foretoken.serve.settings import AllowedHosts, ServerSettings

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("attacks")


@pytest.mark.slow
def test_attacks_are_measured(attacks: Any, spare: LLM) -> None:
    names = ["128 prompts, n=64", "foreign host"]
    with running(spare, ServerSettings(hosts=AllowedHosts(()))) as server:
        outcomes = asyncio.run(
            attacks.measure(server.url, os.getpid(), names, streams=1, times=2, quiet=0.3, settle=0.1, fill=0.0)
        )
        server.until(server.idle)
    assert [outcome.answers for outcome in outcomes] == [{"400": 2}, {"403": 2}]
    for outcome in outcomes:
        assert "answer" not in outcome.failures and 0 < outcome.seconds < 60
        for pace in (outcome.quiet, outcome.during):
            assert pace.chunks > 1 and 0 < pace.p50 <= pace.p99 <= pace.worst and pace.health > 0
        assert min(outcome.memory) > 2**20
    assert attacks.table(outcomes).row_count == 2


def test_each_failure_of_an_attack_is_reported(attacks: Any) -> None:
    quiet = attacks.Pace(health=0.01, p50=0.01, p99=0.02, worst=0.03, chunks=100)
    good = attacks.Outcome("a", {"400": 3}, ("400",), 1.0, quiet, replace(quiet, p99=0.04), (1000, 2000, 1050))
    assert good.failures == []
    worse = {
        "answer": {"answers": {"400": 2, "500": 1}},
        "health": {"during": replace(quiet, health=0.26)},
        "p99": {"during": replace(quiet, p99=0.041)},
        "memory": {"memory": (1000, 2000, 1051)},
    }
    for name, change in worse.items():
        assert replace(good, **change).failures == [name]


def test_every_attack_can_be_made(attacks: Any) -> None:
    for name, attack in attacks.ATTACKS.items():
        assert callable(attack.prepare()), name
        assert attack.answers


def test_only_loopback_is_attacked() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "attackers.py"), "deep JSON", "http://192.0.2.1:80"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "only loopback addresses are attacked, not 192.0.2.1" in done.stderr

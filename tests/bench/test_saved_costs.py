"""Measured costs are kept, found again, and read between their points."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from foretoken.bench import costs as module
from foretoken.bench.costs import Loaded, known, measured
from foretoken.costs.measured import MeasuredCosts, PassCost, TimeSpread


def passes(*points: tuple[int, float], batch: int = 1, context: int = 256) -> tuple[PassCost, ...]:
    return tuple(
        PassCost(rows, context, batch, TimeSpread(ms / 1e3, ms / 1e3, ms / 1e3, 3), None, 10, 1000)
        for rows, ms in points
    )


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    return tmp_path


def test_jagged_curves_are_read_as_they_are():
    costs = MeasuredCosts("a", "0", passes((1, 10.0), (4, 10.0), (5, 16.0), (8, 15.0)))
    assert costs.seconds(1) == costs.seconds(3) == pytest.approx(0.010)
    assert costs.seconds(5) == pytest.approx(0.016)
    assert costs.seconds(7) == pytest.approx(0.016 - 2 / 3 * 0.001)
    assert costs.seconds(12) == pytest.approx(0.015), "a curve that falls at its end does not go on falling"
    grown = costs.merged(passes((8, 20.0)) + passes((1, 30.0), batch=4))
    assert grown.seconds(10) == pytest.approx(0.020 + 2 * 0.004 / 3)
    assert grown.seconds(1, batch=4) == pytest.approx(0.030)
    with pytest.raises(KeyError):
        costs.seconds(1, batch=2)


def test_the_nearest_context_counts():
    costs = MeasuredCosts("a", "0", passes((1, 10.0)) + passes((1, 50.0), context=4096))
    assert costs.seconds(1, context=512) == pytest.approx(0.010)
    assert costs.seconds(1, context=3000) == pytest.approx(0.050)


@pytest.mark.slow
def test_costs_are_measured_once(tiny_pair, cache, monkeypatch):
    loaded = Loaded.of(tiny_pair.target)
    first = measured(loaded, rows=(1, 2), contexts=(16,), batches=(1, 2), turns=2)
    assert [(c.batch, c.rows) for c in first.passes] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(cost.seconds.median > 0 and cost.floor is not None for cost in first.passes)
    monkeypatch.setattr(module, "pass_costs", lambda *_: pytest.fail("measured again"))
    assert measured(loaded, rows=(1, 2), contexts=(16,), batches=(2, 1)) == first
    assert list(known(loaded).lacks((1, 4), (16,), (1,))) == [(16, 1)]
    json.dumps(first.to_dict())
    assert [file.suffix for file in (cache / "costs").iterdir()] == [".json"]


def test_another_checkpoint_type_or_machine_is_another_curve(tiny_pair, cache, monkeypatch):
    loaded = Loaded.of(tiny_pair.target)
    kinds = {loaded.identity, replace(loaded, quantization="int8").identity, Loaded.of(tiny_pair.draft).identity}
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    kinds.add(loaded.identity)
    monkeypatch.setattr(module, "processor", lambda: "another")
    kinds.add(loaded.identity)
    assert len(kinds) == 5


def test_a_damaged_or_unwritable_cache_is_no_obstacle(tiny_pair, cache, monkeypatch):
    loaded = Loaded.of(tiny_pair.target)
    measured(loaded, rows=(1,), contexts=(8,), turns=1)
    (file,) = (cache / "costs").iterdir()
    file.write_text("{")
    assert known(loaded).passes == ()
    (cache / "blocked").write_text("")
    monkeypatch.setenv("FORETOKEN_CACHE", str(cache / "blocked"))
    assert len(measured(loaded, rows=(1,), contexts=(8,), turns=1).passes) == 1

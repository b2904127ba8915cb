"""A short form of ``benchmarks/request_fuzz.py``: random requests, drafted in a crowd and plain alone, are the same."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parent.parent / "benchmarks" / "request_fuzz.py"


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("request_fuzz", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["request_fuzz"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("models", "kind"), [("tiny", "float32"), ("tiny", "int8"), ("wide", "bfloat16")])
@pytest.mark.slow
def test_random_requests_are_the_same_drafted_and_plain(fuzz: Any, models: str, kind: str, tmp_path: Path, request):
    pair = fuzz.Pair(tmp_path) if models == "tiny" else request.getfixturevalue("wide_pair")
    counts: Counter[str] = Counter()
    configs = [fuzz.TINY[0], fuzz.TINY[3], fuzz.TINY[-1]]
    if models == "wide":
        configs = configs[:1]  # checking a draft's vocabulary and listing tokens for grammars take seconds
    arena = fuzz.Arena.open("tiny", pair.target, pair.draft, configs, kind)
    differences = [d for seed in (0, 5) for d in arena.compare(seed, engines=3, counts=counts) if d is not None]
    assert not differences, differences[0]
    assert counts["accepted"] and counts["aborted"] and counts["failed"], "the requests are too tame"
    usage = [llm.engine.usage for llm in arena.drafted.values()]
    assert any(u.preemptions for u in usage) and any(u.prefix_hits for u in usage)


def test_a_difference_is_reported(fuzz: Any, tmp_path: Path):
    pair, counts = fuzz.Pair(tmp_path), Counter()
    arena = fuzz.Arena.open("tiny", pair.target, pair.draft, [fuzz.TINY[0]], "float32")
    arena.plain = fuzz.Arena.open("tiny", pair.draft, pair.draft, [], "float32").plain  # another model
    result = [d for d in arena.compare(1, engines=1, counts=counts) if d is not None]
    assert result and {"seed", "proposer", "prompt", "params", "plain", "drafted"} <= set(result[0])

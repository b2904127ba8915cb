"""Time from the start of a fresh process to the first token, imports included."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from foretoken.core.errors import ForetokenError

_PROGRAM = """
import json, sys
from foretoken import LLM, SamplingParams
from foretoken.bench.setting import memory
imported = memory("VmHWM")
llm = LLM(**json.loads(sys.argv[1]))
for _ in llm.stream("def", SamplingParams(max_tokens=int(sys.argv[2]), temperature=0, ignore_eos=True)):
    pass
print(json.dumps({"imported": imported, "peak": memory("VmHWM")}), flush=True)
"""


@dataclass(frozen=True)
class Startup:
    """Startup of one model. seconds: median. peak_bytes: peak resident memory. imported_bytes: peak before loading."""

    name: str
    seconds: float
    low: float
    high: float
    peak_bytes: int
    imported_bytes: int


def startup(name: str, options: dict[str, Any], times: int = 3, tokens: int = 1) -> Startup:
    """Times ``LLM(**options)`` and its first tokens, ``times`` times after one warm-up. Raises ForetokenError."""
    seconds: list[float] = []
    reported = {"peak": 0, "imported": 0}
    for _ in range(times + 1):
        took, reported = _run([sys.executable, "-c", _PROGRAM, json.dumps(options), str(tokens)])
        seconds.append(took)
    warm = seconds[1:]
    return Startup(name, median(warm), min(warm), max(warm), reported["peak"], reported["imported"])


def _run(command: Sequence[str]) -> tuple[float, dict[str, int]]:
    """Returns the seconds until the process reports its token, and the report."""
    with tempfile.TemporaryFile("w+") as errors:
        started = perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = perf_counter() - started
        if process.returncode or not line:
            errors.seek(0)
            reason = (errors.read().strip().splitlines() or ["no reason given"])[-1]
            raise ForetokenError(f"a fresh process could not produce a token: {reason}")
    answer: dict[str, int] = json.loads(line)
    return seconds, answer

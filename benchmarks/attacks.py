"""The server under attack: does it answer other clients in time, and is its memory freed?

    python benchmarks/attacks.py --output attacks.json
    python benchmarks/attacks.py --attack "big prompt" --attack "unfinished bodies"
    python benchmarks/attacks.py --attack "long prompt" --wide      # usual work: what do other clients notice of it?

Starts `foretoken serve` on the bundled pair with a few endless streams. Each attack of ``attackers.py`` is sent a few
times. Meanwhile `/health` is polled and the time between a stream's chunks is measured; both are compared with a quiet
period just before. The exit code is 1 if `/health` took longer than 250 ms, if the 99th percentile between chunks more
than doubled, if resident memory half a minute later was more than 5 % above its figure before the attack, or if an
answer was not the expected one.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import httpx
import numpy as np
import typer
from rich.table import Table

from attackers import ATTACKS, LONG_PROMPT
from foretoken import zoo
from foretoken.bench.http_load import serving
from foretoken.bench.output import figures, report, resident_bytes
from foretoken.bench.workloads import FUNCTIONS
from options import Output, target_path
from servers import Answer, ask, talking

HEALTH_SECONDS, SLOWER, GROWTH = 0.25, 2.0, 0.05
PROBE = 0.01  # seconds between two requests for /health
PAUSE = 0.5  # seconds between two sends, and after the last one
MIN_CHUNKS, PATIENCE = 10, 60.0  # chunks until which a period lasts, and the most seconds that it waits for them
SERVER = ("--max-model-len", "4096", "--kv-cache-memory-bytes", "128MiB")
WARM: tuple[dict[str, Any], ...] = (
    {"guided_choice": ["a", "b"]},
    {"guided_grammar": 'root ::= "a"'},
    {"guided_json": {"type": "integer"}},
    {"bad_words": ["a"]},
    {"prediction": {"type": "content", "content": "a"}},
    {"prompt": "x " * 3000},
)


Window = tuple[float, float]  # start and end, in seconds


@dataclass(frozen=True)
class Pace:
    """Latency of the server's other clients, in seconds. health: slowest answer; p50, p99, worst: between chunks."""

    health: float
    p50: float
    p99: float
    worst: float
    chunks: int


@dataclass(frozen=True)
class Outcome:
    """Result of one attack. quiet, during: latency before and during it. memory: bytes before, after, and settled."""

    name: str
    answers: dict[str, int]
    allowed: tuple[str, ...]
    seconds: float
    quiet: Pace
    during: Pace
    memory: tuple[int, int, int]

    @property
    def failures(self) -> list[str]:
        """Returns descriptions of everything that violates the limits."""
        before, _, settled = self.memory
        checks = {
            "answer": set(self.answers) <= set(self.allowed),
            "health": self.during.health <= HEALTH_SECONDS,
            "p99": self.during.p99 <= SLOWER * self.quiet.p99,
            "memory": settled <= (1 + GROWTH) * before,
        }
        return [name for name, passed in checks.items() if not passed]


class Watch:
    """The other clients: endless streams, and one that polls /health."""

    def __init__(self, client: httpx.AsyncClient, process: int) -> None:
        self._client, self._process = client, process
        self._streams: list[Answer] = []
        self._health: list[tuple[float, float]] = []  # time of each request, and seconds until its answer

    @asynccontextmanager
    async def running(self, streams: int) -> AsyncIterator[None]:
        """Runs all of them within the ``with`` block."""
        tasks = [asyncio.create_task(self._stream(number)) for number in range(streams)]
        tasks.append(asyncio.create_task(self._ask_health()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for error in results:
            if isinstance(error, Exception):
                raise error

    def pace(self, windows: Sequence[Window]) -> Pace:
        """Returns the latency within these windows. A gap or an answer counts if it overlaps one of them."""

        def touches(start: float, end: float) -> bool:
            return any(start <= last and end >= first for first, last in windows)

        longest = max(end - start for start, end in windows)  # if no chunk arrived
        gaps = [gap for answer in self._streams for at, gap in answer.gaps if touches(at - gap, at)] or [longest]
        health = [seconds for asked, seconds in self._health if touches(asked, asked + seconds)]
        p50, p99 = map(float, np.quantile(gaps, (0.5, 0.99)))
        return Pace(max(health, default=longest), p50, p99, max(gaps), len(gaps))

    async def until_compared(self, start: float, seconds: float) -> Window:
        """Waits ``seconds``, and for ``MIN_CHUNKS`` chunks since ``start``. Returns the period from ``start`` on."""
        await asyncio.sleep(seconds)
        patient = time.perf_counter() + PATIENCE
        while self.pace([(start, time.perf_counter())]).chunks < MIN_CHUNKS and time.perf_counter() < patient:
            await asyncio.sleep(PROBE)
        return start, time.perf_counter()

    @property
    def memory(self) -> int:
        """Returns the server's resident bytes."""
        return resident_bytes(self._process)

    async def settled(self, limit: float, seconds: float) -> int:
        """Returns the memory once it is at most ``limit``, or after ``seconds``."""
        end = time.perf_counter() + seconds
        while self.memory > limit and time.perf_counter() < end:
            await asyncio.sleep(0.2)
        return self.memory

    async def _stream(self, number: int) -> None:
        while True:
            self._streams.append(Answer())
            body = {"prompt": FUNCTIONS[number % len(FUNCTIONS)], "max_tokens": 3000, "ignore_eos": True}
            answer = await ask(self._client, {**body, "temperature": 0.0}, self._streams[-1])
            assert not answer.error, answer.error

    async def _ask_health(self) -> None:
        while True:
            asked = time.perf_counter()
            (await self._client.get("/health")).raise_for_status()
            self._health.append((asked, time.perf_counter() - asked))
            await asyncio.sleep(PROBE)


async def attacked(watch: Watch, name: str, url: str, *, times: int, quiet: float, settle: float) -> Outcome:
    usual, before = watch.pace([await watch.until_compared(time.perf_counter(), quiet)]), watch.memory
    sent, windows = [], []
    for _ in range(times):
        sent.append(await send(name, url))
        windows.append(await watch.until_compared(sent[-1].start, PAUSE))
    during, after = watch.pace(windows), watch.memory
    settled = await watch.settled((1 + GROWTH) * before, settle)
    return Outcome(
        name,
        dict(sum((attack.answers for attack in sent), Counter())),
        tuple(sorted(ATTACKS[name].answers)),
        max(attack.seconds for attack in sent),
        usual,
        during,
        (before, after, settled),
    )


class Sent(NamedTuple):
    """One attack. answers: how often each came. start, seconds: when it began, and how long it took."""

    answers: Counter[str]
    start: float
    seconds: float


async def send(name: str, url: str) -> Sent:
    """Sends one attack from a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-S",
        str(Path(__file__).with_name("attackers.py")),
        name,
        url,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    start = time.perf_counter()
    said, _ = await process.communicate(b"\n")
    return Sent(Counter(json.loads(said)), start, time.perf_counter() - start)


async def warm(client: httpx.AsyncClient) -> None:
    """Sends one harmless request of each kind, so that what is loaded once does not count as a leak."""
    for fields in WARM:
        await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4, **fields})
    await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 4})


async def measure(
    url: str,
    process: int,
    names: Sequence[str],
    *,
    streams: int,
    times: int,
    quiet: float,
    settle: float,
    fill: float,
) -> list[Outcome]:
    """Runs the attacks in turn. fill: seconds in which the streams first fill the server's caches."""
    async with talking(url) as client:
        await warm(client)
        watch = Watch(client, process)
        async with watch.running(streams):
            await asyncio.sleep(fill)
            return [await attacked(watch, name, url, times=times, quiet=quiet, settle=settle) for name in names]


def table(outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for o in outcomes:
        answers = ", ".join(f"{count} x {answer}" for answer, count in sorted(o.answers.items()))
        pairs = ((o.quiet.health, o.during.health), (o.quiet.p50, o.during.p50), (o.quiet.p99, o.during.p99))
        latency = [f"{1e3 * usual:.0f} > {1e3 * now:.0f}" for usual, now in (*pairs, (o.quiet.worst, o.during.worst))]
        memory = " > ".join(f"{size / 2**20:.0f}" for size in o.memory)
        rows.append((o.name, answers, f"{o.seconds:.1f}", *latency, memory, ", ".join(o.failures) or "-"))
    return figures(("attack", "answers", "s", "/health ms", "p50 ms", "p99 ms", "max ms", "MiB", "failed"), rows)


def main(
    attack: Annotated[
        list[str] | None, typer.Option(help=f"Of attackers.py; may be repeated. [all but {LONG_PROMPT!r}]")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Running streams.")] = 4,
    times: Annotated[int, typer.Option(min=1, help="How often each attack is sent.")] = 3,
    quiet: Annotated[float, typer.Option(min=0.1, help="Seconds before each attack, to compare with.")] = 5.0,
    settle: Annotated[float, typer.Option(min=0, help="Seconds that memory has to come back.")] = 30.0,
    fill: Annotated[float, typer.Option(min=0, help="Seconds in which streams fill the caches first.")] = 30.0,
    wide: Annotated[bool, typer.Option("--wide", help="The bundled target widened to 0.7 B.")] = False,
    output: Output = None,
) -> None:
    """Prints latency, memory and answers under each attack; the exit code is 1 if any violates its limit."""
    names = attack or [name for name in ATTACKS if name != LONG_PROMPT]
    unknown = sorted(set(names) - ATTACKS.keys())
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}; known: {', '.join(ATTACKS)}")
    options: dict[str, Any] = {"streams": streams, "times": times, "quiet": quiet}
    options |= {"settle": settle, "fill": fill}
    models = ("--model", str(target_path(None)), "--draft-model", str(zoo.path("draft"))) if wide else ()
    with serving(*models, *(SERVER[:2] if wide else SERVER)) as (url, process):
        outcomes = asyncio.run(measure(url, process, names, **options))
    limits = (
        f"usual > under attack; limits: /health {1e3 * HEALTH_SECONDS:.0f} ms, p99 {SLOWER:g} times the usual, memory "
        f"{GROWTH:.0%} above before. Longest gap by median: {1e3 * median(o.during.worst for o in outcomes):.0f} ms"
    )
    rows = [{**asdict(outcome), "failures": outcome.failures} for outcome in outcomes]
    report([table(outcomes), limits], options, output, outcomes=rows)
    raise typer.Exit(int(any(outcome.failures for outcome in outcomes)))


if __name__ == "__main__":
    typer.run(main)

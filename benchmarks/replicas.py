"""Replicas under load, some of which are killed: is any request lost, does any text change?

    python benchmarks/replicas.py --replicas 4 --requests 200 --kills 3

Starts a server with replicas on a private Ray cluster, and sends mixed requests as ``serving.py load`` does, all with a
seed. Meanwhile replicas are killed (SIGKILL), one at a time. It counts the requests that finished and that were lost,
and the front's failovers. Every text is compared, byte for byte, with that of the same request in one process, alone
and without speculation, in float32. The exit code is 1 if a request was lost or a text differs.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.bench.output import report
from foretoken.core.http import at_once
from options import Output
from servers import Answer, ask, serving, talking
from serving import differing, mixed


def main(
    replicas: Annotated[int, typer.Option(help="How many, as long as nobody kills them.")] = 4,
    cpus: Annotated[float | None, typer.Option(help="Cores of each. [a fair share]")] = None,
    requests: Annotated[int, typer.Option(help="How many.")] = 200,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 16,
    kills: Annotated[int, typer.Option(help="Replicas to kill.")] = 3,
    pause: Annotated[float, typer.Option(help="Seconds before each.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of the mixture.")] = 0,
    output: Output = None,
) -> None:
    """Kills replicas under load."""
    rng = random.Random(seed)
    bodies = [mixed(rng, number) for number in range(requests)]
    own = ("--replica-cpus", str(cpus)) if cpus is not None else ()
    with serving("--dtype", "float32", "--replicas", str(replicas), *own) as (url, process):
        answers, killed, page = asyncio.run(attacked(url, process, bodies, concurrency, kills, pause))
    lost = [answer.error for answer in answers if answer.error]
    sent = zip(bodies, answers, strict=True)
    different = differing([(body, answer) for body, answer in sent if answer.error is None])
    outcomes = failovers(page)
    became = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    said = (
        f"{replicas} replicas, {killed} killed: {len(bodies)} requests sent, {len(bodies) - len(lost)} finished, "
        f"{len(lost)} lost; {became}; "
        f"{len(bodies) - len(lost) - len(different)} texts byte for byte as alone"
    )
    counts: dict[str, Any] = {"sent": len(bodies), "lost": lost, "killed": killed, "outcomes": outcomes}
    report([said], {}, output, **counts, different=different)
    raise typer.Exit(bool(lost or different))


async def attacked(
    url: str, server: int, bodies: list[dict[str, Any]], concurrency: int, kills: int, pause: float
) -> tuple[list[Answer], int, str]:
    """Sends all requests while replicas are killed. Returns answers, number of kills, and the final metrics page."""
    killed = 0

    async def kill() -> None:
        nonlocal killed
        while killed < kills:
            await asyncio.sleep(pause)
            running = processes(server)
            if len(running) > 1:  # the last one is spared: requests would wait for the next, which takes a while
                os.kill(random.Random(killed).choice(running), signal.SIGKILL)
                killed += 1

    async with talking(url) as client:
        killer = asyncio.create_task(kill())
        answers = await at_once(concurrency, [partial(ask, client, body) for body in bodies])
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
        return answers, killed, (await client.get("/metrics")).text


def processes(server: int) -> list[int]:
    """Returns the process ids of this server's replicas: descendants with the name that Ray gives them."""
    parents: dict[int, int] = {}
    named = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica"):
                named.append(int(folder.name))
        except OSError:  # it ended meanwhile
            continue
    return [process for process in named if descends(process, server, parents)]


def descends(process: int, ancestor: int, parents: dict[int, int]) -> bool:
    """Returns whether ``process`` is a descendant of ``ancestor``. parents: parent by process id."""
    while process > 1:
        if process == ancestor:
            return True
        process = parents.get(process, 0)
    return False


def failovers(page: str) -> dict[str, int]:
    """Returns the front's failovers by outcome."""
    counts = {}
    for outcome in ("retried", "replayed", "broken"):
        _, _, rest = page.partition(f'foretoken:failovers_total{{outcome="{outcome}"}} ')
        counts[outcome] = int(float(rest.split()[0])) if rest else 0
    return counts


if __name__ == "__main__":
    typer.run(main)

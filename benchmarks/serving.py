"""The server under load: latency during prefill, and texts that must not change, also if replicas are killed.

    python benchmarks/serving.py latency
    python benchmarks/serving.py load --requests 200
    python benchmarks/serving.py load --replicas 4 --requests 200 --kills 3

latency: time between chunks of running streams while a long prompt is prefilled. load: mixed requests, some cancelled
half-way; every text must equal, byte for byte, that of the same request alone and without speculation, in float32. With
replicas on a private Ray cluster nothing is cancelled, replicas are killed, and the front's failovers are counted.
Every part starts its own server and talks to it over HTTP, as clients do.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.output import figures, report
from foretoken.bench.workloads import FUNCTIONS
from foretoken.core.http import at_once
from options import Output, Small, target_path
from servers import Answer, ask, serving, talking

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Kills = tuple[int, float]
SYSTEM = (
    "import os\nimport sys\nfrom collections import Counter, defaultdict\n\n\n" + "def helper(values):\n    pass\n" * 20
)
UNICODE = "names = {'日本語': 'ü', '🙂': 'μ"
REPETITION = ("north east south west " * 24, "x = 0\n" * 40)


@app.command()
def latency(
    streams: Annotated[int, typer.Option(help="Running streams.")] = 4,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt that arrives.")] = 4000,
    arrivals: Annotated[int, typer.Option(help="How many such prompts arrive, one after another.")] = 3,
    small: Small = False,
    output: Output = None,
) -> None:
    """Prints seconds between chunks of running streams, usually and while a long prompt is prefilled."""
    with serving(*pair(small)) as (url, _):
        usual, during, waits = asyncio.run(pauses(url, streams, prompt, arrivals))
    rows = []
    for name, gaps in (("usual", usual), ("while a prompt is read", during)):
        p99 = float(np.quantile(gaps, 0.99))
        rows.append((name, len(gaps), f"{1e3 * median(gaps):.0f}", f"{1e3 * p99:.0f}", f"{p99 / median(usual):.2f}"))
    heads = ("", "chunks", "median ms", "p99 ms", "p99 over the usual median")
    table = figures(heads, rows, f"{streams} streams, {arrivals} prompts of {prompt} tokens")
    said = f"the long prompts' first tokens came after {', '.join(f'{wait:.1f} s' for wait in waits)}"
    report([table, said], {}, output, usual=usual, during=during, first_token=waits)


async def pauses(url: str, streams: int, prompt: int, arrivals: int) -> tuple[list[float], list[float], list[float]]:
    """Returns gaps between chunks outside of and during the prefill of a prompt, and how long each prompt waited."""
    windows, running = [], [Answer(time.perf_counter()) for _ in range(streams)]
    async with talking(url) as client:
        tasks = [
            asyncio.create_task(ask(client, fixed(FUNCTIONS[i % len(FUNCTIONS)], 4000, 0.0), answer=answer))
            for i, answer in enumerate(running)
        ]
        await asyncio.sleep(8.0)
        for number in range(arrivals):
            started = time.perf_counter()
            answer = await ask(client, fixed([(37 * i + number) % 3000 + 100 for i in range(prompt)], 1, 0.0))
            assert not answer.error, answer.error
            windows.append((started, time.perf_counter()))
            await asyncio.sleep(6.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    gaps = [gap for answer in running for gap in answer.gaps]
    during = [gap for at, gap in gaps if any(start <= at <= end for start, end in windows)]
    usual = [gap for at, gap in gaps if not any(start <= at <= end + gap for start, end in windows)]
    return usual, during, [end - start for start, end in windows]


@app.command()
def load(
    requests: Annotated[int, typer.Option(help="How many.")] = 200,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 16,
    config: Annotated[str | None, typer.Option(help="Another speculative configuration, as JSON.")] = None,
    replicas: Annotated[int, typer.Option(help="Replicas on a private Ray cluster; 0 is one engine.")] = 0,
    cpus: Annotated[float | None, typer.Option(help="Cores of each. [a fair share]")] = None,
    kills: Annotated[int, typer.Option(help="Replicas to kill (SIGKILL), one at a time.")] = 0,
    pause: Annotated[float, typer.Option(help="Seconds before each.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of the mixture.")] = 0,
    output: Output = None,
) -> None:
    """Compares mixed requests, some of them cancelled, with the same requests alone and without speculation."""
    rng = random.Random(seed)
    bodies = [mixed(rng, number) for number in range(requests)]
    leaving = [rng.randint(1, 5) if rng.random() < 0.2 and not replicas else None for _ in bodies]
    more: tuple[str, ...] = () if config is None else ("--speculative-config", config)
    more += ("--replicas", str(replicas)) if replicas else ()
    more += ("--replica-cpus", str(cpus)) if cpus is not None else ()
    with serving("--dtype", "float32", *more) as server:
        answers, killed, page = asyncio.run(many(server, bodies, leaving, concurrency, (kills, pause)))
    stayed = [(body, answer) for body, answer in zip(bodies, answers, strict=True) if answer.text is not None]
    failed = [answer.error for _, answer in stayed if answer.error]
    different = differing([(body, answer) for body, answer in stayed if not answer.error])
    equal, gone = len(stayed) - len(failed) - len(different), len(bodies) - len(stayed)
    said = (
        f"{len(bodies)} requests, {concurrency} at once: {gone} cancelled, {equal} of {len(stayed)} others byte for "
        f"byte as alone, {len(failed)} lost"
    )
    outcomes = failovers(page)
    if replicas:
        became = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        said += f"; {replicas} replicas, {killed} killed: {became}"
    counts: dict[str, Any] = {"compared": len(stayed), "killed": killed, "outcomes": outcomes}
    report([said], {}, output, different=different, errors=failed, **counts)
    raise typer.Exit(bool(different or failed))


async def many(
    server: tuple[str, int],
    bodies: Sequence[dict[str, Any]],
    leaving: Sequence[int | None],
    concurrency: int,
    kills: Kills,
) -> tuple[list[Answer], int, str]:
    """Sends all requests while replicas are killed. Returns answers, number of kills, and the final metrics page.

    leaving: Chunks after which a client disconnects, or None. kills: Replicas to kill, and the seconds before each.
    """
    url, process = server
    killed = 0

    async def kill() -> None:
        nonlocal killed
        while killed < kills[0]:
            await asyncio.sleep(kills[1])
            running = processes(process)
            if len(running) > 1:  # the last one is spared: requests would wait for the next, which takes a while
                os.kill(random.Random(killed).choice(running), signal.SIGKILL)
                killed += 1

    async with talking(url) as client:
        killer = asyncio.create_task(kill())
        jobs = [partial(ask, client, body, after) for body, after in zip(bodies, leaving, strict=True)]
        answers = await at_once(concurrency, jobs)
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


def differing(answers: Sequence[tuple[dict[str, Any], Answer]]) -> list[dict[str, Any]]:
    """Returns the requests whose text is not, byte for byte, that of the request alone, without speculation."""
    alone = LLM(dtype="float32", speculative_config={"method": "none"})
    different = []
    for body, answer in answers:
        params = {key: value for key, value in body.items() if key not in ("prompt", "speculative_method")}
        expected = alone.generate(body["prompt"], SamplingParams(**params))[0].outputs[0].text
        if expected != answer.text:
            different.append({"body": body, "expected": expected, "got": answer.text})
    return different


def mixed(rng: random.Random, number: int) -> dict[str, Any]:
    """Returns a request of any kind, with a seed, so that its text does not depend on the server's load."""
    body: dict[str, Any] = {
        "prompt": rng.choice((*FUNCTIONS, *REPETITION, SYSTEM + FUNCTIONS[0], SYSTEM + "class Visitor:\n", UNICODE)),
        "max_tokens": rng.randint(1, 120),
        "temperature": rng.choice((0.0, 0.5, 0.8, 1.0, 1.2)),
        "seed": number,
    }
    extras: tuple[dict[str, Any], ...] = (
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.05},
        {"presence_penalty": 0.6},
        {"frequency_penalty": 0.4},
        {"repetition_penalty": 1.1},
        {"stop": ["\n\n", "def "]},
        {"ignore_eos": True},
        {"min_tokens": 1},
        {"logit_bias": {"199": -2.0}},
        {"speculative_tokens": 0},
        {"speculative_tokens": 7},
        {"bad_words": ["self"]},
        {"speculative_method": "ngram"},
        {"speculative_method": "suffix"},
        {"structured_outputs": {"regex": r"[a-z]{3,12}( [0-9]{1,4}){0,6}"}},
        {
            "structured_outputs": {
                "json": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "maxLength": 12},
                        "size": {"type": "integer", "minimum": 0, "maximum": 999},
                    },
                    "required": ["name", "size"],
                }
            }
        },
    )
    for extra in rng.sample(extras, rng.randint(0, 3)):
        if not ("ignore_eos" in {*body, *extra} and "structured_outputs" in {*body, *extra}):
            body |= extra
    return body


def pair(small: bool) -> tuple[str, ...]:
    """Returns the arguments for the bundled pair, widened unless ``small``."""
    return () if small else ("--model", str(target_path(None)), "--draft-model", str(zoo.path("draft")))


def fixed(prompt: str | list[int], tokens: int, temperature: float) -> dict[str, Any]:
    """Returns the body of a completion of exactly ``tokens`` tokens."""
    return {"prompt": prompt, "max_tokens": tokens, "temperature": temperature, "ignore_eos": True}


if __name__ == "__main__":
    app()

"""The server under load: throughput, latency during prefill, texts that must not change, and a long soak.

    python benchmarks/serving.py throughput --output serving.json
    python benchmarks/serving.py latency
    python benchmarks/serving.py load --requests 200
    python benchmarks/serving.py soak --minutes 30

throughput: completion tokens per second at several concurrencies, alternating between a speculative and a plain server,
on the widened pair. latency: time between chunks of running streams while a long prompt is prefilled. load: mixed
requests, some cancelled half-way; every text must equal, byte for byte, that of the same request alone and without
speculation, in float32. soak: the same mixture for a while; errors, and the server's memory.
Every part starts its own servers and talks to them over HTTP, as clients do.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.output import figures, report, wide_console
from foretoken.bench.workloads import FUNCTIONS
from foretoken.core.http import at_once
from options import Output, Small, target_path
from servers import PLAIN, Answer, ask, memory_over_time, serving, talking

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = wide_console()
SYSTEM = (
    "import os\nimport sys\nfrom collections import Counter, defaultdict\n\n\n" + "def helper(values):\n    pass\n" * 20
)
UNICODE = "names = {'日本語': 'ü', '🙂': 'μ"
REPETITION = ("north east south west " * 24, "x = 0\n" * 40)


def measured(url: str, concurrency: int, requests: int, tokens: int, temperature: float) -> float:
    """Returns completion tokens per second."""

    async def work() -> float:
        async with talking(url) as client:
            bodies = [fixed(FUNCTIONS[i % len(FUNCTIONS)], tokens, temperature) for i in range(requests)]
            started = time.perf_counter()
            answers = await at_once(concurrency, [partial(ask, client, body) for body in bodies])
            assert not any(answer.error for answer in answers), answers
            return sum(answer.tokens for answer in answers) / (time.perf_counter() - started)

    return asyncio.run(work())


@app.command()
def throughput(
    concurrency: Annotated[list[int], typer.Option(help="Requests at once; may be repeated.")] = [1, 4, 16, 32],
    tokens: Annotated[int, typer.Option(help="Of every answer.")] = 96,
    temperature: Annotated[float, typer.Option()] = 0.0,
    repeats: Annotated[int, typer.Option(help="Turns of each server at each concurrency.")] = 3,
    small: Small = False,
    output: Output = None,
) -> None:
    """Prints tokens per second of the speculative server over those of the plain one."""
    plain_model = pair(small)[:2]
    rows: list[dict[str, Any]] = []
    options = ("--max-num-seqs", str(max(concurrency)))
    with serving(*pair(small), *options) as (fast, _), serving(*plain_model, *PLAIN, *options) as (plain, _):
        for url in (fast, plain):
            measured(url, 2, 2, 16, temperature)
        for count in concurrency:
            requests = max(4 * count, len(FUNCTIONS))  # so that the end, when the batch shrinks, has little weight
            turns = [
                [measured(url, count, requests, tokens, temperature) for url in (plain, fast)] for _ in range(repeats)
            ]
            ratios = [turn[1] / turn[0] for turn in turns]
            rows.append(
                {
                    "concurrency": count,
                    "plain": median(t[0] for t in turns),
                    "ratios": ratios,
                    "speculative": median(t[1] for t in turns),
                    "ratio": median(ratios),
                }
            )
            console.print(rows[-1])
    cells = [
        (row["concurrency"], f"{row['plain']:.1f}", f"{row['speculative']:.1f}", f"{row['ratio']:.2f}") for row in rows
    ]
    title = f"Served, temperature {temperature:g}"
    report([figures(("at once", "plain tok/s", "speculative tok/s", "ratio"), cells, title)], {}, output, rows=rows)


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
    seed: Annotated[int, typer.Option(help="Of the mixture.")] = 0,
    output: Output = None,
) -> None:
    """Compares mixed requests, some of them cancelled, with the same requests alone and without speculation."""
    rng = random.Random(seed)
    bodies = [mixed(rng, number) for number in range(requests)]
    leaving = [rng.randint(1, 5) if rng.random() < 0.2 else None for _ in bodies]
    more = () if config is None else ("--speculative-config", config)
    with serving("--dtype", "float32", *more) as (url, _):
        answers = asyncio.run(many(url, bodies, leaving, concurrency))
    stayed = [(body, answer) for body, answer in zip(bodies, answers, strict=True) if answer.text is not None]
    failed = [answer.error for _, answer in stayed if answer.error]
    different = differing(stayed)
    equal, gone = len(stayed) - len(different), len(bodies) - len(stayed)
    said = (
        f"{len(bodies)} requests, {concurrency} at once: {gone} cancelled, {equal} of {len(stayed)} others byte for "
        f"byte as alone, {len(failed)} errors"
    )
    report([said], {}, output, different=different, errors=failed, compared=len(stayed))
    raise typer.Exit(bool(different or failed))


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(help="How long.")] = 30.0,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 16,
    output: Output = None,
) -> None:
    """Runs the mixture for a while, and prints errors and the growth of memory per minute."""
    with serving("--kv-cache-memory-bytes", "256MiB") as (url, process):
        result = asyncio.run(soaked(url, process, minutes, concurrency))
    times, sizes = np.array(result["memory"]).T
    later = times > times[-1] / 3
    slope = float(np.polyfit(times[later] / 60.0, sizes[later] / 2**20, 1)[0])
    said = (
        f"{minutes:g} minutes, {concurrency} at once: {result['requests']} requests, {result['cancelled']} cancelled, "
        f"{len(result['errors'])} errors; memory {sizes[later][0] / 2**20:.0f} MiB after a third, "
        f"{sizes[-1] / 2**20:.0f} MiB at the end, {slope:+.2f} MiB a minute; health {result['health']}"
    )
    report([said], {}, output, **result, slope_mib_per_minute=slope)
    raise typer.Exit(bool(result["errors"]) or result["health"] != 200)


async def soaked(url: str, process: int, minutes: float, concurrency: int) -> dict[str, Any]:
    """Returns counts of requests, errors, and the server's memory over time."""
    rng, end = random.Random(1), time.perf_counter() + 60.0 * minutes
    result: dict[str, Any] = {"requests": 0, "cancelled": 0, "errors": []}

    async def one() -> None:
        while time.perf_counter() < end:
            leave = rng.randint(1, 5) if rng.random() < 0.2 else None
            answer = await ask(client, mixed(rng, result["requests"]), leave)
            result["requests"] += 1
            result["cancelled"] += answer.text is None
            result["errors"] += [answer.error] if answer.error else []

    async with talking(url) as client:
        watch = asyncio.create_task(memory_over_time(process, end, min(5.0, minutes)))
        await asyncio.gather(*(one() for _ in range(concurrency)))
        result["memory"] = await watch
        await asyncio.sleep(3.0)  # an idle server checks its own integrity
        result["health"] = (await client.get("/health")).status_code
    return result


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


async def many(
    url: str, bodies: Sequence[dict[str, Any]], leaving: Sequence[int | None], concurrency: int
) -> list[Answer]:
    """Sends all bodies, ``concurrency`` at a time. leaving: chunks after which a client disconnects, or None."""
    async with talking(url) as client:
        jobs = [lambda b=b, n=n: ask(client, b, n) for b, n in zip(bodies, leaving, strict=True)]
        return await at_once(concurrency, jobs)


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

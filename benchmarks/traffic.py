"""Mixed traffic over all APIs of a server, with faults: lost answers, changed texts, and memory.

    python benchmarks/traffic.py --minutes 30
    python benchmarks/traffic.py --minutes 30 --kind mixed --kind leaving     # completions of all kinds
    python benchmarks/traffic.py --kind mixed --requests 200 --replicas 4 --kills 3
    python benchmarks/traffic.py --url http://127.0.0.1:8000 --process PID --minutes 5 --rate 4

Completions, chat completions, responses (stored ones are continued and deleted), messages, tokens and models, streamed
and whole, with tools and schemas. Among them: clients that disconnect; bodies that are not JSON, have
bad values, are too large or end early; prompts that are too long. An answer is lost if it does not come, has another
status than the request deserves, or is a stream without its end. Texts of "mixed" completions, which have seeds and
any parameters, must equal, byte for byte, those of the same requests alone and without speculation, in float32. With
replicas on a private Ray cluster, replicas are killed, and the front's failovers are counted.
"""

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer

from foretoken import LLM, SamplingParams
from foretoken.bench.http_load import serving
from foretoken.bench.output import report, resident_bytes
from foretoken.bench.workloads import FUNCTIONS
from options import Output
from servers import ask, talking

MAX_BODY = 2**18
OPTIONS = (
    "--dtype",
    "float32",
    "--kv-cache-memory-bytes",
    "256MiB",
    "--max-body",
    str(MAX_BODY),
    "--response-store",
    "200",
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["size", "on"],
    "additionalProperties": False,
}
SYSTEM = (
    "import os\nimport sys\nfrom collections import Counter, defaultdict\n\n\n" + "def helper(values):\n    pass\n" * 20
)
UNICODE = "names = {'日本語': 'ü', '🙂': 'μ"
REPETITION = ("north east south west " * 24, "x = 0\n" * 40)

ENDS = {  # what the last event of a stream must hold
    "/v1/completions": ("[DONE]",),
    "/v1/chat/completions": ("[DONE]",),
    "/v1/responses": ("response.completed", "response.incomplete"),
    "/v1/messages": ("message_stop",),
}


GOOD = ("completions", "mixed", "chat", "responses", "messages", "calls", "schema", "continued", "small")
FAULTS = ("leaving", "leaving", "bad_json", "bad_value", "oversize", "too_long", "cut_off", "unknown")


class Traffic:
    """Requests of every kind on one server.

    Attributes:
        counts: Answers by kind.
        lost: What was wrong with each answer that was lost.
        texts: Bodies and texts of completions with any parameters.
    """

    def __init__(self, client: httpx.AsyncClient, seed: int, kinds: Sequence[str] = ()) -> None:
        self.client, self.rng = client, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.lost: list[str] = []
        self.texts: list[tuple[dict[str, Any], str]] = []
        self._stored: list[str] = []
        self._good, self._faults = ([name for name in names if name in (kinds or names)] for names in (GOOD, FAULTS))

    async def one(self) -> None:
        """Sends one request; every fourth is a fault."""
        faulty = self._faults and (not self._good or self.rng.random() < 0.25)
        name = self.rng.choice(self._faults if faulty else self._good)
        try:
            await getattr(self, name)()
        except (httpx.HTTPError, ValueError, LookupError, AssertionError) as error:
            self.lost.append(f"{name}: {type(error).__name__}: {error}"[:300])
        self.counts[name] += 1

    def body(self, path: str) -> dict[str, Any]:
        """Returns a request that its API answers with a text."""
        prompt = self.rng.choice(FUNCTIONS) * self.rng.choice((1, 1, 1, 8))
        length = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
        said = {"messages": [{"role": "user", "content": prompt}]}
        text = {"/v1/completions": {"prompt": prompt}, "/v1/responses": {"input": prompt}}.get(path, said)
        sampled = {"temperature": self.rng.choice((0.0, 0.7, 1.0)), "seed": self.rng.randrange(1000)}
        return {"model": "foretoken", length: self.rng.randint(1, 80), **text, **sampled}

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Sends a request and reads its answer to the end, streamed or whole. Returns the answer if it is whole."""
        if self.rng.random() < 0.5:
            answer = await self.client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()
        last = ""
        async with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                last = line or last
        assert any(end in last for end in ENDS[path]), f"the stream ends with {last}"
        return None

    async def refused(self, path: str, status: int, **options: Any) -> None:
        """Sends a request that deserves ``status``."""
        answer = await self.client.post(path, **options)
        assert answer.status_code == status, f"{answer.status_code} in place of {status}: {answer.text}"
        assert answer.json()["error"]["message"]

    # answered

    async def completions(self) -> None:
        await self.post("/v1/completions", self.body("/v1/completions"))

    async def mixed(self) -> None:
        """A completion with any parameters."""
        body = any_completion(self.rng, self.counts["mixed"])
        answer = await ask(self.client, body)
        assert not answer.error, answer.error
        self.texts.append((body, answer.text))

    async def chat(self) -> None:
        await self.post("/v1/chat/completions", self.body("/v1/chat/completions"))

    async def responses(self) -> None:
        await self.post("/v1/responses", {**self.body("/v1/responses"), "store": self.rng.random() < 0.5})

    async def messages(self) -> None:
        await self.post("/v1/messages", self.body("/v1/messages"))

    async def calls(self) -> None:
        """A call whose arguments must be valid."""
        function = {"name": "set", "parameters": SCHEMA}
        body = {**self.body("/v1/chat/completions"), "max_tokens": 200, "parallel_tool_calls": False}
        body |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        answer = await self.post("/v1/chat/completions", body)
        if answer is not None:
            check(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])

    async def schema(self) -> None:
        """An answer in a schema."""
        form = {"format": {"type": "json_schema", "name": "size", "strict": True, "schema": SCHEMA}}
        body = {**self.body("/v1/responses"), "max_output_tokens": 200, "text": form}
        answer = await self.post("/v1/responses", body)
        if answer is not None:
            check(answer["output"][0]["content"][0]["text"])

    async def continued(self) -> None:
        """A stored response that is continued, read and deleted."""
        first = await self.client.post("/v1/responses", json={**self.body("/v1/responses"), "store": True})
        name = first.json()["id"]
        body = {**self.body("/v1/responses"), "previous_response_id": name, "store": False}
        await self.post("/v1/responses", body)
        assert (await self.client.get(f"/v1/responses/{name}")).json()["id"] == name
        if self.rng.random() < 0.5:
            assert (await self.client.delete(f"/v1/responses/{name}")).json()["deleted"]

    async def small(self) -> None:
        """Requests that generate no text."""
        await self.client.get("/v1/models")
        tokens = (await self.client.post("/tokenize", json={"prompt": self.rng.choice(FUNCTIONS)})).json()["tokens"]
        assert (await self.client.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
        counted = {key: value for key, value in self.body("/v1/messages").items() if key in ("model", "messages")}
        assert (await self.client.post("/v1/messages/count_tokens", json=counted)).json()["input_tokens"] > 0

    # faults

    async def leaving(self) -> None:
        """A client that disconnects, before the answer or within it."""
        path = self.rng.choice(tuple(ENDS))
        body = {**self.body(path), "stream": self.rng.random() < 0.7, "ignore_eos": True}
        with suppress(httpx.TimeoutException, TimeoutError):
            async with asyncio.timeout(self.rng.uniform(0.001, 0.5)):
                async with self.client.stream("POST", path, json=body) as answer:
                    async for _ in answer.aiter_raw():
                        if self.rng.random() < 0.2:
                            break

    async def bad_json(self) -> None:
        kind = {"Content-Type": "application/json"}
        await self.refused(self.rng.choice(tuple(ENDS)), 400, content=b'{"model": "foretoken", ', headers=kind)

    async def bad_value(self) -> None:
        path = self.rng.choice(tuple(ENDS))
        await self.refused(path, 400, json={**self.body(path), "temperature": "hot"})

    async def oversize(self) -> None:
        path = self.rng.choice(tuple(ENDS))
        await self.refused(path, 413, json={**self.body(path), "user": "x" * (MAX_BODY + 1)})

    async def too_long(self) -> None:
        await self.refused("/v1/completions", 400, json={"model": "foretoken", "prompt": "x = 1\n" * 20_000})

    async def unknown(self) -> None:
        path = self.rng.choice(tuple(ENDS))
        await self.refused(path, 404, json={**self.body(path), "model": "another"})

    async def cut_off(self) -> None:
        """A body that ends before its length."""
        address = urlsplit(str(self.client.base_url))
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: 500\r\n\r\n"
        writer.write(head.encode() + b'{"prompt": "x')
        await writer.drain()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def check(text: str) -> None:
    """Raises AssertionError for arguments or an answer that is not of the schema."""
    assert set(json.loads(text)) == {"size", "on"}, text


def any_completion(rng: random.Random, number: int) -> dict[str, Any]:
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


async def run(
    traffic: Traffic, process: int, limits: tuple[float, int | None], concurrency: int, rate: float
) -> list[tuple[float, int]]:
    """Sends requests, ``rate`` in a second at most. Returns seconds and bytes of the server's memory over time.

    limits: Minutes, and requests.
    """
    started, sent, memory = time.perf_counter(), 0, list[tuple[float, int]]()

    async def watch() -> None:
        while True:
            memory.append((time.perf_counter() - started, resident_bytes(process)))
            await asyncio.sleep(min(5.0, 10.0 * limits[0]))

    async def work(turn: asyncio.Lock) -> None:
        nonlocal sent
        while True:
            async with turn:
                passed = time.perf_counter() - started
                if passed > 60.0 * limits[0] or sent == limits[1]:
                    return
                await asyncio.sleep(max(0.0, sent / rate - passed))
                sent += 1
            await traffic.one()

    turn, watching = asyncio.Lock(), asyncio.create_task(watch())
    await asyncio.gather(*(work(turn) for _ in range(concurrency)))
    watching.cancel()
    return memory


async def kill_replicas(server: int, count: int, pause: float, killed: list[int]) -> None:
    """Kills ``count`` replicas of a server one at a time, ``pause`` seconds before each, and notes their processes.

    The last one that runs is spared: requests would wait for the next, which takes a while to start.
    """
    import psutil  # type: ignore[import-untyped]

    while len(killed) < count:
        await asyncio.sleep(pause)
        processes = psutil.Process(server).children(recursive=True)
        running = [each for each in processes if "ServeReplica" in "".join(each.cmdline()[:1])]
        if len(running) > 1:
            chosen = random.Random(len(killed)).choice(running)
            chosen.kill()
            killed.append(chosen.pid)


def failovers(page: str) -> dict[str, int]:
    """Returns the front's failovers by outcome, from its page of metrics."""
    counts = re.findall(r'foretoken:failovers_total{outcome="(\w+)"} (\S+)', page)
    return {outcome: int(float(count)) for outcome, count in counts}


def differing(texts: Sequence[tuple[dict[str, Any], str]]) -> list[dict[str, Any]]:
    """Returns the requests whose text is not, byte for byte, that of the request alone, without speculation."""
    alone = LLM(dtype="float32", speculative_config={"method": "none"})
    different = []
    for body, text in texts:
        params = {key: value for key, value in body.items() if key not in ("prompt", "speculative_method")}
        expected = alone.generate(body["prompt"], SamplingParams(**params))[0].outputs[0].text
        if expected != text:
            different.append({"body": body, "expected": expected, "got": text})
    return different


async def drained(client: httpx.AsyncClient) -> str:
    """Returns a description of sequences that still run, or of bad health; empty if the server is idle and well."""
    for _ in range(1200):
        await asyncio.sleep(0.1)
        state = (await client.get("/v1/speculation")).json()
        if state["running"] == 0:
            health = (await client.get("/health/live")).status_code
            return "" if health == 200 else f"health is {health}"
    return f"{state['running']} sequences still run"


def main(
    minutes: Annotated[float, typer.Option(help="How long, at most.")] = 30.0,
    requests: Annotated[int | None, typer.Option(help="How many, at most.")] = None,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 16,
    rate: Annotated[float, typer.Option(help="Requests per second, at most.")] = 1000.0,
    kind: Annotated[list[str], typer.Option(help=f"Only these of {', '.join(dict.fromkeys((*GOOD, *FAULTS)))}.")] = [],
    config: Annotated[str | None, typer.Option(help="Another speculative configuration, as JSON.")] = None,
    replicas: Annotated[int, typer.Option(help="Replicas on a private Ray cluster; 0 is one engine.")] = 0,
    cpus: Annotated[float | None, typer.Option(help="Cores of each. [a fair share]")] = None,
    kills: Annotated[int, typer.Option(help="Replicas to kill (SIGKILL), one at a time.")] = 0,
    pause: Annotated[float, typer.Option(help="Seconds before each.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of the mixture.")] = 0,
    url: Annotated[str | None, typer.Option(help=f"A server that runs, with {' '.join(OPTIONS)}.")] = None,
    process: Annotated[int, typer.Option(help="Its process.")] = 0,
    output: Output = None,
) -> None:
    """Prints answers by kind, lost and different ones, and memory at the beginning, in the middle and at the end."""

    async def measured(address: str, of: int) -> tuple[Traffic, list[tuple[float, int]], str, str]:
        async with talking(address) as client:
            traffic = Traffic(client, seed, kind)
            killer = asyncio.create_task(kill_replicas(of, kills, pause, killed)) if kills else None
            memory = await run(traffic, of, (minutes, requests), concurrency, rate)
            if killer is not None:
                killer.cancel()
                with suppress(asyncio.CancelledError):
                    await killer
            page = (await client.get("/metrics")).text if replicas else ""
            return traffic, memory, "" if replicas else await drained(client), page

    killed: list[int] = []
    options: tuple[str, ...] = OPTIONS if config is None else (*OPTIONS, "--speculative-config", config)
    options += ("--replicas", str(replicas)) if replicas else ()
    options += ("--replica-cpus", str(cpus)) if cpus is not None else ()
    with nullcontext((url, process)) if url else serving(*options) as (address, of):
        traffic, memory, left, page = asyncio.run(measured(address, of))
    sizes = [memory[at][1] / 2**20 for at in (0, len(memory) // 3, len(memory) // 2, -1)]
    different = differing(traffic.texts)
    said = [
        f"{sum(traffic.counts.values())} requests: {dict(sorted(traffic.counts.items()))}",
        " ".join([f"lost: {len(traffic.lost)}", *traffic.lost[:5], left]),
        f"{len(traffic.texts) - len(different)} of {len(traffic.texts)} texts byte for byte as alone",
        "memory: {:.0f} MiB at the beginning, {:.0f} after a third, {:.0f} after half, {:.0f} at the end".format(
            *sizes
        ),
        *([f"{replicas} replicas, {len(killed)} killed, failovers: {failovers(page)}"] if replicas else ()),
    ]
    record: dict[str, Any] = {
        "counts": traffic.counts,
        "lost": traffic.lost,
        "different": different,
        "failovers": failovers(page),
    }
    report(said, {}, output, **record, memory=memory, left=left)
    raise typer.Exit(bool(traffic.lost or different or left))


if __name__ == "__main__":
    typer.run(main)

"""Load on any OpenAI-compatible server: workloads, streamed completions, their times, and percentiles of them.

Prompts are short, long, with a shared beginning, or those of agents on one beginning. ``vllm bench serve`` can make the
load in place of ours, for figures that others can check.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from foretoken.bench.peers.registry import PEERS
from foretoken.bench.workloads import FUNCTIONS
from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.core.http import base_url, listed_models
from foretoken.probe.answers import Arrival, Failed, Reply, ServerAnswer
from foretoken.probe.client import Ask, EndpointClient, Patience

_PATIENCE = 600.0  # seconds for one answer


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of a quantity, in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles | None":
        """Returns the percentiles of values, None without any."""
        seconds = list(values)
        return cls(*(float(value) for value in np.quantile(seconds, (0.5, 0.9, 0.99)))) if seconds else None


@dataclass(frozen=True)
class LoadResult:
    """Figures of one workload at one concurrency."""

    workload: str  # its name
    concurrency: int  # requests at once
    requests: int  # requests that were sent
    failed: int  # requests that failed
    seconds: float  # time from the first request to the last answer
    prompt_tokens: float  # mean tokens of a prompt
    cached_share: float  # share of prompt tokens that the server had cached
    output_tokens_per_second: float  # generated tokens of all requests per second
    requests_per_second: float  # answers per second
    ttft: Percentiles | None  # seconds to the first text
    itl: Percentiles | None  # seconds between chunks with text
    tpot: Percentiles | None  # seconds per token after the first
    error: str | None = None  # the first error, if any request failed

    @classmethod
    def of(cls, workload: str, concurrency: int, replies: Sequence[Reply], seconds: float) -> "LoadResult":
        """Returns the figures of replies that took ``seconds`` together."""
        done = [reply for reply in replies if isinstance(reply, ServerAnswer) and reply.arrivals]
        errors = [reason for reply in replies if (reason := _failure(reply))]
        prompts = sum(answer.prompt_tokens for answer in done)
        return cls(
            workload=workload,
            concurrency=concurrency,
            requests=len(replies),
            failed=len(errors),
            seconds=seconds,
            prompt_tokens=prompts / len(done) if done else 0.0,
            cached_share=sum(answer.cached_tokens for answer in done) / prompts if prompts else 0.0,
            output_tokens_per_second=sum(answer.tokens for answer in done) / seconds,
            requests_per_second=len(done) / seconds,
            ttft=Percentiles.of(answer.arrivals[0].seconds for answer in done),
            itl=Percentiles.of(gap for answer in done for gap in answer.gaps),
            tpot=Percentiles.of(value for answer in done if (value := answer.per_token) is not None),
            error=errors[0] if errors else None,
        )


def _failure(reply: Reply) -> str:
    """Returns the reason why a request failed, "" if it did not."""
    if isinstance(reply, ServerAnswer):
        return "" if reply.arrivals else "an answer had no text"
    return reply.why


class LoadedServer:
    """A server under load. Raises ForetokenError if it does not answer, or does not list the model.

    Args:
        url: Its address, with or without ``/v1``.
        key: An API key, if it asks for one.
        model: Name of the model; None takes the first that the server lists.
        options: Fields of every request, such as the temperature.
        lengths: ``max_tokens`` of the requests, one after another and again from the first; none: as ``options`` say.
    """

    def __init__(
        self, url: str, key: str | None, model: str | None, options: dict[str, Any], lengths: Sequence[int] = ()
    ) -> None:
        self.url, self._key = base_url(url), key
        self._options, self._lengths = options, cycle(lengths)
        listed = [str(entry["id"]) for entry in listed_models(self.url, key)]
        if model is not None and model not in listed:
            raise ForetokenError(f"{self.url} serves no model {model!r}; it serves {', '.join(listed)}")
        self.model = model or listed[0]

    def run(self, workload: str, prompts: Sequence[str], concurrency: int) -> LoadResult:
        """Sends all prompts, ``concurrency`` at a time, and returns the figures."""
        client = EndpointClient(self.url, self._key, Patience(timeout=_PATIENCE, retries=0, failures=len(prompts)))
        asks = [Ask(self._body(prompt), str(number)) for number, prompt in enumerate(prompts)]
        started = time.perf_counter()
        replies = client.post("completions", asks, concurrency)
        return LoadResult.of(workload, concurrency, replies, time.perf_counter() - started)

    def _body(self, prompt: str) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "stream": True, **self._options}
        length = next(self._lengths, None)
        return body | {"stream_options": {"include_usage": True}} | ({"max_tokens": length} if length else {})


SHORT, LONG, SHARED, AGENTS = WORKLOADS = ("short", "long", "shared", "agents")
_CHARACTERS = 3.2  # of a token of Python, about; the server's own count is reported
_COLD = 2  # beginnings that are sent one by one, each of which takes the whole prefill


@dataclass(frozen=True)
class LoadPlan:
    """Numbers of requests and tokens to send."""

    concurrencies: tuple[int, ...] = (1, 4, 16, 64)  # requests at once, one run for each
    per_client: int = 2  # requests of each concurrent client
    long_tokens: int = 1500  # tokens of a long prompt, about
    shared_tokens: int = 2000  # tokens of a shared beginning, about
    agents: int = 8  # number of agents


def run_workload(name: str, server: LoadedServer, plan: LoadPlan) -> Iterator[LoadResult]:
    """Yields the results of a workload. No prompt repeats an earlier one, so only what it shares is cached.

    short: functions of ours. long: other text before each. shared: one beginning before each, the first time cold.
    agents: first each with a beginning of its own (agents, cold), then all on one that was sent once (agents, warm);
    one by one and all at once. One by one, two are cold.
    """
    if name == AGENTS:
        yield from _agents(server, plan)
        return
    for concurrency in plan.concurrencies:
        count = max(4, concurrency * plan.per_client)
        beginning = "" if name == SHORT else filler(plan.shared_tokens if name == SHARED else plan.long_tokens)
        prompts = [
            f"{beginning if name == SHARED else own(beginning)}{own(FUNCTIONS[i % len(FUNCTIONS)])}"
            for i in range(count)
        ]
        yield server.run(name, prompts, concurrency)


def _agents(server: LoadedServer, plan: LoadPlan) -> Iterator[LoadResult]:
    beginning = filler(plan.shared_tokens)
    for concurrency in (1, plan.agents):
        cold = [own(beginning) + task(i) for i in range(max(_COLD, concurrency))]
        yield server.run(f"{AGENTS}, cold", cold, concurrency)
        shared = own(beginning)
        server.run(AGENTS, [shared], 1)
        yield server.run(f"{AGENTS}, warm", [shared + task(i) for i in range(plan.agents)], concurrency)


def filler(tokens: int) -> str:
    text = "\n\n\n".join(f"{function}\n        pass" for function in FUNCTIONS)
    size = int(tokens * _CHARACTERS)
    return (f"{text}\n\n\n" * (size // len(text) + 1))[:size]


def own(text: str) -> str:
    """Returns a text with a first line that no other prompt has."""
    return f"# {secrets.token_hex(8)}\n{text}" if text else text


def task(number: int) -> str:
    """Returns the text that an agent adds to the common beginning."""
    return f"\n\n\n# agent {number}\n{FUNCTIONS[number % len(FUNCTIONS)]}"


GENERATORS = ("foretoken", "vllm")
_RESULT = "result.json"
# vLLM's CPU build is a package of another name, with which its command line does not start.
_PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


class VllmLoadedServer(LoadedServer):
    """A server under the load of ``vllm bench serve``, which sends the same prompts and does its own timing.

    Args:
        url: Its address, with or without ``/v1``.
        key: An API key, if it asks for one.
        model: Name of the model; None takes the first that the server lists.
        options: ``max_tokens`` and ``temperature`` of every request.
        tokenizer: Folder of the model's tokenizer, with which the generator counts tokens.

    Raises:
        ForetokenError: The server does not answer, or does not list the model.
        InvalidRequest: vLLM is not installed here.
    """

    def __init__(self, url: str, key: str | None, model: str | None, options: dict[str, Any], tokenizer: str) -> None:
        super().__init__(url, key, model, options)
        self._command, self._tokenizer = _command(), tokenizer

    def run(self, workload: str, prompts: Sequence[str], concurrency: int) -> LoadResult:
        """Sends all prompts, ``concurrency`` at a time, and returns what the generator measured.

        Raises ForetokenError with the generator's last words if it failed.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "prompts.jsonl"
            file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
            command = [*self._command, *self._words(file, len(prompts), concurrency)]
            environment = os.environ | ({"OPENAI_API_KEY": self._key} if self._key else {})
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            result = Path(folder) / _RESULT
            if ran.returncode or not result.exists():
                raise ForetokenError(f"vllm bench serve failed: {_reason(ran.stderr or ran.stdout)}")
            record = json.loads(result.read_text(encoding="utf-8"))
        return LoadResult.of(workload, concurrency, answers_of(record), record["duration"])

    def _words(self, file: Path, count: int, concurrency: int) -> list[str]:
        options = {
            "--backend": "openai",
            "--base-url": self.url,
            "--model": self.model,
            "--tokenizer": self._tokenizer,
            "--dataset-name": "custom",
            "--dataset-path": str(file),
            "--custom-output-len": str(self._options["max_tokens"]),
            "--num-prompts": str(count),
            "--max-concurrency": str(concurrency),
            "--temperature": str(self._options["temperature"]),
            "--result-dir": str(file.parent),
            "--result-filename": _RESULT,
        }
        flags = ("skip-chat-template", "disable-shuffle", "disable-tqdm", "ignore-eos", "save-result", "save-detailed")
        return [word for pair in options.items() for word in pair] + [f"--{flag}" for flag in flags]


def _command() -> list[str]:
    if not PEERS["vllm"].missing:
        return [str(PEERS["vllm"].python), "-c", _PROGRAM]
    if (program := shutil.which("vllm")) is not None:
        return [program, "bench", "serve"]
    raise InvalidRequest("no vllm program here; install vLLM, or take --generator foretoken")


def _reason(printed: str) -> str:
    """Returns the last line that tells of an error; libraries print other ones behind it."""
    lines = [line for line in printed.splitlines() if line.strip()] or ["it printed nothing"]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1])


def answers_of(record: dict[str, Any]) -> list[Reply]:
    """Returns the requests of a detailed result of ``vllm bench serve``."""
    fields = ("ttfts", "itls", "input_lens", "output_lens", "errors")
    replies: list[Reply] = []
    for first, gaps, prompt, tokens, error in zip(*(record[name] for name in fields), strict=True):
        times = accumulate([first, *gaps]) if tokens else ()
        arrivals = tuple(Arrival(seconds, None, 0) for seconds in times)
        answer = ServerAnswer("", prompt_tokens=prompt, tokens=tokens, arrivals=arrivals)
        replies.append(Failed(error) if error else answer)
    return replies


_START_PATIENCE = 600.0  # seconds in which a server must have loaded, and compiled where it does


@contextmanager
def server_process(
    command: Sequence[str], ready: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, int]]:
    """Runs a server within the ``with`` block. Yields its address and its process id.

    Raises ForetokenError with the server's last line if it does not start.

    command: The command without ``--host`` and ``--port``, which are added. ready: Path that answers 200 once the
    server can be used.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words, variables = [*command, "--host", "127.0.0.1", "--port", str(port)], {**os.environ, **(environment or {})}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as said,
        subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=said, env=variables) as process,
    ):
        try:
            address, end = f"http://127.0.0.1:{port}", time.monotonic() + _START_PATIENCE
            while not _answers(f"{address}{ready}"):
                if process.poll() is not None or time.monotonic() > end:
                    said.seek(0)
                    line = said.read().strip().splitlines()[-1:] or ["it said nothing"]
                    raise ForetokenError(f"the server did not start: {line[0]}")
                time.sleep(0.1)
            yield address, process.pid
        finally:
            process.terminate()
            process.wait(120)


def serving(*arguments: str, key: str | None = None) -> AbstractContextManager[tuple[str, int]]:
    """Runs a server of ours, as ``server_process`` does. key: Its API key, if it asks for one."""
    command = [sys.executable, "-m", "foretoken", "serve", "--log-level", "error", *arguments]
    return server_process(command, "/ready", {"FORETOKEN_API_KEY": key} if key else None)


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=5.0).status_code == 200
    return False

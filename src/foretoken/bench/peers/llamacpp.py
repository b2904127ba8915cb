"""llama.cpp through its own server, one prompt at a time; timings are those that the server reports."""

import http.client
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from foretoken.bench.peers.protocol import Answer, Complete, PeerRequest, Setup, die_with_parent

# Programs for this processor, or for the instruction set that FORETOKEN_CPU takes of it, each in a folder of its own.
BUILD = "-".join(filter(None, ("build", os.environ.get("FORETOKEN_CPU"))))
SERVER = Path(sys.prefix) / BUILD / "bin" / "llama-server"
NGRAM = 2  # tokens that must repeat; llama.cpp looks up one length, and proposes only where as many tokens follow


def load(setup: Setup) -> tuple[Complete, str]:
    """Starts the server. The draft length is an argument of it, so every depth is a separate process."""
    server = LlamaServer([str(SERVER), *arguments(setup)])
    requests = 0

    def complete(ask: PeerRequest) -> Answer:
        nonlocal requests
        requests += 1
        return answer(server.post("/completion", request(ask, seed=requests)))

    return complete, version()


def version() -> str:
    """Returns the version that the server prints."""
    done = subprocess.run([str(SERVER), "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"version: (\d[\w.]*)", done.stdout + done.stderr)
    return match[1] if match else ""


def arguments(setup: Setup) -> list[str]:
    """Returns the server's arguments: one slot, no prompt cache, all else as by default."""
    threads, size = str(setup.threads), str(setup.max_length)
    args = ["--model", setup.target, "--threads", threads, "--ctx-size", size, "--parallel", "1", "--cache-ram", "0"]
    if setup.method == "draft_model":
        args += ["--spec-type", "draft-simple", "--spec-draft-model", setup.draft, "--spec-draft-threads", threads]
        args += ["--spec-draft-n-max", str(setup.depth), "--spec-draft-p-min", "0"]
    elif setup.method == "ngram":
        args += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(min(NGRAM, setup.depth))]
        args += ["--spec-ngram-simple-size-m", str(setup.depth)]
    return args


def request(ask: PeerRequest, seed: int) -> dict[str, Any]:
    """Returns the body of a completion: greedy, or plain sampling at a temperature."""
    sampling: dict[str, Any] = {"samplers": ["top_k"], "top_k": 1, "temperature": 0.0}
    if ask.temperature:
        sampling = {"samplers": ["temperature"], "temperature": ask.temperature, "seed": seed}
    return sampling | {
        "prompt": ask.prompts[0],
        "n_predict": ask.max_tokens,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }


def answer(reply: dict[str, Any]) -> Answer:
    """Converts a completion. Each pass emits one token besides the accepted ones."""
    timings = reply["timings"]
    prefill, decode = timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3
    passes = timings["predicted_n"] - timings.get("draft_n_accepted", 0)
    return Answer([reply["tokens"]], prefill + decode, prefill, 1, passes)


class LlamaServer:
    """A running ``llama-server`` on a free port of this machine. Raises RuntimeError with its last words if it ends.

    ``log`` receives its output; None is standard error.
    """

    def __init__(self, command: list[str], log: TextIO | None = None) -> None:
        place = ["--host", "127.0.0.1", "--port", "0", "--no-ui", "--offline"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
        self._process = subprocess.Popen(
            [*command, *place],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=clean,
            preexec_fn=die_with_parent,
        )
        self._last, self._log = "", log or sys.stderr
        self._port = self._listening()
        self._drainer = threading.Thread(target=self._drain, daemon=True)
        self._drainer.start()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Returns the JSON reply to a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(f"llama-server does not answer ({error}); it said: {self._last}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"llama-server refused {path}: {text}")
        return json.loads(text)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._drainer.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _listening(self) -> int:
        """Waits until the model is loaded. Returns the port."""
        for line in self._lines():
            if match := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line):
                return int(match[1])
        raise RuntimeError(f"llama-server stopped: {self._last}")

    def _drain(self) -> None:
        """Copies the rest of the server's output, so that its pipe never fills."""
        for _ in self._lines():
            pass

    def _lines(self) -> Iterator[str]:
        """Yields the server's output and copies it to the log."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._log.write(line)
            self._last = line.strip() or self._last
            yield line

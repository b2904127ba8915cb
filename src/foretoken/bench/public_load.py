"""Load made by a public generator in place of ours: ``vllm bench serve``, for figures that others can check."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from foretoken.bench.http_load import LoadedServer, LoadResult
from foretoken.bench.peers.registry import PEERS
from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.probe.answers import Arrival, Failed, Reply, ServerAnswer

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

        Raises:
            ForetokenError: The generator failed; with its last words.
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

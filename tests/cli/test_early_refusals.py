"""Wrong arguments and requests are refused in a line that names option, value and fix, before the slow imports."""

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from foretoken.bench.workloads import load_prompts
from foretoken.cli.chat_screen import piped
from foretoken.core.errors import InvalidRequest

HEAVY = ("torch", "transformers", "numpy")
RUN = """
import io, json, sys
from contextlib import redirect_stderr
from foretoken.cli.main import main
for args in json.loads(sys.argv[1]):
    with redirect_stderr(io.StringIO()) as said:
        try:
            main(args)
        except SystemExit as exit:
            code = exit.code
    print(json.dumps([code, said.getvalue(), sorted(HEAVY & sys.modules.keys())]))
""".replace("HEAVY", repr(set(HEAVY)))

CASES: list[tuple[str, str]] = [
    ("generate x --temperature nan", "--temperature must be a finite number, got nan"),
    ("generate x --temperature -1", "temperature must be"),
    ("generate x --top-p inf", "--top-p must be a finite number, got inf"),
    ("generate x --n 0", "n must be"),
    ("generate x --max-tokens 0", "max_tokens must be"),
    ("generate x --top-p 0", "top_p must be"),
    ("generate x --exactness perhaps", "exactness must be one of distribution, trajectory, lossy-typical"),
    ("generate x --dtype float7", "dtype 'float7' is not known"),
    ("generate x --quantization int3", "quantization 'int3' is not known"),
    ("generate x --weight-format zip", "weight_format 'zip' is not known"),
    ("generate x --kv-cache-dtype fp8", "kv_cache_dtype 'fp8' is not known"),
    ("generate x --max-model-len 0", "max_model_len must be"),
    ("generate x --tensor-parallel-size 0", "tensor_parallel_size must be"),
    ('generate x --speculative-config {"method":"ngrm"}', "speculative method 'ngrm' is not known"),
    ("generate x --speculative-config {", "--speculative-config is not JSON"),
    ("generate x --speculative-config []", "--speculative-config must be a JSON object"),
    ('generate x --speculative-config {"method":"magic"}', "known: draft_model"),
    ("generate x --prediction-file /no/such/file", "cannot read the prediction"),
    *(
        (f"{command} --html {file}", f"--html {file}: expected the name of a file in a folder that exists")
        for command in ("generate x", "plan", "audit", "bench race")
        for file in ("/no/such/folder/page.html", ".")
    ),
    ("chat --temperature nan", "--temperature must be a finite number"),
    ("chat --top-p 2", "top_p must be"),
    ("chat --method telepathy", "speculative method 'telepathy' is not known"),
    ("chat --chat-template /no/such/file", "/no/such/file"),
    ("serve --request-timeout nan", "--request-timeout"),
    ("serve --replica-cpus nan --replicas 1", "--replica-cpus must be a finite number"),
    ("serve --log-level loud", "--log-level must be one of"),
    ("serve --kv-cache-memory-bytes lots", "--kv-cache-memory-bytes must be a size such as 2GiB"),
    ("serve --response-store some", "--response-store must be a size"),
    ("serve --response-store 0", "--response-store must be at least 1"),
    ("serve --chat-template /no/such/file", "cannot read the chat template"),
    ("serve --speculative-config {", "not JSON"),
    ("serve --max-replicas 2", "need --replicas"),
    ("serve --replicas 3 --max-replicas 2", "--max-replicas (2) must be at least --replicas (3)"),
    ("serve --replicas 2 --tensor-parallel-size 2", "cannot be combined"),
    ("serve --replicas 2 --response-store 9", "responses are kept by one process"),
    ("serve --lora-modules a=x --tensor-parallel-size 2", "LoRA adapters are computed by the compiled runtime"),
    ("serve --lora-modules a=x --backend hf", "LoRA adapters are computed by the compiled runtime"),
    ("serve --port 0 --allowed-host http://a", "--allowed-host must be a host name"),
    ("serve --port 0 --methods telepathy", "speculative method 'telepathy' is not known"),
    ("serve --port 0 --backend magic", "backend 'magic' is not known"),
    ("serve --host no.such.host.invalid", "cannot listen"),
    ("demo --temperature nan", "--temperature must be a finite number"),
    ("plan --top-p nan", "--top-p must be a finite number"),
    ("plan --dtype float7", "dtype 'float7' is not known"),
    ("plan --rtt inf", "--rtt must be a finite number"),
    ("simulate --rtt nan", "--rtt must be a finite number"),
    ("audit --temperature nan", "--temperature must be a finite number"),
    ("audit --dtype float7", "dtype 'float7' is not known"),
    ("audit --budget never", "--budget"),
    ("bench race --temperature nan", "--temperature must be a finite number"),
    ("train draft out --learning-rate nan", "finite number"),
]


def refusals(cases: list[list[str]], **environment: str) -> list[tuple[int, str, list[str]]]:
    """The exit code of each, what was said on standard error, and what was imported by then."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(cases)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def said() -> dict[str, tuple[int, str, list[str]]]:
    return dict(zip(dict(CASES), refusals([case.split() for case, _ in CASES]), strict=True))


@pytest.mark.parametrize("case, words", CASES)
def test_wrong_arguments(said: dict[str, tuple[int, str, list[str]]], case: str, words: str) -> None:
    code, line, imported = said[case]
    assert code in (1, 2) and line.count("\n") == 1 and words in line
    assert imported == []


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        [(code, line, imported)] = refusals([["serve", "--port", port]])
    assert code == 1 and f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another" in line
    assert imported == []


@pytest.mark.parametrize("environment", [{"PYTHONUTF8": "1"}, {"PYTHONIOENCODING": "utf-8:strict"}, {"LC_ALL": "C"}])
@pytest.mark.slow
def test_standard_input_that_is_no_text(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "foretoken", "generate", "-"],
        input=b"gr\xfc\xdfe\n",
        capture_output=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 1 and done.stdout == b"" and done.stderr.count(b"\n") == 1
    assert b"error: standard input is not text in utf-8: byte 0xfc at position 2" in done.stderr


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_messages_that_are_no_text(errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = io.TextIOWrapper(io.BytesIO(b"hello\ngr\xfc\xdfe\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", given)
    with pytest.raises(InvalidRequest, match="standard input is not text in utf-8: byte 0xfc at position"):
        list(piped())


def test_prompts_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_bytes(b'{"prompt": "gr\xfc\xdfe"}\n')
    with pytest.raises(InvalidRequest, match="expected JSON lines in UTF-8"):
        load_prompts(tmp_path / "prompts")


ENDPOINT = "--endpoint http://127.0.0.1:9"
MODEL = f"{ENDPOINT} --model m"
DURATION = "a time such as 90s, 5m or 1h"

REFUSED = {
    "generate ''": "the prompt is empty",
    "generate a --model /no/such/folder": "there is no folder '/no/such/folder'",
    """generate a --speculative-config '{"metod": 1}'""": "unknown key(s) in speculative_config: metod; known: method",
    "generate a --device abacus": "device 'abacus' is not known",
    "serve --port 0 --api-key ''": "--api-key must not be empty",
    "serve --port 0 --model /no/such/model": "there is no folder '/no/such/model'",
    "audit --budget soon": f"--budget must be {DURATION}, got 'soon'",
    "audit --budget 0s": f"--budget must be {DURATION}, got '0s'",
    "audit --temperature 0 --budget 1s": "temperature must be a number of at least 0.05, got 0.0",
    "audit --prompts nowhere.jsonl": "cannot read the prompts nowhere.jsonl",
    """audit --engine transformers --speculative-config '{"method": "suffix"}'""": "transformers assists with",
    "audit --engine vllm --dry-run": "--dry-run goes with --endpoint URL",
    "audit --engine vllm --budget lots": f"--budget must be {DURATION}, or for an endpoint tokens",
    f"audit {ENDPOINT}": "--endpoint needs --model",
    f"audit {MODEL} --budget lots": f"--budget must be {DURATION}, or for an endpoint",
    f"audit {MODEL} --server apache": "--server must be auto, foretoken, vllm",
    f"audit {MODEL} --draft-model d": "the endpoint chooses its own draft",
    "audit --dry-run": "--dry-run goes with --endpoint URL",
    "audit --baseline http://127.0.0.1:9": "--baseline goes with --endpoint URL",
    "audit --checkpoint m": "--checkpoint goes with --endpoint URL",
    f"plan {ENDPOINT}": "--endpoint needs --model",
    f"plan {MODEL} --budget lots": f"--budget must be {DURATION}",
    f"plan {MODEL} --server apache": "--server must be auto, foretoken, vllm",
    f"plan {MODEL} --draft-model d": "--draft-model and --heads of a server's plan need --checkpoint",
    f"plan {MODEL} --temperature 0 --temperature 1": "a plan for a server takes one --temperature",
    f"plan {MODEL} --with nothing.json": "--with nothing.json: expected a record",
    f"plan {MODEL} --top-p 0.9": "--top-p does not go with --endpoint",
    f"plan {MODEL} --batch 4": "--batch does not go with --endpoint",
    f"plan {MODEL} --engine vllm": "--engine does not go with --endpoint",
    f"plan {MODEL} --rtt 20": "--rtt does not go with --endpoint",
    "plan --max-model-len 64": "--max-model-len belongs to --dry-run",
    "plan --dry-run --draft-model a --draft-model b": "--dry-run sums the memory of one drafter",
    "plan --concurrency 4": "--concurrency goes with --endpoint URL",
    "plan --depth 4": "--depth goes with --endpoint URL",
    "plan --rtt -1": "--rtt must be a number",
    "plan --rtt 5 --batch 2": "--rtt predicts one request at a time",
    "bench race --peers vlm": "unknown peer 'vlm'; known: transformers, openvino, vllm, llamacpp, or none",
    "bench race --target .": "--target was given without --draft; name its draft too",
    "bench race --speculative-config {": "--speculative-config is not JSON",
    "bench race --quantization int5": "quantization 'int5' is not known to the race; known: int8, int4",
    "bench race --target a.gguf --draft b --quantization q4_0": "--quantization does not change the weights of a.gguf",
    "bench costs --parts pases": "unknown part 'pases'; known: passes, transformers, steps, startup",
    "bench costs --rows 1,x": "--rows must be positive integers such as 1,4,16, got '1,x'",
}


@pytest.mark.parametrize("command, said", REFUSED.items())
def test_wrong_requests_are_one_line(run, pair, own_cache, command, said):
    result = run(command)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"foretoken: error: {said}") and result.err.count("\n") == 1

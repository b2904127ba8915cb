"""Wrong requests are refused in one line that names the option, the expected value and the fix."""

from __future__ import annotations

import pytest

ENDPOINT = "--endpoint http://127.0.0.1:9"
MODEL = f"{ENDPOINT} --model m"
DURATION = "a time such as 90s, 5m or 1h"

REFUSED = {
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

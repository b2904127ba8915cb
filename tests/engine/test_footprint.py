"""Memory before loading: predicted against measured, and refused where it does not fit."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.models.test_memory import large as large
from tests.models.test_native import needs_kernels

from foretoken import LLM, zoo
from foretoken.cli.main import main
from foretoken.core.devices import Memory
from foretoken.core.errors import ModelLoadError
from foretoken.engine.footprint import MemoryOptions, plan_memory
from foretoken.models.formats import memory
from foretoken.speculation import SpeculativeConfig

pytestmark = [pytest.mark.slow, needs_kernels]

NONE, COPY = {"method": "none"}, {"method": "self_quantized"}
DRAFT = {"method": "draft_model", "model": "LARGE"}
CASES: list[tuple[dict[str, Any], Mapping[str, Any]]] = [
    ({"weight_format": "raw"}, NONE),
    ({"weight_format": "raw", "kv_cache_dtype": "int8"}, DRAFT),
    ({"weight_format": "raw"}, COPY),
    ({"quantization": "int8"}, COPY),
]
# Each case in a process that is forked after the imports: its peak above what it had before.
MEASURE = """
import json, os, re, sys
from pathlib import Path
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from foretoken import LLM, SamplingParams, zoo
from foretoken.models.runners.native.cache import wait

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

folder, cases = sys.argv[1], json.loads(sys.argv[2])
for options, config in cases:
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            sys.exit(1)
        continue
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    small = LLM(zoo.path("draft"), dtype="bfloat16", **options, speculative_config={"method": "none"})
    small.generate("x", params)  # kernels, threads
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    before = status("VmRSS")
    llm = LLM(folder, dtype="bfloat16", speculative_config=config, **options)
    llm.generate({"prompt_token_ids": [i % 300 for i in range(490)]}, params)
    print(json.dumps(status("VmHWM") - before), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def folder(large: Path, tokenizer: Any) -> Path:
    tokenizer.save_pretrained(large)
    return large


def of(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return {key: str(folder) if value == "LARGE" else value for key, value in config.items()}


def test_predicted_memory_is_near_the_peak(folder: Path, tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux to measure")
    cases = [(options, of(config, folder)) for options, config in CASES]
    command = [sys.executable, "-c", MEASURE, str(folder), json.dumps(2 * cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    peaks = list(map(json.loads, done.stdout.splitlines()))  # the allocator keeps more of freed memory in some
    for (options, config), peak in zip(cases, map(min, peaks[: len(cases)], peaks[len(cases) :]), strict=True):
        memory_options = MemoryOptions(dtype="bfloat16", **options)
        ratio = plan_memory(folder, SpeculativeConfig.of(config), memory_options).total / peak
        assert 0.9 < ratio < 1.2, f"{options} {config}: {ratio:.2f} of {peak / 2**20:.0f} MiB"


@pytest.mark.parametrize(
    "free, options, advice",
    [
        (210, {}, "quantization='int8' fits, with 0.1 GiB"),
        (120, {}, "quantization='int4' fits, with 0.1 GiB"),
        (10, {}, "a smaller model, or another machine"),
        (150, {"kv_cache_dtype": "int8", "quantization": "int8"}, "without a drafter it fits, with 0.1 GiB"),
    ],
)
def test_too_much_is_refused_before_loading_with_an_option_that_fits(folder, monkeypatch, free, options, advice):
    monkeypatch.setattr(memory, "machine_memory", lambda: Memory(free * 2**20, 2**40))
    monkeypatch.setattr("foretoken.llm.load_model", lambda *_, **__: pytest.fail("loaded"))
    config = {"method": "draft_model", "model": str(zoo.path("target"))} if options else NONE
    with pytest.raises(ModelLoadError, match=f"are free on cpu; .*{advice}") as error:
        LLM(folder, speculative_config=config, dtype="bfloat16", weight_format="raw", **options)
    assert "for the weights of" in str(error.value) and "KV cache of 512 tokens" in str(error.value)


LIMITED = """
import resource, sys
from pathlib import Path
from foretoken import LLM
from foretoken.core.errors import ModelLoadError
from foretoken.engine.footprint import MemoryOptions, plan_memory
from foretoken.speculation import SpeculativeConfig

folder, options = Path(sys.argv[1]), {"dtype": "bfloat16", "weight_format": "raw"}
needed = plan_memory(folder, SpeculativeConfig(method="none"), MemoryOptions(**options)).total
for share in (0.1, 0.95, 1.0, 1.05, 10):
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + int(share * needed), resource.RLIM_INFINITY))
    try:
        LLM(folder, speculative_config={"method": "none"}, **options)
        print("loaded")
    except ModelLoadError as error:
        print(error)
"""


def test_models_load_or_are_refused_under_a_limit_of_the_address_space(folder: Path) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs Linux's address space")
    done = subprocess.run([sys.executable, "-c", LIMITED, str(folder)], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    unmapped, refused, *others, last = done.stdout.splitlines()
    assert "cannot map" in unmapped and "GiB, into memory" in unmapped
    assert "needs 0.2 GiB" in refused and "GiB are free on cpu" in refused
    assert last == "loaded" and all(answer == "loaded" or "needs 0.2 GiB" in answer for answer in others)


@pytest.mark.parametrize(
    "failure", [MemoryError(), RuntimeError("can't start new thread"), OSError(12, "Cannot allocate memory")]
)
def test_an_allocation_that_fails_while_loading_is_reported_with_the_sum(folder, monkeypatch, failure):
    def load(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr("foretoken.llm.load_model", load)
    with pytest.raises(
        ModelLoadError, match=r"memory ran out \(.*\): .* needs 0\.\d GiB .* were free on cpu; free memory"
    ):
        LLM(folder, speculative_config=NONE, dtype="bfloat16")
    monkeypatch.setattr("foretoken.llm.load_model", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("damaged")))
    with pytest.raises(RuntimeError, match="damaged"):
        LLM(folder, speculative_config=NONE, dtype="bfloat16")


def test_a_dry_run_prints_the_sum_without_loading(folder, capsys, monkeypatch):
    def run(*more: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as exit_:
            main(["plan", "--dry-run", str(folder), "--draft-model", str(zoo.path("draft")), *more])
        return int(exit_.value.code or 0), capsys.readouterr().out

    monkeypatch.setattr("foretoken.models.loading.load_model", lambda *_, **__: pytest.fail("loaded"))
    code, text = run("--json")
    record = json.loads(text)
    assert not code and [model["role"] for model in record["models"]] == ["target", "auto"] and record["fits"]
    parts = sum(model["weights"] + model["scratch"] for model in record["models"]) + record["kv_cache"]
    assert record["total"] == parts and record["kv_cache_tokens"] == 512
    code, text = run()
    assert not code and "It fits." in text
    monkeypatch.setattr(memory, "machine_memory", lambda: Memory(2**27, 2**40))
    code, text = run("--max-model-len", "64")
    assert code == 3 and "It does not fit." in text

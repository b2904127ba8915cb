"""Every benchmark runs for a few seconds on the bundled pair, so that none breaks unseen. Figures mean nothing here."""

import asyncio
import importlib
import json
import random
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from tests.audit.endpoint.fake import Behaviour
from tests.audit.endpoint.fake import serving as fake_server
from tests.audit.endpoint.test_engines import Fake, through
from tests.plan.endpoint.simulated import StreamingBehaviour
from tests.plan.endpoint.simulated import streaming as simulated_server
from typer.testing import CliRunner

from foretoken import LLM, SamplingParams, zoo
from foretoken.audit.endpoint.engines import EnginePair
from foretoken.bench.http_load import LoadResult, Percentiles
from foretoken.bench.peers.registry import PEERS
from foretoken.core.draft import Draft
from foretoken.models.base import Handle
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.checkpoint import load_config
from foretoken.models.loading import load_model
from foretoken.models.runners.pass_plan import PassPlan

FOLDER = Path(__file__).parents[2] / "benchmarks"
NGRAM = """--config '{"method": "ngram", "num_speculative_tokens": 4}'"""
COPYING = ('\'{"method": "suffix"}\'', '\'{"method": "ngram"}\'')  # cost nothing to load
COMMANDS = {
    "acceptance": '--config \'{"method": "ngram"}\' --count 1 --tokens 8 --nodes 4 --temperature 0 --batch 1',
    "traffic": "--minutes 0.05 --rate 12",
    "audits": f"proposers {NGRAM} --budget 1 --no-peers --prompts prompts.jsonl",
    "defaults": "--target TARGET --draft DRAFT --count 2 --batch 2 --tokens 8 --temperature 1 "
    "--prompts prompts.jsonl --by-category "
    """--config '{"method": "draft_model", "num_speculative_tokens": 2}'""",
    "exactness_grid": "--count 1 --max-tokens 8 --dtype float32 --depth 4 --temperature 0",
    "gpu": "--small --tokens 8 --batch 2 --repeats 1",
    "footprint": "--case 3",
    "long_context": "--target TARGET --part prefill --part attention --part loss --cache int8 --context 80 --rows 1 "
    "--turns 1 --prompt 100 --windows 1",
    "loading": "--model TARGET --repeats 1 --touch --tokens 4",
    "schemes": "--small --scheme int8 --scheme bf16 --scheme packed --rows 1 --rows 3 --context 20 --turns 2 --loads 1",
    "verification": "--rows 3 --vocabulary 512 --repeats 4",
    "never_slower": "--small --proposer wrong --text code --temperature 0 --batch 1 --tokens 8 --requests 1 "
    "--repeats 1",
    "planner": f"--small {' '.join(f'--config {each}' for each in COPYING)} --count 2 --unseen 1 --max-tokens 8 "
    "--temperature 0 --batch 1 --depth 2 --nodes 8 --turns 3",
    "quantization": "--model DRAFT --scheme int4-g64 --scheme Q4_K_M --windows 2 --characters 4000",
    "request_fuzz": "--pairs 4 --dtype float32 --no-heads",
    "structured": "--requests 2 --max-tokens 40",
    "threads": "--model DRAFT --threads 2 --tokens 8 --repeats 1",
    "vocabulary": "--model DRAFT --steps 4 --history 5 --case logprobs\\ 5 --case recycling,\\ idle",
    "two_workers": "--small --count 1 --tokens 8 --repeats 1 --transport thread",
}
"""Short forms of the benchmarks that take ``--output``, by module."""
SMALLER = {"request_fuzz": {"TINY": [{"method": "ngram"}, {"method": "suffix"}], "BATCH": 6}}
"""Constants in the place of those of a benchmark that its options do not change."""
ELSEWHERE = {
    "attacks": "tests/serve/test_attacks.py",
    "attackers": "its attacks",
    "options": "imported by the others",
    "real_models": "imported by options and tests/real.py",
    "predictions": "imported by planner, plan_endpoint and vllm_plan",
    "servers": "imported by traffic, attacks, plan_endpoint, audits and others",
    "systems": "imported by defaults, never_slower, planner and others",
    "record_streams": "needs a real model; tests/control/test_streams.py replays what it wrote",
}


def call(name: str, arguments: list[str]) -> str:
    """Runs the benchmark in this process and returns what it printed."""
    result = CliRunner().invoke(app_of(name), arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def app_of(name: str) -> typer.Typer:
    """Returns the benchmark as a command line application."""
    module = importlib.import_module(name)
    if not hasattr(module, "main"):
        return module.app
    app = typer.Typer()
    app.command()(module.main)
    return app


@pytest.fixture(autouse=True)
def _small(monkeypatch, short_audits):
    """One package of the standard library in its place: reading and encoding all of it takes seconds."""
    root = Path(asyncio.__file__).parent
    for module in ("foretoken.train.data", "shift"):
        monkeypatch.setattr(f"{module}.sysconfig", SimpleNamespace(get_paths=lambda: {"stdlib": str(root)}))
    # Only root may empty the page cache, and then everything on the machine would be read from disk again.
    monkeypatch.setattr("loading.DROP", Path("/nowhere"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with two prompts in it."""
    monkeypatch.chdir(tmp_path)
    prompts = "".join(json.dumps({"prompt": text}) + "\n" for text in ("def f(x):", "import"))
    (tmp_path / "prompts.jsonl").write_text(prompts, encoding="utf-8")
    return tmp_path


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_prints_a_table_and_writes_its_record(name, folder, monkeypatch):
    for constant, smaller in SMALLER.get(name, {}).items():
        monkeypatch.setattr(f"{name}.{constant}", smaller)
    roles = {"TARGET": "target", "DRAFT": "draft"}
    models = {word: str(zoo.path(role)) for word, role in roles.items()}
    words = [models.get(word, word) for word in shlex.split(COMMANDS[name])]
    assert call(name, [*words, "--output", "result.json"])
    assert json.loads((folder / "result.json").read_text(encoding="utf-8"))


def test_cold_starts_are_timed_where_the_page_cache_may_be_emptied(folder, monkeypatch):
    """Into a file of its own, and with starts that took a second each."""
    drop, figures = (
        folder / "drop_caches",
        ("imports", "touch", "load", "peak", "after", "engine", "first", "text_peak"),
    )
    drop.touch()
    monkeypatch.setattr("loading.DROP", drop)
    monkeypatch.setattr("os.sync", lambda: None)
    monkeypatch.setattr("loading.fresh_process", lambda *_: (1.0, dict.fromkeys(figures, 1)))
    printed = call("loading", ["--model", str(zoo.path("draft")), "--repeats", "1"])
    assert all(f"{state}, {kind}" in printed for state in ("cold", "warm") for kind in ("packed", "mapped"))
    assert drop.read_text(encoding="ascii") == "3"


@pytest.mark.parametrize("filling", [True, False])
def test_rows_that_fill_a_long_context_see_one_key(filling):
    module = importlib.import_module("long_context")
    runner = module.attention_alone(load_config(zoo.path("draft")), "bfloat16")
    runner.filling, last = filling, []
    for middle in (5, 6):
        tokens = [4, middle, 7]
        handle = Handle(runner.acquire(tokens)[0], tokens)
        plan = PassPlan.of([handle], [Draft.empty()], [0])
        last.append(runner.run(plan, (), logits=True).logits[-1])
    assert last[0].equal(last[1]) == filling


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, cells",
    [
        (f"--depth 2 --temperature 0 --temperature 1.5 {NGRAM}", ("0", "1.5", "editing", "repetition", "all")),
        (f"--part editing --prefill {NGRAM}", ("editing",)),
    ],
)
def test_parts_of_a_mixed_stream_are_measured(words, cells):
    parts = "--part editing --part repetition --part completion" if "--part" not in words else ""
    short = f"{parts} --target {zoo.path('draft')} --draft none --count 1 --tokens 8"
    printed = call("defaults", shlex.split(f"{words} {short}"))
    assert all(re.search(rf"\| +{cell} +\| plain", printed) for cell in cells)


@pytest.mark.slow
def test_systems_whose_greedy_texts_differ_are_refused():
    systems, workloads = importlib.import_module("systems"), importlib.import_module("foretoken.bench.workloads")
    models = {role: LLM(zoo.path(role), speculative_config={"method": "none"}) for role in ("target", "draft")}
    work = systems.Workload("0", workloads.FUNCTIONS[:1], SamplingParams(max_tokens=20, temperature=0))
    with pytest.raises(RuntimeError, match="different texts of '0'"):
        systems.take_turns({role: systems.System(llm) for role, llm in models.items()}, work, 4, random.Random(0))


@pytest.mark.slow
def test_the_outputs_of_random_requests_have_a_digest_by_model(folder, monkeypatch):
    monkeypatch.setattr("request_fuzz.BATCH", 4)
    words = ["--model", str(zoo.path("draft")), "--pairs", "4", "--dtype", "float32", "--output"]
    call("request_fuzz", [*words, "one.json"])
    call("request_fuzz", [*words, "other.json"])
    one, other = (json.loads((folder / name).read_text())["digests"] for name in ("one.json", "other.json"))
    assert list(one) == ["stdlib-1m, float32"] and one == other


@pytest.mark.slow
def test_audits_of_a_plain_server_count_outcomes_and_go_on_where_they_ended(folder):
    with fake_server(Behaviour()) as url:
        words = ["engines", "--plain", "--endpoint", url, "--budget", "4000", "--output", "alarms.json"]
        printed = call("audits", [*words, "--audits", "1"])
        assert "0 of 1 audits failed" in printed and "greedy parity" in printed
        assert "0 of 2 audits failed" in call("audits", [*words, "--audits", "2"])
        with pytest.raises(AssertionError, match="another budget"):
            call("audits", [*words, "--budget", "5000"])
    seeds = [each["subject"]["seed"] for each in json.loads((folder / "alarms.json").read_text())["audits"]]
    assert seeds == [0, 1]


@pytest.mark.slow
def test_audits_of_an_engine_print_every_check(folder, monkeypatch):
    @contextmanager
    def started(name, model, config):
        with fake_server(Behaviour("greedy")) as url:
            plain, speculative = (Fake(through(url, **fields)) for fields in ({"speculative_tokens": 0}, {}))
            yield EnginePair("vllm", "table", plain, speculative)

    monkeypatch.setattr("audits.started", started)
    printed = call("audits", ["engines", "--engine", "vllm in process", "--budget", "4000", "--output", "audits.json"])
    assert "greedy parity" in printed and "FAILED" in printed
    (audit,) = json.loads((folder / "audits.json").read_text())["audits"]
    assert audit["engine"] == "vllm in process" and audit["outcome"] == "failed"


@pytest.mark.slow
def test_plan_endpoint_compares_a_plan_with_other_speeds(folder, monkeypatch):
    monkeypatch.setattr("foretoken.plan.endpoint.outcome._WIDEST", 1e9)  # other programs disturb short passes
    words = "--basis 4 --depth 3 --concurrency 1 --concurrency 3 --other 2 --count 6 --max-tokens 24"
    with simulated_server(StreamingBehaviour(owner="foretoken")) as url:
        printed = call("plan_endpoint", ["--endpoint", url, *words.split(), "--output", "result.json"])
    assert "planned from 4 and 8: " in printed and "within 10 %" in printed
    pairs = json.loads((folder / "result.json").read_text(encoding="utf-8"))["pairs"]
    assert {(pair["depth"], pair["concurrency"]) for pair in pairs} == {(3, 2), (6, 2)}


@pytest.mark.slow
def test_memory_pressure_runs_in_a_process_of_its_own():
    """It limits its own address space."""
    words = "--batch 2 --length 64 --tokens 16 --depth 2"
    done = subprocess.run(
        [sys.executable, FOLDER / "memory_pressure.py", *words.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "|" in done.stdout


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.slow
def test_a_server_is_compared_with_itself_without_speculation():
    words = "--against plain --small --workload short --concurrency 2 --requests 2 --max-tokens 8 --turns 1"
    assert "x the tokens per second" in call("serving_vllm", [*words.split(), "--temperature", "0"])


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.slow
def test_texts_in_mixed_traffic_are_those_of_requests_alone():
    printed = call("traffic", shlex.split("--kind mixed --requests 4 --concurrency 2 --minutes 5"))
    assert "4 requests: {'mixed': 4}" in printed and "4 of 4 texts byte for byte as alone" in printed


def test_failovers_are_read_from_the_metrics():
    page = '# HELP\nforetoken:failovers_total{outcome="retried"} 2.0\nforetoken:failovers_total{outcome="broken"} 0.0\n'
    assert importlib.import_module("traffic").failovers(page) == {"retried": 2, "broken": 0}


@pytest.mark.slow
def test_shift_follows_a_draft_that_learns():
    assert "updates" in call("shift", ["--to", "prose", "--blocks", "1", "--requests", "2", "--max-tokens", "16"])


@pytest.mark.slow
def test_families_says_which_runtime_serves_a_family():
    families = importlib.import_module("families")
    assert families.family("llama", "LlamaForCausalLM").runtime == "own"
    assert families.family("codegen", "CodeGenForCausalLM").runtime == "transformers"
    assert families.family("mamba", "MambaForCausalLM").runtime == ""


@pytest.mark.slow
def test_a_family_is_timed_on_both_runtimes(monkeypatch, folder):
    families = importlib.import_module("families")
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
    monkeypatch.setattr(families, "SIZES", families.SIZES | small | {"intermediate_size": 96})
    call("families", ["speed", "llama", "--turns", "2", "--output", "speed.json"])
    (row,) = json.loads((folder / "speed.json").read_text(encoding="utf-8"))["families"]
    assert row["family"] == "llama" and row["own"] > 0 and row["ratio"] > 0


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_random_experts_load(kind, tmp_path):
    small = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 32, "moe_intermediate_size": 32}
    families = importlib.import_module("families")
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if kind == "gpt_oss" else {}
    assert families.write_experts(kind, tmp_path, num_attention_heads=4, head_dim=16, **small, **layers) > 0
    assert load_model(tmp_path, "float32", "cpu").has_experts


def test_speed_has_a_size_for_every_family():
    families = importlib.import_module("families")
    for family in families.FAMILIES.keys() & families.CONFIG_MAPPING.keys():  # MiMo is Qwen2 to transformers
        config = families.config_of(family).to_dict() | {"model_type": family}
        assert Architecture.of(config).hidden == 1024, family


def test_mutants_are_listed():
    assert "mutant" in call("mutants", ["--list"])


@pytest.mark.slow
@pytest.mark.skipif(PEERS["vllm"].python.exists(), reason="vLLM is set up here")
@pytest.mark.parametrize("name, words", [("vllm_plan", "--count 4"), ("serving_vllm", "--concurrency 1")])
def test_benchmarks_of_vllm_say_that_it_is_missing(name, words):
    result = CliRunner().invoke(app_of(name), words.split())
    assert result.exit_code != 0
    assert "vllm" in f"{result.output} {result.exception}".lower()


@pytest.mark.skipif(PEERS["vllm"].missing is None, reason="vLLM is set up here")
@pytest.mark.parametrize("command", ["heads", "folders", "proposers"])
def test_checks_in_vllm_say_that_it_is_missing(command):
    result = CliRunner().invoke(app_of("in_vllm"), [command, "--count", "1"])
    assert result.exit_code != 0 and "make peers" in f"{result.output} {result.exception}"


def test_two_servers_are_compared_by_rate_and_latency():
    def result(rate, p99, ttft):
        latency = [Percentiles(p50=value, p90=value, p99=value) for value in (ttft, p99, p99)]
        return LoadResult("short", 4, 8, 0, 1.0, 80.0, 0.0, rate, 1.0, *latency)

    compared = importlib.import_module("serving_vllm").compared
    theirs, slower = result(20.0, 0.2, 1.0), result(10.0, 0.2, 1.0)
    assert list(compared([slower, theirs, theirs], [result(50.0, 0.1, 0.5)] * 3)) == [
        "short, 4 at once, 3 turns: 2.50x the tokens per second, 0.50x the p99 ITL, 0.50x the median TTFT"
    ]


@pytest.mark.skipif(PEERS["llamacpp"].missing is not None, reason="llama.cpp is not set up here")
@pytest.mark.slow
def test_gguf_logits_compares_with_llamacpp(folder):
    words = "--kind F32 --kind Q4_0 --positions 24 --texts 100 --dtype float32 --limit 0.03 --output result.json"
    assert "| Q4_0" in call("gguf_logits", words.split())
    rows = json.loads((folder / "result.json").read_text(encoding="utf-8"))["rows"]
    assert rows[0]["systems"]["mean"] < 1e-3 and rows[1]["stored"]["Q4_0"] > 40


@pytest.mark.slow
def test_gguf_logits_says_that_llamacpp_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    result = CliRunner().invoke(app_of("gguf_logits"), [])
    assert result.exit_code == 1 and "llama.cpp is not set up" in str(result.exception)


def test_every_benchmark_is_tested():
    text = Path(__file__).read_text(encoding="utf-8")
    for file in FOLDER.glob("*.py"):
        elsewhere = file.stem in ELSEWHERE
        assert elsewhere or re.search(rf'["/]{file.stem}(\.py)?"', text), file.name

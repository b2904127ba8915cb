"""llama.cpp and vLLM as peers: arguments, environment, answers, end, and converted files. Neither is needed."""

import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.bench.test_worker import eventually

from foretoken.bench.peers import export, llamacpp, registry
from foretoken.bench.peers import vllm as vllm_peer
from foretoken.bench.peers.protocol import PeerRequest, Setup
from foretoken.bench.peers.vllm import speculation
from foretoken.core.errors import ModelLoadError

FAKE = Path(__file__).with_name("fake_llama_server.py")
SETUP = Setup("llamacpp", "draft_model", "t.gguf", "d.gguf", depth=4, threads=2, max_length=300)


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A program that is started as the server is."""
    program = tmp_path / "llama-server"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(llamacpp, "SERVER", program)
    started = []
    popen = subprocess.Popen

    def record(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(llamacpp.subprocess, "Popen", record)
    yield started
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_completion_is_timed_by_the_server(server):
    complete, version = llamacpp.load(SETUP)
    assert version == "0.5.0"
    result = complete(PeerRequest([[7, 8]], 6, depth=4))
    assert result.tokens == [[9, 10, 11, 12, 13, 14]]
    assert (result.seconds, result.first_seconds, result.first_tokens) == pytest.approx((0.05, 0.02, 1))
    assert result.passes == 2  # of 6 tokens, 4 were accepted drafts
    plain, _ = llamacpp.load(Setup("llamacpp", "plain", "t.gguf"))
    assert plain(PeerRequest([[7]], 6)).passes == 6


def test_arguments_follow_the_method():
    args = llamacpp.arguments(SETUP)
    assert args[args.index("--spec-draft-model") + 1] == "d.gguf"
    assert args[args.index("--spec-draft-n-max") + 1] == "4" and args[args.index("--threads") + 1] == "2"
    lookup = llamacpp.arguments(Setup("llamacpp", "ngram", "t.gguf", depth=1))
    assert lookup[-5:] == ["ngram-simple", "--spec-ngram-simple-size-n", "1", "--spec-ngram-simple-size-m", "1"]
    assert "--spec-type" not in llamacpp.arguments(Setup("llamacpp", "plain", "t.gguf"))


def test_requests_are_greedy_or_sample_the_whole_distribution():
    greedy = llamacpp.request(PeerRequest([[1]], 5), seed=1)
    assert greedy["top_k"] == 1 and "seed" not in greedy and greedy["cache_prompt"] is False
    drawn = llamacpp.request(PeerRequest([[1]], 5, temperature=0.8), seed=3)
    assert (drawn["samplers"], drawn["temperature"], drawn["seed"]) == (["temperature"], 0.8, 3)
    assert drawn["ignore_eos"] is True and drawn["n_predict"] == 5


def test_failures_carry_the_servers_words(server):
    with pytest.raises(RuntimeError, match=r"llama-server stopped: .*failed to load model, 'broken.gguf'"):
        llamacpp.load(Setup("llamacpp", "plain", "broken.gguf"))
    running = llamacpp.LlamaServer([str(llamacpp.SERVER)])
    with pytest.raises(RuntimeError, match=r"llama-server refused /completion: .*no prompt"):
        running.post("/completion", {})
    running.close()
    with pytest.raises(RuntimeError, match="llama-server does not answer"):
        running.post("/completion", {"prompt": [1], "n_predict": 1})


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel to end the server")
def test_a_killed_peer_takes_its_server_along(server, tmp_path):
    code = (
        "import time\nfrom pathlib import Path\nfrom foretoken.bench.peers import llamacpp\n"
        f"server = llamacpp.LlamaServer([{sys.executable!r}, {str(FAKE)!r}])\n"
        "print(server._process.pid, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as peer:
        assert peer.stdout is not None
        pid = int(peer.stdout.readline())
        peer.kill()
    eventually(pid, "Z")


@pytest.fixture
def tools(monkeypatch, tmp_path, own_cache):
    """Tools that write down how they were called. Returns the file with their calls."""
    place, calls = registry.folder() / "llamacpp", tmp_path / "calls"
    quantize = place / "build" / "bin" / "llama-quantize"
    quantize.parent.mkdir(parents=True)
    quantize.write_text(f'#!/bin/sh\necho "$(basename "$1") $3" >> {calls}\n[ "$3" = Q2_K ] || cp "$1" "$2"\n')
    quantize.chmod(0o755)
    converter = tmp_path / "converter.py"
    converter.write_text(
        f"import sys, pathlib\nopen({str(calls)!r}, 'a').write(sys.argv[4] + '\\n')\n"
        "pathlib.Path(sys.argv[3]).write_text('GGUF')\n"
    )
    monkeypatch.setattr(export, "CONVERTER", converter)
    return calls


def test_gguf_files_are_made_once(tools, tiny_pair):
    made = export.gguf(tiny_pair.target, "Q4_K_M")
    assert made.suffix == ".gguf" and made.name.startswith(tiny_pair.target.name) and "Q4_K_M" in made.name
    assert export.gguf(tiny_pair.target, "Q4_K_M") == made
    assert export.gguf(made, "Q8_0") == made  # a GGUF file stays as it is
    calls = tools.read_text().splitlines()
    assert calls[0] == "bf16" and calls[1].endswith("BF16.gguf Q4_K_M") and len(calls) == 2
    with pytest.raises(ModelLoadError, match=r"llama.cpp's conversion of .* to Q2_K failed"):
        export.gguf(tiny_pair.target, "Q2_K")
    assert sorted(path.name for path in made.parent.iterdir() if "Q2_K" in path.name) == []


def test_missing_tools_are_named(tiny_pair, own_cache):
    with pytest.raises(ModelLoadError, match=r"llama.cpp's tools.*`make peers`"):
        export.gguf(tiny_pair.target, "Q4_0")


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (Setup("vllm", "plain", "t"), None),
        (
            Setup("vllm", "draft_model", "t", "d", depth=4, options=(("tree", '"ranked"'),)),
            {"method": "draft_model", "model": "d", "num_speculative_tokens": 4},
        ),
        (
            Setup("vllm", "ngram", "t", depth=2, options=(("prompt_lookup_max", "3"),)),
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        ),
        (
            Setup("vllm", "eagle3", "t", "h", depth=8, options=(("parallel_drafting", "true"),)),
            {"method": "eagle3", "model": "h", "num_speculative_tokens": 8, "parallel_drafting": True},
        ),
    ],
    ids=lambda value: value.method if isinstance(value, Setup) else "",
)
def test_a_method_has_vllms_keys(setup: Setup, expected: dict[str, object] | None) -> None:
    assert speculation(setup) == expected


@pytest.mark.parametrize("left, ends", [(True, SystemExit), (False, RuntimeError)])
def test_a_step_that_fails_ends_the_process_if_requests_are_left(monkeypatch, left, ends):
    """They would never finish, and every later request would wait for them."""

    class Broken:
        llm_engine = SimpleNamespace(has_unfinished_requests=lambda: left)

        def get_metrics(self) -> list[object]:
            return []

        def generate(self, *arguments: object, **options: object) -> None:
            raise RuntimeError("max(): expected a dimension")

    vllm = SimpleNamespace(__version__="0", SamplingParams=dict)
    monkeypatch.setattr(vllm_peer, "engine", lambda setup, config, **options: (Broken(), vllm))
    complete, _ = vllm_peer.load_api(Setup("vllm", "plain", "t"))
    with pytest.raises(ends, match="expected a dimension"):
        complete([{"prompt": "a"}])

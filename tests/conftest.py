"""Fixtures that several rooms share: a tiny random pair with a real tokenizer."""

import atexit
import gc
import inspect
import logging
import os
import re
import signal
import ssl
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait sleep, and leave their core to another worker
if "PYTEST_XDIST_WORKER" in os.environ:  # the cores are taken; before torch is imported, and for processes of tests too
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from tests import preloaded

from foretoken.core.files import cache_folder

# torch and what needs it are imported where they are used: the process that hands out the tests runs none.

# Modules and collected tests live to the end: looking through them again and again takes a tenth of all time.
gc.disable()

# A shell that starts the tests in the background has them ignore Ctrl-C, and their children with them.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The time to generate an input depends on the machine's load, and every change is tested with the same inputs.
# `--hypothesis-profile default` generates new ones.
settings.register_profile("same", suppress_health_check=[HealthCheck.too_slow], deadline=None, derandomize=True)
settings.load_profile("same")
# Constants of imported modules would enter the inputs, which then depend on other tests; parsing them takes seconds.
providers._get_local_constants = lambda: providers._local_constants

TEXT = (
    "def greet(name):\n    return f'hello {name}, größe 5 €'\n\n",
    "class Ünïcode:\n    '''日本語 emoji 🙂🙃 and   spaces'''\n\tx = 1\n",
    "for i in range(10):\n    print(i, i * i)\n",
)


_SLOW_FILE = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files of slow tests alone, without importing them, if slow tests are deselected."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return True if _SLOW_FILE.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_configure(config: pytest.Config) -> None:
    """Processes that run tests end without taking apart all that they imported, which takes seconds."""
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)  # registered first, so it is the last to run


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One process more than cores: tests of servers, browsers and clusters wait for a part of their time."""
    if config.option.markexpr == "not slow":
        return None
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


# A file runs in one process. One that takes half a minute must not be what the others wait for at the end.
LONGEST = (
    *("serve/test_replicas.py", "serve/test_clients.py", "benchmarks/test_benchmarks.py", "models/test_conformance.py"),
    *("models/test_sanitizers.py", "models/test_warnings.py"),
    *("models/test_emulated.py", "serve/test_playground.py", "quantize/test_file.py", "exactness/test_hybrid_texts.py"),
    *("test_bundled.py", "test_docs.py", "exactness/test_gtest.py", "exactness/test_verifiers.py", "test_wheel.py"),
    *("models/test_gguf.py", "test_kv_cache_texts.py", "serve/test_openapi.py", "models/test_tensor_parallel.py"),
)
_HERE = Path(__file__).parent.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first; pyproject.toml tells pytest-xdist to keep the order."""
    place = {f"{_HERE}/{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # by default a twentieth of the time goes into it


@pytest.fixture(scope="session", autouse=True)
def _one_reading_of_certificates() -> Iterator[None]:
    """httpx reads all certificate authorities, for 20 ms, at each request that is made without a client."""
    import certifi

    create, usual = ssl.create_default_context, (certifi.where(), os.environ.get("SSL_CERT_FILE"))
    shared = cache(lambda authorities: create(cafile=authorities))

    def context(*arguments: Any, **options: Any) -> ssl.SSLContext:
        whole = not arguments and options.keys() == {"cafile"} and options["cafile"] in usual
        return shared(options["cafile"]) if whole else create(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", context)
        yield


@pytest.fixture(scope="session", autouse=True)
def _patient_clients() -> Iterator[None]:
    """httpx waits 5 s for each part of an answer by default, which a busy machine may take."""
    import httpx

    usual = inspect.signature(httpx.get).parameters["timeout"].default
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "read", "write", "pool"):
            patch.setattr(usual, name, 120.0)
        yield


@pytest.fixture(scope="session")
def _own_threads() -> int:
    import torch

    return torch.get_num_threads()


@pytest.fixture(autouse=True)
def _threads(_own_threads: int) -> Iterator[None]:
    """Commands that measure, and some fixtures, take all cores; the next test must not."""
    import torch

    yield
    torch.set_num_threads(_own_threads)


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """``foretoken serve`` sets up the log of its process; the next test must not write to it."""
    root, own = logging.getLogger(), logging.getLogger("foretoken")
    levels, before = (root.level, own.level), root.handlers[:]
    yield
    root.setLevel(levels[0])
    own.setLevel(levels[1])
    for handler in [each for each in root.handlers if each not in before and "pytest" not in type(each).__module__]:
        root.removeHandler(handler)


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of the test's own. Compiled kernels are shared: compiling them takes a minute."""
    kernels = cache_folder() / "native"
    kernels.mkdir(parents=True, exist_ok=True)
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "native").symlink_to(kernels, target_is_directory=True)
    monkeypatch.setenv("FORETOKEN_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def preloaded_launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Python that has imported torch and Foretoken already."""
    own = tmp_path_factory.getbasetemp()
    with preloaded.program((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "python") as launcher:
        yield launcher


@pytest.fixture
def preloaded_python(preloaded_launcher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts by ``sys.executable`` have imported torch and Foretoken already."""
    monkeypatch.setattr(sys, "executable", str(preloaded_launcher))
    monkeypatch.setattr("multiprocessing.spawn._python_exe", os.fsencode(preloaded_launcher))


@pytest.fixture
def short_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits of which each check reads few short texts: the least that they read otherwise takes ten seconds."""
    from foretoken.audit.subject import AuditSpeed

    monkeypatch.setattr("foretoken.audit.equality.TEXTS", 2)
    for name in ("equality.TOKENS", "equality.GREEDY_TOKENS", "sampled.TOKENS"):
        monkeypatch.setattr(f"foretoken.audit.{name}", 8)
    monkeypatch.setattr("foretoken.audit.run.measured_speed", lambda *_: AuditSpeed())  # not this machine's


class Pair(NamedTuple):
    target: Path
    draft: Path


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Byte-level BPE of some 400 tokens: most characters beyond ASCII straddle tokens."""
    from foretoken.train.data import Corpus, train_tokenizer

    return train_tokenizer(Corpus("test", TEXT * 3, TEXT), vocab_size=400)


@pytest.fixture(scope="session")
def tiny_pair(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two random Llamas, sharpened so that they have opinions; they seldom agree."""
    from foretoken.train.shapes import LlamaShape

    pair = Pair(*(tmp_path_factory.mktemp("pair") / name for name in ("target", "draft")))
    _save_random(pair.target, tokenizer, LlamaShape(64, 96, 3, 4, 2, 16, 512))
    _save_random(pair.draft, tokenizer, LlamaShape(32, 48, 1, 2, 2, 16, 512))
    return pair


WIDE_VOCABULARY = 151_936  # Qwen's


@pytest.fixture(scope="session")
def wide_tokenizer(tokenizer: Any) -> Any:
    """``tokenizer`` with a vocabulary of usual size: tokens that no merge leads to, for models and grammars."""
    import json

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary |= {f"w{number:x}": number for number in range(len(tokenizer), WIDE_VOCABULARY)}
    end = tokenizer.eos_token
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token=end, pad_token=end)


@pytest.fixture(scope="session")
def wide_pair(wide_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A random Llama of two layers with a large vocabulary, and the same with noise, which often agrees with it."""
    from foretoken.train.shapes import LlamaShape

    pair = Pair(*(tmp_path_factory.mktemp("wide") / name for name in ("target", "draft")))
    for path, noise in ((pair.target, 0.0), (pair.draft, 0.4)):
        _save_random(path, wide_tokenizer, LlamaShape(64, 96, 2, 4, 2, 16, 512), 6.0, noise)
    return pair


@pytest.fixture(scope="session", params=["tiny", "wide"])
def any_pair(request: pytest.FixtureRequest) -> Pair:
    """Pairs with a small and a large vocabulary."""
    pair: Pair = request.getfixturevalue(f"{request.param}_pair")
    return pair


def _save_random(folder: Path, tokenizer: Any, shape: Any, scale: float = 3.0, noise: float = 0.0) -> None:
    """Writes a random Llama with ``scale`` times the usual weights; ``noise`` is relative to their deviation."""
    import torch

    from foretoken.train.target import new_model, save

    model, generator = new_model(shape, tokenizer, seed=1), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
            if noise and parameter.ndim > 1:
                parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
    save(model, tokenizer, folder)

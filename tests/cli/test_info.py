"""``foretoken info``: the facts that a bug report needs."""

import json
import logging
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import foretoken
from foretoken import zoo
from foretoken.core.native import build, cpu
from foretoken.models.runners import choose


@pytest.fixture(autouse=True)
def _few_files(own_cache: Path) -> None:
    """The size of the cache is among the facts; that of the machine may have a hundred thousand files."""


def test_the_facts_are_one_document(run: Any) -> None:
    facts = json.loads(run("info", "--json").out)
    assert set(facts) == {"machine", "kernels", "versions", "settings"}
    assert facts["versions"]["foretoken"] == foretoken.__version__
    assert facts["machine"]["cores"]["used"] >= 1


def test_the_text_has_every_section(run: Any) -> None:
    text = run("info").out
    assert all(f"\n{section}\n" in f"\n{text}" for section in ("machine", "kernels", "versions", "settings"))
    assert foretoken.__version__ in text


def test_the_default_drafter_of_a_model_is_named(run: Any) -> None:
    def default(role: str) -> str:
        drafter: str = json.loads(run("info", str(zoo.path(role)), "--json").out)["model"]["default"]
        return drafter

    assert default("hybrid-target") == "drafter: mtp in the checkpoint"
    assert default("draft") == "drafter: none; text is copied"
    assert "it is not in the hub's cache" in run("info", "foretoken/none").err


def test_switched_off_kernels_are_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_NATIVE", "0")
    kernels = json.loads(run("info", "--json").out)["kernels"]
    assert (kernels["runner"], kernels["why"]) == ("torch operators", "FORETOKEN_NATIVE=0 is set")


def test_a_missing_compiler_is_named_with_what_to_do(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "chosen", lambda: cpu.LEVELS[-1])
    monkeypatch.setattr(build, "local", lambda: None)
    monkeypatch.delenv("FORETOKEN_NATIVE", raising=False)
    why = json.loads(run("info", "--json").out)["kernels"]["why"]
    assert "no C++ compiler" in why
    assert "apt install g++" in why
    assert "foretoken[compiler]" in why


def test_keys_are_not_shown(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_API_KEY", "secret")
    result = run("info", "--json")
    assert "secret" not in result.out
    assert json.loads(result.out)["settings"]["environment"]["FORETOKEN_API_KEY"] == "(set)"


def test_the_fallback_is_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from foretoken import zoo
    from foretoken.models.loading import load_model

    def refuse(*_: Any, **options: Any) -> None:
        raise build.KernelsUnavailable("the processor lacks wings")

    monkeypatch.setattr(choose, "NativeRunner", refuse)
    choose.report_fallback.cache_clear()
    with caplog.at_level(logging.WARNING, logger=choose.__name__):
        for _ in range(2):
            load_model(zoo.path("draft"), "float32", "cpu")
    assert [record.getMessage() for record in caplog.records] == [
        "torch operators compute the model, several times slower than the compiled kernels: the processor lacks wings"
    ]


def test_programs_that_benchmarks_install_do_not_count_as_cache(run: Any, own_cache: Path) -> None:
    environment, weights = own_cache / "peers" / "other" / "lib", own_cache / "weights"
    for folder in (environment, weights):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "large").write_bytes(bytes(2**20))
    (environment.parent / "pyvenv.cfg").touch()
    assert json.loads(run("info", "--json").out)["settings"]["cache"]["mib"] == 1.0


def test_torch_built_for_cpus_is_not_imported() -> None:
    if "+cpu" not in version("torch"):
        pytest.skip("this torch may see a GPU")
    program = "import sys; from foretoken.cli.info import collect; collect(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)

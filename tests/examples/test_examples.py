"""Every example runs on the bundled pair; the Containerfile's files, pins, options and addresses exist."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.serve.conftest import running

import batch
import chat
import custom_proposer
import custom_verifier
import openai_client
import plan_speedup
import streaming
import structured_output
from foretoken import LLM
from foretoken.cli.main import main
from foretoken.propose import methods
from foretoken.zoo import cache_folder

FOLDER = Path(__file__).parents[2] / "examples"


def test_every_example_is_tested():
    tested = "".join(file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_*.py"))
    for file in FOLDER.glob("*.py"):
        assert f"import {file.stem}\n" in tested, file.name


def test_a_chat_goes_on_after_the_first_answer(capsys):
    chat.main()
    printed = capsys.readouterr().out
    assert printed.index("> def read_lines") < printed.index("> def write_lines")


@pytest.mark.slow
def test_a_batch_gives_the_texts_of_single_requests(capsys):
    batch.main()
    assert f"{len(batch.PROMPTS)} of {len(batch.PROMPTS)} texts are the same alone" in capsys.readouterr().out


def test_two_requests_stream_at_once(capsys):
    streaming.main()
    printed = capsys.readouterr().out
    assert "0: finished, length" in printed
    assert "1: finished" in printed


def test_structured_outputs_are_what_was_asked_for(capsys):
    structured_output.main()
    printed = capsys.readouterr().out
    assert "parsed: {'name': " in printed
    assert "regex: " in printed


@pytest.mark.slow
def test_a_proposer_of_ones_own_drafts_and_changes_no_text(capsys, monkeypatch):
    monkeypatch.setattr(methods, "_registered", {})
    custom_proposer.main()
    printed = capsys.readouterr().out
    assert "same text as plain decoding: True" in printed
    assert float(printed.splitlines()[-2].split()[0]) > 1.5


def test_a_verifier_of_ones_own_is_exact_and_its_mistake_is_detected(capsys):
    assert custom_verifier.error(custom_verifier.verify) < 1e-12
    assert custom_verifier.error(custom_verifier.wrong) > 1e-2
    custom_verifier.main()
    assert "with the mistake" in capsys.readouterr().out


@pytest.mark.slow
def test_a_plan_from_python_recommends_something(capsys):
    plan_speedup.main(max_tokens=12, turns=2)
    *rows, recommended = capsys.readouterr().out.splitlines()
    assert len(rows) == 5
    assert recommended.startswith("recommended: ")


@pytest.mark.slow
def test_openais_client_is_served(capsys):
    with running(LLM(speculative_config={"num_speculative_tokens": 4})) as server:
        openai_client.main(f"{server.url}/v1")
    assert len(capsys.readouterr().out.splitlines()) > 3


ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipes_{name}", RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


container = script("container_steps")
STEPS = container.steps((RECIPES / "Containerfile").read_text(encoding="utf-8"))


def values(name: str) -> list[str]:
    return [step.value for step in STEPS if step.name == name]


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for step in STEPS if step.name == "ENV" for pair in step.words)


def test_steps_of_a_containerfile_are_parsed() -> None:
    result = container.steps(
        '# no\nFROM a\nRUN b && \\\n    c\nHEALTHCHECK --interval=3s \\\n  CMD ["d", "e f"]\nCMD ["g"]\n'
    )
    assert [step.name for step in result] == ["FROM", "RUN", "HEALTHCHECK", "CMD"]
    assert result[1].value == "b && c" and result[1].words == ["b", "&&", "c"]
    assert result[2].words == ["d", "e f"] and container.last(result, "CMD").words == ["g"]


def test_copied_files_exist_and_are_all_that_a_build_needs() -> None:
    copied = [source for value in values("COPY") for source in value.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'^(?:readme = |license-files = \[)"(.*)"', settings, re.MULTILINE)
    assert {"pyproject.toml", "constraints.txt", "src", *named} <= set(copied)


def test_pinned_versions_are_those_of_the_constraints() -> None:
    pins = set((ROOT / "constraints.txt").read_text(encoding="utf-8").split())
    installs = [value for value in values("RUN") if "pip install" in value]
    named = [word for value in installs for word in value.split() if "==" in word]
    assert named and set(named) <= pins
    assert all("-c constraints.txt" in value for value in installs)
    python = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert python is not None and values("FROM") == [f"python:{python[1]}-slim"]


def test_the_command_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    program, command, *arguments = container.last(STEPS, "CMD").words
    with pytest.raises(SystemExit):
        main([command, "--help"])
    known = capsys.readouterr().out
    options = [word for word in arguments if word.startswith("--")]
    assert program == "foretoken" and options and all(option in known for option in options)


def test_ports_users_and_folders_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    command = container.last(STEPS, "CMD").words
    port = command[command.index("--port") + 1]
    assert command[command.index("--host") + 1] == "0.0.0.0"
    assert values("EXPOSE") == [port]
    assert f"127.0.0.1:{port}/health" in container.last(STEPS, "HEALTHCHECK").value
    assert values("USER") != ["root"] and values("USER")[0] in next(v for v in values("RUN") if "useradd" in v)
    (volume,) = values("VOLUME")
    assert all(Path(environment()[name]).is_relative_to(volume) for name in ("HF_HOME", "FORETOKEN_CACHE"))
    monkeypatch.setenv("FORETOKEN_CACHE", environment()["FORETOKEN_CACHE"])
    assert str(cache_folder()) == environment()["FORETOKEN_CACHE"]


def test_nothing_runs_as_root() -> None:
    names = [step.name for step in STEPS]
    assert names.index("USER") < names.index("CMD") and "RUN" not in names[names.index("USER") :]

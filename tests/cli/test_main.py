"""Exits of the command: help, version, usage, errors, signals."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import foretoken
from foretoken.cli import main as cli
from foretoken.cli.bench import PairOptions
from foretoken.cli.options import PositionalModelOptions
from foretoken.cli.plan_here import CandidateOptions
from foretoken.cli.theme import ColorMode
from foretoken.cli.train import app as train_app
from foretoken.core.errors import InvalidRequest

COMMANDS = ("generate", "demo", "zoo", "info", "widen", "train", "bench", "convert", "build-datastore", "plan", "audit")


def test_help_lists_every_command(run):
    result = run("--help").ok()
    assert all(name in result.out for name in COMMANDS)
    assert run().out == result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    result = run(command, "--help").ok()
    assert f"foretoken {command}" in result.out


@pytest.mark.parametrize(
    "command", [(), ("serve",), ("bench",), ("bench", "race"), ("train", "eagle3"), ("keys", "add")]
)
def test_help_has_a_short_option(run, command):
    result = run(*command, "-h")
    assert result.code == 0 and result.out.startswith(f"Usage: {' '.join(('foretoken', *command))} [OPTIONS]")
    assert result.out == run(*command, "--help").out


@pytest.mark.parametrize("group", ["train", "bench", "keys"])
def test_a_group_without_a_command_prints_its_help(run, group):
    result = run(group)
    assert (result.code, result.err) == (0, "") and result.out == run(group, "--help").out


def test_version_is_the_packages(run):
    assert run("--version").out == run("-V").out == f"foretoken {foretoken.__version__}\n"


@pytest.mark.parametrize(
    "args, said",
    [
        (("serve", "--modle", "x"), "No such option: --modle; did you mean --model? (see foretoken serve --help)"),
        (
            ("generate", "x", "--topp", "1"),
            "No such option: --topp; did you mean --top-p? (see foretoken generate --help)",
        ),
        (("keys", "add", "f", "--nam"), "No such option: --nam; did you mean --name? (see foretoken keys add --help)"),
        (("generate", "x", "--frobnicate"), "No such option: --frobnicate (see foretoken generate --help)"),
        (("demo", "x"), "Got unexpected extra argument(s) (x) (see foretoken demo --help)"),
        (("frobnicate",), "No such command 'frobnicate'. (see foretoken --help)"),
        (("--verson",), "No such option: --verson; did you mean --version? (see foretoken --help)"),
        (("generate",), "Missing argument 'PROMPT'. (see foretoken generate --help)"),
        (("serve", "--port"), "Option '--port' requires an argument. (see foretoken serve --help)"),
        (("bench", "rac"), "No such command 'rac'. Did you mean 'race'? (see foretoken bench --help)"),
    ],
)
def test_wrong_usage_names_what_was_meant_and_the_commands_help(run, args, said):
    result = run(*args)
    assert (result.code, result.out, result.err) == (2, "", f"foretoken: error: {said}\n")


def test_help_needs_no_heavy_import():
    """Half a second is the goal; what costs more is torch and transformers, so those must not be there."""
    code = (
        "import sys, foretoken.cli.main as m\n"
        "try: m.main(['generate', '--help'])\n"
        "finally: print(*{'torch', 'transformers', 'numpy', 'rich.console'} & set(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "\n"


def raising(monkeypatch, error: BaseException) -> None:
    def app(**_):
        raise error

    monkeypatch.setattr(cli, "app", app)


@pytest.mark.parametrize(
    "error, code, line",
    [
        (InvalidRequest("n must be\n  positive"), 1, "foretoken: error: n must be positive\n"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Abort(), 130, ""),
        (
            RuntimeError("out of memory"),
            1,
            "foretoken: error: unexpected RuntimeError: out of memory; FORETOKEN_DEBUG=1 shows where it came from\n",
        ),
    ],
)
def test_errors_leave_as_one_line(run, monkeypatch, error, code, line):
    raising(monkeypatch, error)
    result = run("zoo")
    assert (result.code, result.err, result.out) == (code, line, "")


def test_debug_keeps_the_traceback(monkeypatch):
    raising(monkeypatch, InvalidRequest("no"))
    monkeypatch.setenv("FORETOKEN_DEBUG", "1")
    with pytest.raises(InvalidRequest):
        cli.main(["zoo"])


def stand_in(body: str) -> list[str]:
    """A Python that runs ``main`` with ``body`` in the place of the commands."""
    code = f"import time, foretoken.cli.main as m\ndef app(**_):\n    {body}\nm.app = app\nm.main([])"
    return [sys.executable, "-c", code]


def test_a_reader_that_leaves_is_no_error():
    endless = shlex.join(stand_in("while True: print('x' * 100)"))
    script = f"{endless} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(cli.BROKEN_PIPE)
    assert done.stderr == ""


def test_ctrl_c_ends_quietly():
    process = subprocess.Popen(
        stand_in("print('ready', flush=True); time.sleep(60)"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (cli.INTERRUPTED, "")


def options_of_all_commands() -> list[tuple[str, Any]]:
    groups = [("", cli.app), ("train ", train_app), ("bench ", cli.bench_app)]
    commands = [(f"{prefix}{name}", command) for prefix, app in groups for name, command in commands_of(app)]
    return [(name, option) for name, command in commands for option in command.params]


def commands_of(app: typer.Typer) -> list[tuple[str, Any]]:
    return [(name, command) for name, command in typer.main.get_group(app).commands.items() if command.params]


def test_json_is_a_flag_of_every_command_and_files_are_named_by_output():
    options = options_of_all_commands()
    flags = {name: option.is_flag for name, option in options if "--json" in option.opts}
    assert set(flags.values()) == {True}
    assert {"generate", "plan", "audit", "simulate", "zoo", "bench race", "bench costs", "train target"} <= set(flags)
    outputs = {name for name, option in options if "--output" in option.opts}
    assert outputs == {"plan", "audit", "simulate", "bench race", "bench costs", "bench serve", "bench table"}


def test_models_have_the_same_names_in_all_commands():
    options = options_of_all_commands()
    short = {"--model": "-m", "--draft-model": "-md"}
    assert [
        name for name, option in options for long in short if long in option.opts and short[long] not in option.opts
    ] == []
    positional = {name for name, option in options if option.metavar == "MODEL" and not option.required}
    assert positional == {"chat", "serve", "plan", "audit", "info", "bench race", "bench costs", "bench table"}
    assert "generate" in {name for name, option in options if "-m" in option.opts}  # its argument is the prompt


@pytest.mark.parametrize("options", [PositionalModelOptions, CandidateOptions, PairOptions])
def test_a_model_is_named_by_an_argument_or_an_option(options):
    assert options(model_argument="m").model == options(model="m").model == "m"
    assert options().model is None


@pytest.mark.parametrize(
    "args",
    [
        ("serve", "a"),
        ("chat", "a"),
        ("plan", "a"),
        ("audit", "a"),
        ("bench", "race", "a"),
        ("train", "draft", "out", "a"),
    ],
)
def test_two_models_are_refused(run, args):
    result = run(*args, "-m", "b")
    assert (result.code, result.err) == (
        1,
        "foretoken: error: two models are given, a and --model b; leave one of them out\n",
    )


def test_a_model_is_no_adapter(run, monkeypatch):
    loads: list[Any] = []
    monkeypatch.setattr(
        "foretoken.cli.serve_engines.load", lambda *models, **options: loads.append((models, options["lora"]))
    )
    assert run("serve", "--port", "0", "--lora-modules", "a=x", "b=y", "org/model", "-md", "draft").code == 1
    assert loads == [(("org/model", "draft", ColorMode.AUTO), {"a": "x", "b": "y"})]


def test_a_table_in_a_pipe_has_one_line_for_each_model(run, monkeypatch):
    folder = Path("/somewhere") / ("deep" * 30)
    model = SimpleNamespace(name="m", role="target", parameters=10**6, size_bytes=10**6, path=folder)
    monkeypatch.setattr("foretoken.zoo.list_models", lambda: [model])
    monkeypatch.setenv("COLUMNS", "80")
    assert [line for line in run("zoo").out.splitlines() if line.rstrip().endswith(str(folder))]

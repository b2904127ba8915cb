"""How the command leaves: help, version, usage, errors, signals."""

from __future__ import annotations

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
from foretoken.core.errors import InvalidRequest

COMMANDS = ("generate", "demo", "zoo", "info", "widen", "train", "bench", "convert", "build-datastore", "plan", "audit")


def test_help_lists_every_command(run):
    result = run("--help")
    assert result.code == 0
    assert all(name in result.out for name in COMMANDS)
    assert run().out == result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    result = run(command, "--help")
    assert result.code == 0
    assert f"foretoken {command}" in result.out


def test_version_is_the_packages(run):
    assert run("--version").out == f"foretoken {foretoken.__version__}\n"


@pytest.mark.parametrize("args", [("frobnicate",), ("generate",), ("generate", "x", "--frobnicate"), ("demo", "x")])
def test_wrong_usage_is_one_line_and_exit_2(run, args):
    result = run(*args)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("foretoken: error: ")
    assert result.err.count("\n") == 1


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
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (cli.INTERRUPTED, "")


def options_of_all_commands() -> list[tuple[str, Any]]:
    groups = [("", cli.app), ("train ", cli.train_app), ("bench ", cli.bench_app)]
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


def test_a_table_in_a_pipe_has_one_line_for_each_model(run, monkeypatch):
    folder = Path("/somewhere") / ("deep" * 30)
    model = SimpleNamespace(name="m", role="target", parameters=10**6, size_bytes=10**6, path=folder)
    monkeypatch.setattr("foretoken.zoo.list_models", lambda: [model])
    monkeypatch.setenv("COLUMNS", "80")
    assert [line for line in run("zoo").out.splitlines() if line.rstrip().endswith(str(folder))]

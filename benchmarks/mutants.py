"""Do the tests detect realistic mistakes? Each mutant of mutants.toml is planted in a copy of src and tested.

A mutant names a file under src/foretoken, the text to replace, and the tests that must fail. The text must occur
exactly once, so that an outdated table is an error. The exit code is 1 if any mutant survives.
"""

import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from foretoken.bench.output import figures, wide_console

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src", "foretoken")
TABLE = Path(__file__).with_suffix(".toml")
PATIENCE = 300.0  # seconds for the tests of one mutant; a mutant that hangs is noticed too
PASSED, FAILED = 0, 1  # exit codes of pytest


class StaleMutant(Exception):
    """A mutant that does not fit the source, or whose tests do not pass without it."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted mistake. file: below src/foretoken. old, new: exact text. tests: pytest's arguments, from the root."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def package(self) -> str:
        return self.file.partition("/")[0]

    def planted(self) -> str:
        """Returns the mutated source of ``file``. Raises StaleMutant if ``old`` does not occur exactly once."""
        source = (ROOT / PACKAGE / self.file).read_text(encoding="utf-8")
        count = source.count(self.old)
        if count != 1:
            raise StaleMutant(
                f"mutant {self.name}: its text occurs {count} times in {self.file}, expected once; update {TABLE.name}"
            )
        return source.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one mutant. killed_by: the first test that failed, None if the mutant survived."""

    mutant: Mutant
    killed_by: str | None
    seconds: float


def load(path: Path = TABLE) -> list[Mutant]:
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def run(mutant: Mutant) -> Outcome:
    """Runs the mutant's tests against a copy of src that holds it.

    Raises StaleMutant if its text does not occur exactly once, or its tests cannot be collected.
    """
    source, started = mutant.planted(), time.perf_counter()
    with copied_source() as copy:
        file = copy / PACKAGE.name / mutant.file
        file.unlink()  # of kernels it is a link to the source itself
        file.write_text(source, encoding="utf-8")
        killed_by = first_failure(mutant.tests, copy)
    return Outcome(mutant, killed_by, time.perf_counter() - started)


@contextmanager
def copied_source() -> Iterator[Path]:
    """Yields a copy of src in a temporary folder; files other than source code are links."""

    def copy(source: str, target: str) -> None:
        if source.endswith(".py"):
            Path(target).write_bytes(Path(source).read_bytes())
        else:
            os.symlink(source, target)

    with tempfile.TemporaryDirectory(prefix="foretoken-mutant-") as folder:
        target = Path(folder, "src")
        copytree(ROOT / PACKAGE.parent, target, copy_function=copy, ignore=ignore_patterns("__pycache__"))
        yield target


def first_failure(tests: Sequence[str], source: Path) -> str | None:
    """Returns the first of ``tests`` that fails with the package in ``source``, None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-q", "-p", "no:cacheprovider", *tests]
    own = {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    # Loading every installed plugin takes longer than most of the tests; the options of pyproject.toml need xdist.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **own, **plugins},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {PATIENCE:.0f} s"
    if done.returncode == PASSED:
        return None
    if done.returncode != FAILED:
        what = f"pytest could not run {' '.join(tests)} (exit code {done.returncode})"
        raise StaleMutant(f"{what}:\n{done.stdout}{done.stderr}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split(" - ")[0].split(" ", 1)[1] if failed else "a test"


def check_unmutated(mutants: Sequence[Mutant]) -> None:
    """Raises StaleMutant if a test fails without any mutant, because its failure would prove nothing."""
    for package in dict.fromkeys(mutant.package for mutant in mutants):
        tests = sorted({test for mutant in mutants if mutant.package == package for test in mutant.tests})
        failure = first_failure(tests, ROOT / PACKAGE.parent)
        if failure is not None:
            raise StaleMutant(f"{failure} fails without a mutant; mend it first")


def listed(mutants: Sequence[Mutant]) -> Table:
    rows = [(mutant.package, mutant.name, mutant.file, escape("\n".join(mutant.tests))) for mutant in mutants]
    return figures(("package", "mutant", "file", "tests"), rows)


def reported(outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for outcome in outcomes:
        result = "[red]survived[/]" if outcome.killed_by is None else "[green]killed[/]"
        killed_by, seconds = escape(outcome.killed_by or ""), f"{outcome.seconds:.0f}"
        rows.append((outcome.mutant.package, outcome.mutant.name, result, killed_by, seconds))
    return figures(("package", "mutant", "result", "killed by", "s"), rows)


def main(
    only: Annotated[list[str] | None, typer.Option(help="A mutant's name; may be given several times.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the mutants and stop.")] = False,
) -> None:
    """Plants each mutant and runs its tests. The exit code is 1 if any survives."""
    console = wide_console()
    mutants = load()
    if unknown := set(only or ()) - {mutant.name for mutant in mutants}:
        raise typer.BadParameter(f"no mutant is called {', '.join(sorted(unknown))}; --list shows all")
    mutants = [mutant for mutant in mutants if not only or mutant.name in only]
    if show:
        console.print(listed(mutants))
        return
    try:
        check_unmutated(mutants)
        outcomes = []
        for mutant in mutants:
            outcomes.append(run(mutant))
            console.print(f"{mutant.name}: {'survived' if outcomes[-1].killed_by is None else 'killed'}", style="dim")
    except StaleMutant as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from error
    console.print(reported(outcomes))
    survivors = sum(outcome.killed_by is None for outcome in outcomes)
    console.print(f"{len(outcomes) - survivors} of {len(outcomes)} mutants killed")
    if survivors:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

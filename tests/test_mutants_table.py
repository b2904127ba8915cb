"""The mutants of benchmarks/mutants.toml fit the source, and planting one works. The benchmark runs all of them."""

import importlib.util
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_benchmark", ROOT / "benchmarks" / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutants = _loaded()
TABLE = mutants.load()


def test_every_mutant_changes_one_place_and_python_is_still_python() -> None:
    for mutant in TABLE:
        planted = mutant.planted()
        assert planted != (ROOT / "src" / "foretoken" / mutant.file).read_text(encoding="utf-8"), mutant.name
        if mutant.file.endswith(".py"):  # kernels are compiled by the tests that detect their mutants
            compile(planted, mutant.file, "exec")


def test_every_mutant_is_tested_in_its_own_package() -> None:
    for mutant in TABLE:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            path, _, name = test.partition("::")
            assert path.startswith(f"tests/{mutant.package}/"), mutant.name
            text = (ROOT / path).read_text(encoding="utf-8")
            assert not name or f"def {name.partition('[')[0]}(" in text, f"{mutant.name}: no test {test}"


def test_names_are_unique_and_every_package_has_several() -> None:
    names = [mutant.name for mutant in TABLE]
    assert len(set(names)) == len(names)
    packages = Counter(mutant.package for mutant in TABLE)
    assert all(packages[package] >= 10 for package in ("models", "propose", "engine", "serve"))


def test_a_mutant_that_does_not_fit_the_source_is_refused() -> None:
    with pytest.raises(mutants.StaleMutant, match="occurs 0 times in models/base"):
        mutants.Mutant("stale", "models/base.py", "no such text", "", ("tests/models/test_handle.py",)).planted()


@pytest.mark.parametrize("base, killed", [("errors.ForetokenError", True), ("Exception", False)])
def test_a_mutant_is_killed_by_a_test_that_fails_and_by_no_other(base: str, killed: bool, tmp_path: Path) -> None:
    test = tmp_path / "test_errors.py"
    test.write_text(
        f"from foretoken.core import errors\n\ndef test_base():\n    assert issubclass(errors.WriteError, {base})\n"
    )
    old, new = "class WriteError(ForetokenError)", "class WriteError(Exception)"
    outcome = mutants.run(mutants.Mutant("base", "core/errors.py", old, new, (str(test),)))
    assert ("test_errors.py::test_base" in (outcome.killed_by or "")) == killed


def test_a_mutant_of_a_kernel_leaves_the_source_alone(tmp_path: Path) -> None:
    file = ROOT / "src" / "foretoken" / "models" / "runners" / "native" / "csrc" / "chains.hpp"
    before, test = file.read_text(encoding="utf-8"), tmp_path / "test_fails.py"
    test.write_text("def test_fails():\n    assert False\n")
    mutant = next(mutant for mutant in TABLE if mutant.file.endswith("chains.hpp"))
    assert mutants.run(replace(mutant, tests=(str(test),))).killed_by
    assert file.read_text(encoding="utf-8") == before


@pytest.mark.slow
def test_a_mutant_of_the_table_is_killed() -> None:
    mutant = next(mutant for mutant in TABLE if mutant.name == "match-takes-a-token-below-another-parent")
    alone = replace(mutant, tests=("--noconftest", "tests/models/test_handle.py"))  # what conftest imports takes longer
    assert "test_handle.py::" in mutants.run(alone).killed_by

"""The documentation is run: its Python, its commands, its links, its list of packages."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from foretoken import zoo
from foretoken.cli.main import main
from foretoken.models.families.table import FAMILIES
from foretoken.propose import methods
from foretoken.propose.methods import METHODS
from foretoken.speculation import find

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:<!-- (?P<marker>[\w: ]+) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL)
# Names a reader puts an own model in for, and the bundled model that stands in for it here.
STAND_INS = {"your-target-model": "target", "your-draft-model": "draft"}


@dataclass(frozen=True)
class Block:
    """A fenced block: where it is, what language, whether a marker asks for stand-ins."""

    page: Path
    number: int
    marker: str | None
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.number}"


def blocks(*languages: str) -> Iterator[Block]:
    for page in PAGES:
        for number, match in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")), 1):
            if match["language"] in languages:
                yield Block(page, number, match["marker"], match["language"], match["code"])


def commands() -> list[str]:
    lines = [line for block in blocks("console", "bash") for line in block.code.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


@pytest.fixture
def _registries(monkeypatch):
    """Undoes what examples register."""
    monkeypatch.setattr(methods, "_registered", {})
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.mark.usefixtures("_registries", "short_audits")
@pytest.mark.parametrize("block", list(blocks("python")), ids=str)
def test_python_runs(block, capsys):
    code = block.code
    for name, role in STAND_INS.items():
        assert (name in code) <= (block.marker == "models: bundled"), f"{block} needs its marker"
        code = code.replace(f'"{name}"', repr(str(zoo.path(role))))
    exec(compile(code, str(block), "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("line", [c for c in commands() if re.search(r"(^|\| )foretoken ", c)])
def test_foretoken_commands_run(line, monkeypatch, capsys):
    monkeypatch.setattr("foretoken.plan.simulator.TOKENS", 100)  # of a simulated text
    *before, command = line.split(" | ")
    if before:
        words = shlex.split(before[0])
        assert words[0] == "echo"
        monkeypatch.setattr(sys, "stdin", io.StringIO(" ".join(words[1:]) + "\n"))
    with pytest.raises(SystemExit) as exit_:
        main(shlex.split(command, comments=True)[1:])
    out, err = capsys.readouterr()
    assert not exit_.value.code, err
    assert out


@pytest.mark.parametrize("line", [c for c in commands() if not re.search(r"(^|\| )foretoken ", c)])
def test_other_commands_exist(line):
    """Installing and measuring take long: their targets, scripts and options must at least be there."""
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, check=True)
        return
    assert words[0] == ".venv/bin/python", f"no way to check: {line}"
    script = (ROOT / words[1]).read_text(encoding="utf-8")
    for option in (word.removeprefix("--") for word in words if word.startswith("--")):
        assert re.search(rf'^    {option.replace("-", "_")}: |"--{option}"', script, re.MULTILINE), option


@pytest.fixture(scope="module")
def help_text() -> str:
    """The output of ``foretoken --help``."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        main(["--help"])
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_named_commands_exist(page, help_text):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("https://") or (page.parent / link).exists(), link
    for name in re.findall(r"`foretoken ([a-z-]+)", text):
        assert re.search(rf"^  {name}\s", help_text, re.MULTILINE), name
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_source_files_exist(page):
    folders = [ROOT, ROOT / "docs", ROOT / "benchmarks", *(ROOT / "src" / "foretoken").rglob("csrc")]
    folders += [ROOT / "src" / "foretoken"]
    for name in re.findall(r"`([\w./-]+\.(?:py|cpp|hpp|toml))`", page.read_text(encoding="utf-8")):
        assert any((folder / name).exists() for folder in folders), name


def test_every_package_is_introduced():
    text = (ROOT / "docs" / "explanation" / "structure.md").read_text(encoding="utf-8")
    packages = [p.parent.name for p in (ROOT / "src" / "foretoken").glob("*/__init__.py")]
    assert "core" in packages
    for name in packages:
        assert re.search(rf"(^      {name}/|`{name}`)", text, re.MULTILINE), name


def test_every_environment_variable_is_listed():
    text = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    for folder in ("src", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"[\"'](FORETOKEN_[A-Z_]+)[\"']", file.read_text(encoding="utf-8")):
                assert f"`{name}`" in text, f"{name} of {file.relative_to(ROOT)}"


def test_every_configuration_key_is_listed():
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    for name in METHODS:
        method = find(name)
        assert method is not None
        row = next(line for line in text.splitlines() if line.startswith("|") and f"`{name}`" in line.split("|")[1])
        listed = set(re.findall(r"`(\w+)`", text if "those of `draft_model`" in row else row))
        assert {field.name for field in fields(method.config)} <= listed, name


def test_the_picture_of_the_race_is_small_and_stands_alone():
    picture = ROOT / "docs" / "img" / "race.svg"
    assert picture.stat().st_size < 300_000
    for element in ElementTree.parse(picture).iter():
        assert element.tag.rpartition("}")[2] not in ("script", "image", "foreignObject")
        assert element.get("href", "#").startswith("#")


def test_the_workflow_makes_the_targets_of_the_local_check():
    local = re.search(r"^exec make (.+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    matrix = re.search(r"target: \[(.+)\]", (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert local is not None and matrix is not None
    assert matrix[1].split(", ") == local[1].split()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150

"""The checks of prose and size under ``make check``, and the public names, no more and no fewer."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import foretoken
from check_prose import check, findings, passages_of_cpp, passages_of_page, passages_of_python
from check_size import over_budget, sizes


def of_python(source: str, messages: bool = True) -> list[tuple[int, str]]:
    return [finding for passage in passages_of_python(source, messages) for finding in findings(passage)]


@pytest.mark.parametrize("opening", ["What", "How", "Who", "Whose", "Where", "Of", "Whatever"])
def test_docstrings_begin_with_a_noun_or_a_verb(opening):
    ((line, text),) = of_python(f'def f():\n    """{opening} it needs."""\n')
    assert line == 2 and repr(opening) in text
    assert not of_python(f'def f():\n    """Inputs. {opening} ``{opening}``"""\n')


@pytest.mark.parametrize("clause", ["what", "where", "how", "which"])
def test_returns_is_followed_by_a_noun(clause):
    ((line, _),) = of_python(f'"""A module.\n\nReturns\n{clause} it takes.\n"""\n')
    assert line == 3
    assert not of_python('"""Returns whether it is so."""\n')


@pytest.mark.parametrize("words", ["caught up", "the lesson", "a floor", "it pays", "told from", "drawn", "None where"])
def test_words_with_a_private_meaning_are_found_in_all_prose(words):
    sources = [
        f'"""A module.\n{words}\n"""\n',
        f"x = 1\n# {words}\n",
        f'x = 1\nraise ValueError(f"{{x}} is not {words}")\n',
    ]
    for source in sources:
        assert [line for line, _ in of_python(source)] == [2]
    for passages in (passages_of_cpp(f"int x;\n// {words}\n"), passages_of_page(f"A page.\n{words}\n")):
        assert [line for passage in passages for line, _ in findings(passage)] == [2]


def test_code_is_not_prose():
    assert not of_python(
        '"""Rounds by `torch.floor`, ``told`` and\n``several\nlines of pays``."""\nfloor = told\nx = "floor"\n'
    )
    assert not of_python('x = "a floor in the data of tests"\n', messages=False)
    page = "Rounds by `floor`.\n\n```python\ntold = floor()\n```\n\nLater a floor.\n"
    assert [line for passage in passages_of_page(page) for line, _ in findings(passage)] == [7]


def test_lines_of_pages_are_short_except_rows_of_tables_and_links():
    lines = ["A " * 61, "|" + "a b " * 61, "https://" + "a" * 120, "A " * 59]
    found = [finding for passage in passages_of_page("\n".join(lines)) for finding in findings(passage)]
    assert found == [(1, "122 characters; at most 120")]


def test_files_are_found_and_named(tmp_path):
    for name in ("src/a.py", "docs/b.md"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("# told\n", encoding="utf-8")
    expected = [f"{name}:1: 'told'" for name in ("docs/b.md", "src/a.py")]
    assert [text.split(" in a ")[0] for text in check(tmp_path)] == expected


def test_sizes_above_their_budgets_fail_with_the_numbers(tmp_path):
    package = tmp_path / "src" / "foretoken" / "core"
    package.mkdir(parents=True)
    for name in ("tests", "benchmarks", "docs"):
        (tmp_path / name).mkdir()
    (package / "a.py").write_text("x = 1\n" * 1500, encoding="utf-8")
    (tmp_path / "README.md").write_text("Four words\nare here\n", encoding="utf-8")
    measured = sizes(tmp_path)
    assert measured["core"] == measured["src"] == {"lines": 1500, "files": 1}
    assert measured["docs"] == {"words": 4}
    assert not over_budget(measured, measured)
    budgets = measured | {"core": {"lines": 1400, "files": 1}, "gone": {"lines": 1}}
    del budgets["tests"]
    assert over_budget(measured, budgets) == [
        "tests: no budget",
        "core: 1,500 lines, budget 1,400",
        "gone: a budget of nothing",
    ]


NAMES = {
    "LLM",
    "LoRARequest",
    "SamplingParams",
    "SpeculativeConfig",
    "RequestOutput",
    "CompletionOutput",
    "StreamPiece",
    "SpeculationStats",
    "custom_generate",
    "ForetokenError",
    "__version__",
}


def test_all_is_exact():
    assert set(foretoken.__all__) == NAMES
    assert len(foretoken.__all__) == len(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_resolves(name):
    assert getattr(foretoken, name) is not None


def test_other_names_are_an_error():
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        foretoken.Llm  # noqa: B018


def test_importing_the_package_is_light():
    code = "import sys, foretoken; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.slow
def test_class_names_are_unique_in_the_package():
    files = Path(foretoken.__file__).parent.rglob("*.py")
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    public = Counter(name for name in names if not name.startswith("_"))
    assert [name for name, count in public.items() if count > 1] == []

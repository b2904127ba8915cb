"""Prose check of docstrings, comments, messages and pages: the habits and words that CONTRIBUTING.md rules out.

Run by ``make check``. Code in backticks is not prose and is not checked. A message is a string of three words or more.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LINE_LENGTH = 120

OPENINGS = re.compile(r"\s*(What|How|Who|Whose|Where|Of|Whatever)\b")
CLAUSES = re.compile(r"\bReturns\s+(what|where|how|which|who|whose)\b")
INSTEAD = {
    r"alike": "of similar size, equal",
    r"aloud": "in the output",
    r"(becomes?|became|comes?|came) (of|by)": "the result's name",
    r"caught up|catch(es|ing)? up": "up to date, sync",
    r"drawn": "sampled (tokens), plotted (charts)",
    r"floors?(?![\w(:])": "minimum, lower bound, limit",
    r"lessons?": "training batch",
    r"left out|leaves? out|leaving out": "skipped, omitted, disabled",
    r"lives|dies|wakes": "exists, exits, activates",
    r"mend(s|ed|ing)?": "fix",
    r"nobody|somebody|anybody|whoever": "the request, thread, process or user",
    r"None where": "None if",
    r"pays?|paid|paying": "is profitable, costs",
    r"so many": "the number",
    r"teachers?(?!.forc)": "frozen target",
    r"told": "distinguished, informed, passed",
    r"what drafts": "the drafter, the proposer",
    r"whole drafts?": "an uncapped draft",
    r"witness(es)?|judges?|judged": "counter, verifier, verified",
    r"worth": "expected gain, profitable",
}
WORDS = re.compile("|".join(rf"(?P<w{i}>\b({words})\b)" for i, words in enumerate(INSTEAD)), re.IGNORECASE)
CODE_SPAN = re.compile(r"(`+).*?\1", re.DOTALL)
FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", re.DOTALL | re.MULTILINE)


class Passage(NamedTuple):
    """A docstring, comment, message or page, and the line of its file where it starts."""

    kind: str
    line: int
    text: str


def passages_of_python(source: str, messages: bool = True) -> Iterator[Passage]:
    docstrings = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            constant = node.body[0].value  # type: ignore[attr-defined]
            docstrings.add(constant)
            yield Passage("docstring", constant.lineno, constant.value)
    for node in ast.walk(tree) if messages else ():
        text = node.value if isinstance(node, ast.Constant) and node not in docstrings else None
        if isinstance(text, str) and len(text.split()) > 2:
            yield Passage("message", node.lineno, text)  # type: ignore[attr-defined]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Passage("comment", token.start[0], token.string)


def passages_of_cpp(source: str) -> Iterator[Passage]:
    for number, line in enumerate(source.splitlines(), 1):
        if comment := re.search(r"(?:^|\s)//+(.*)", line):
            yield Passage("comment", number, comment[1])


def passages_of_page(source: str) -> Iterator[Passage]:
    yield Passage("page", 1, FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), source))


def findings(passage: Passage) -> Iterator[tuple[int, str]]:
    """Yields the line and a description of each violation of ``passage``."""
    text = CODE_SPAN.sub(lambda span: "\n" * span[0].count("\n") or "`", passage.text)
    if passage.kind == "docstring" and (opening := OPENINGS.match(text)):
        yield passage.line, f"a docstring begins with {opening[1]!r}; begin with a noun or a verb"
    if clause := CLAUSES.search(text):
        yield passage.line + text.count("\n", 0, clause.start()), f"{clause[0]!r}; name the result"
    for word in WORDS.finditer(text):
        advice = [*INSTEAD.values()][int((word.lastgroup or "w0")[1:])]
        yield passage.line + text.count("\n", 0, word.start()), f"{word[0]!r} in a {passage.kind}; write: {advice}"
    for number, line in enumerate(text.splitlines() if passage.kind == "page" else (), passage.line):
        if len(line) > LINE_LENGTH and not line.lstrip().startswith("|") and " " in line.strip():  # a row has one line
            yield number, f"{len(line)} characters; at most {LINE_LENGTH}"


def check(root: Path) -> list[str]:
    """Returns the violations of the project in ``root`` as lines of ``path:line: description``."""
    folders = ("src", "tests", "examples", "tools")
    files = [
        file for folder in folders for ending in ("py", "hpp", "cpp") for file in (root / folder).rglob(f"*.{ending}")
    ]
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "benchmarks").glob("*.md")]
    result = []
    for file in sorted([*files, *pages]):
        path = file.relative_to(root)
        source = file.read_text(encoding="utf-8")
        if file.suffix == ".md":
            passages = passages_of_page(source)
        elif file.suffix == ".py":
            passages = passages_of_python(source, messages=path.parts[0] == "src")
        else:
            passages = passages_of_cpp(source)
        result += [f"{path}:{line}: {text}" for passage in passages for line, text in sorted(findings(passage))]
    return result


if __name__ == "__main__":
    violations = check(ROOT)
    print("\n".join(violations) or "prose: no violation")
    sys.exit(bool(violations))

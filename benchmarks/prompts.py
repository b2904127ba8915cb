"""Prompts by the hundred: functions of the standard library up to the end of their docstrings.

What a plan foretells for other texts is off by the difference between two samples of them, whoever plans. Eighty
prompts leave six percent of that, so where predictions are judged there have to be more. The bundled models were
trained on this library; figures over it say how good a prediction is, not how fast its reader's own text is.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

from foretoken.bench.workloads import load_prompts
from foretoken.train.data import standard_library

_SHORTEST, _LONGEST = 80, 1200  # characters
_BODY = 3  # lines after the docstring, at least: there is something to write


def function_heads() -> list[str]:
    """All of them, always in the same mixed order."""
    corpus = standard_library()
    heads = sorted({head for text in (*corpus.held_out, *corpus.train) for head in _heads(text)})
    random.Random(0).shuffle(heads)
    return heads


def some_prompts(path: Path | None, count: int) -> list[str]:
    """``count`` of a file's, in mixed order since its first may be of another kind than its next; else of ours."""
    if path is None:
        return function_heads()[:count]
    texts = load_prompts(path)
    random.Random(0).shuffle(texts)
    return texts[:count]


def _heads(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
            continue
        end, last = node.body[0].end_lineno or 0, node.end_lineno or 0
        head = dedent("\n".join(lines[node.lineno - 1 : end])) + "\n"
        if last - end >= _BODY and _SHORTEST <= len(head) <= _LONGEST:
            yield head

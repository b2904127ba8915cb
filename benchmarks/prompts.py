"""Hundreds of prompts: functions of the standard library up to the end of their docstrings.

A prediction for other texts differs from the measurement by the difference between two samples of texts, whatever the
method. With 80 prompts that difference is six percent, so judging predictions needs more prompts. The bundled models
were trained on this library: figures on it show how good a prediction is, not how fast other texts are.
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
    """Returns all such prompts, in one fixed random order."""
    corpus = standard_library()
    heads = sorted({head for text in (*corpus.held_out, *corpus.train) for head in _heads(text)})
    random.Random(0).shuffle(heads)
    return heads


def some_prompts(path: Path | None, count: int) -> list[str]:
    """Returns ``count`` prompts of a file, else our own, in random order because files may be sorted by kind."""
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

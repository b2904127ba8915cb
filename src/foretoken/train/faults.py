"""Faults in Python that can be repaired from context. Each function plants one, or returns the text unchanged."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Callable

import numpy as np

__all__ = ["FAULTS", "plant"]

_WORD = re.compile(r"[A-Za-z_]{4,}")
_MARK = re.compile(r":(?=\n)|,(?= )|[()\[\]{}\"']")
_SMALL = re.compile(r"\b(?:def|class|in|is|as|import|return|else|self) ")
_SPACED = re.compile(r"\b\w+ (?=\S)")
_EQUAL = re.compile(r"(?m)(?<=^)[ ]*(?:if|elif|while|assert|return)\b.*?(==)")
_SELF = re.compile(r"\bself\.(?=\w)")
_LINE = re.compile(r"(?m)(?<=\n)[ ]*(?=\S)")


def plant(text: str, rng: np.random.Generator, max_faults: int = 3) -> str:
    """Returns ``text`` with one to ``max_faults`` faults, unchanged only if no fault fits."""
    broken = text
    for _ in range(1 + int(rng.integers(max_faults))):
        for kind in rng.permutation(len(FAULTS)):
            worse = FAULTS[kind](broken, rng)
            if worse not in (broken, text):
                broken = worse
                break
    return broken


def _misspell(text: str, rng: np.random.Generator) -> str:
    """Drops, doubles or swaps a letter of a keyword, or of a name that occurs elsewhere."""
    words = list(_WORD.finditer(text))
    counts = Counter(word.group() for word in words)
    known = [w for w in words if counts[w.group()] > 1 or keyword.iskeyword(w.group())]
    if not known:
        return text
    word = known[int(rng.integers(len(known)))]
    at = int(rng.integers(word.start() + 1, word.end()))
    before, letter, after = text[: at - 1], text[at - 1 : at + 1], text[at + 1 :]
    return before + (letter[0], letter + letter[1], letter[::-1])[int(rng.integers(3))] + after


def _lose_mark(text: str, rng: np.random.Generator) -> str:
    return _cut(text, _one(_MARK, text, rng))


def _lose_word(text: str, rng: np.random.Generator) -> str:
    return _cut(text, _one(_SMALL, text, rng))


def _double_word(text: str, rng: np.random.Generator) -> str:
    span = _one(_SPACED, text, rng)
    return text if span is None else text[: span[1]] + text[span[0] :]


def _indent(text: str, rng: np.random.Generator) -> str:
    """Changes the indentation of one line, not the first."""
    span = _one(_LINE, text, rng)
    if span is None:
        return text
    indent = span[1] - span[0] + int(rng.choice([-4, -1, 1, 4]))
    return text[: span[0]] + " " * max(0, indent) + text[span[1] :]


def _assign(text: str, rng: np.random.Generator) -> str:
    span = _one(_EQUAL, text, rng, group=1)
    return text if span is None else text[: span[0]] + text[span[0] + 1 :]


def _lose_self(text: str, rng: np.random.Generator) -> str:
    return _cut(text, _one(_SELF, text, rng)) if text.count("self.") > 1 else text


def _one(pattern: re.Pattern[str], text: str, rng: np.random.Generator, group: int = 0) -> tuple[int, int] | None:
    """Returns the span of a random match, None if there is none."""
    spans = [match.span(group) for match in pattern.finditer(text)]
    return spans[int(rng.integers(len(spans)))] if spans else None


def _cut(text: str, span: tuple[int, int] | None) -> str:
    return text if span is None else text[: span[0]] + text[span[1] :]


Fault = Callable[[str, np.random.Generator], str]
FAULTS: tuple[Fault, ...] = (_misspell, _lose_mark, _lose_word, _double_word, _indent, _assign, _lose_self)

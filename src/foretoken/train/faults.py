"""Faults that a reader can mend: each takes a piece of Python and spoils one place of it, or finds none to spoil."""

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


def plant(text: str, rng: np.random.Generator, most: int = 3) -> str:
    """``text`` with one to ``most`` faults; equal to it only where no fault finds a place."""
    spoilt = text
    for _ in range(1 + int(rng.integers(most))):
        for kind in rng.permutation(len(FAULTS)):
            worse = FAULTS[kind](spoilt, rng)
            if worse not in (spoilt, text):
                spoilt = worse
                break
    return spoilt


def _misspell(text: str, rng: np.random.Generator) -> str:
    """A keyword, or a name that stands elsewhere too, with a letter lost, doubled or swapped with the one before."""
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
    found = _one(_SPACED, text, rng)
    return text if found is None else text[: found[1]] + text[found[0] :]


def _indent(text: str, rng: np.random.Generator) -> str:
    """One line, not the first, further left or right."""
    found = _one(_LINE, text, rng)
    if found is None:
        return text
    depth = found[1] - found[0]
    other = depth + int(rng.choice([-4, -1, 1, 4]))
    return text[: found[0]] + " " * max(0, other) + text[found[1] :]


def _assign(text: str, rng: np.random.Generator) -> str:
    found = _one(_EQUAL, text, rng, group=1)
    return text if found is None else text[: found[0]] + text[found[0] + 1 :]


def _lose_self(text: str, rng: np.random.Generator) -> str:
    return _cut(text, _one(_SELF, text, rng)) if text.count("self.") > 1 else text


def _one(pattern: re.Pattern[str], text: str, rng: np.random.Generator, group: int = 0) -> tuple[int, int] | None:
    """Where one of the matches begins and ends."""
    spans = [match.span(group) for match in pattern.finditer(text)]
    return spans[int(rng.integers(len(spans)))] if spans else None


def _cut(text: str, span: tuple[int, int] | None) -> str:
    return text if span is None else text[: span[0]] + text[span[1] :]


Fault = Callable[[str, np.random.Generator], str]
FAULTS: tuple[Fault, ...] = (_misspell, _lose_mark, _lose_word, _double_word, _indent, _assign, _lose_self)

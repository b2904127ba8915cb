"""Tasks of the bundled encoder-decoder pair: snippets of Python with planted bugs, and the original snippets.

A snippet is a function or consecutive statements of one block. The rest of it shows how to fix it: the misspelt name
occurs elsewhere, the open bracket is not closed. Most of the output is copied from the input, as in any edit.
"""

from __future__ import annotations

import ast
import keyword
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from foretoken import zoo
from foretoken.core.errors import InvalidRequest
from foretoken.train.data import Corpus, standard_library

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MIN_TOKENS = 40  # of a snippet
IGNORED = -100  # label that losses ignore, as in transformers
_MARGIN = 12  # tokens that bugs may add, including the end-of-text token
_HELD_OUT_SEED = 1 << 20  # differs from the seeds of training batches

_WORD = re.compile(r"[A-Za-z_]{4,}")
_MARK = re.compile(r":(?=\n)|,(?= )|[()\[\]{}\"']")
_SMALL = re.compile(r"\b(?:def|class|in|is|as|import|return|else|self) ")
_SPACED = re.compile(r"\b\w+ (?=\S)")
_EQUAL = re.compile(r"(?m)(?<=^)[ ]*(?:if|elif|while|assert|return)\b.*?(==)")
_SELF = re.compile(r"\bself\.(?=\w)")
_LINE = re.compile(r"(?m)(?<=\n)[ ]*(?=\S)")


def plant(text: str, rng: np.random.Generator, max_bugs: int = 3) -> str:
    """Returns ``text`` with one to ``max_bugs`` bugs, unchanged only if no bug fits."""
    broken = text
    for _ in range(1 + int(rng.integers(max_bugs))):
        for kind in rng.permutation(len(BUGS)):
            worse = BUGS[kind](broken, rng)
            if worse not in (broken, text):
                broken = worse
                break
    return broken


def _misspell(text: str, rng: np.random.Generator) -> str:
    """Drops, doubles or swaps a letter of a keyword, or of a name that occurs elsewhere."""
    words = list(_WORD.finditer(text))
    counts = Counter(word.group() for word in words)
    repeated = [w for w in words if counts[w.group()] > 1 or keyword.iskeyword(w.group())]
    if not repeated:
        return text
    word = repeated[int(rng.integers(len(repeated)))]
    at = int(rng.integers(word.start() + 1, word.end()))
    before, letter, after = text[: at - 1], text[at - 1 : at + 1], text[at + 1 :]
    return before + (letter[0], letter + letter[1], letter[::-1])[int(rng.integers(3))] + after


def _lose_mark(text: str, rng: np.random.Generator) -> str:
    return _cut(text, _span(_MARK, text, rng))


def _lose_word(text: str, rng: np.random.Generator) -> str:
    return _cut(text, _span(_SMALL, text, rng))


def _double_word(text: str, rng: np.random.Generator) -> str:
    span = _span(_SPACED, text, rng)
    return text if span is None else text[: span[1]] + text[span[0] :]


def _indent(text: str, rng: np.random.Generator) -> str:
    """Changes the indentation of one line, not the first."""
    span = _span(_LINE, text, rng)
    if span is None:
        return text
    indent = span[1] - span[0] + int(rng.choice([-4, -1, 1, 4]))
    return text[: span[0]] + " " * max(0, indent) + text[span[1] :]


def _assign(text: str, rng: np.random.Generator) -> str:
    span = _span(_EQUAL, text, rng, group=1)
    return text if span is None else text[: span[0]] + text[span[0] + 1 :]


def _lose_self(text: str, rng: np.random.Generator) -> str:
    return _cut(text, _span(_SELF, text, rng)) if text.count("self.") > 1 else text


def _span(pattern: re.Pattern[str], text: str, rng: np.random.Generator, group: int = 0) -> tuple[int, int] | None:
    """Returns the span of a random match, None if there is none."""
    spans = [match.span(group) for match in pattern.finditer(text)]
    return spans[int(rng.integers(len(spans)))] if spans else None


def _cut(text: str, span: tuple[int, int] | None) -> str:
    return text if span is None else text[: span[0]] + text[span[1] :]


Bug = Callable[[str, np.random.Generator], str]
BUGS: tuple[Bug, ...] = (_misspell, _lose_mark, _lose_word, _double_word, _indent, _assign, _lose_self)


class RepairTask(NamedTuple):
    """Input and expected output."""

    broken: str
    right: str


@dataclass(frozen=True)
class Snippets:
    """Snippets by the length in tokens of the rows to which they are padded, shortest first."""

    tokenizer: PreTrainedTokenizerFast
    by_length: dict[int, list[str]]

    @property
    def tokens(self) -> int:
        """Tokens of the padded rows."""
        return sum(length * len(texts) for length, texts in self.by_length.items())


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Labels and source, int64 [B, T], and the mask of the source, bool [B, T]."""


def lengths(window: int) -> tuple[int, ...]:
    """Returns the row lengths for snippets of at most ``window`` tokens. There are few, as each is compiled once."""
    return tuple(sorted({max(16, round(window * share / 16) * 16) for share in (0.375, 0.625)} | {window}))


def snippets(texts: tuple[str, ...], tokenizer: PreTrainedTokenizerFast, window: int, seed: int) -> Snippets:
    """Returns all snippets of ``texts`` that fit ``window``, of random lengths. Files that do not parse are skipped.

    Raises InvalidRequest if there are none.
    """
    rng = np.random.default_rng(seed)
    distinct: dict[str, None] = {}
    for text in texts:
        for snippet in _statement_runs(text, tokenizer, window - _MARGIN, rng):
            distinct.setdefault(snippet)
    listed = list(distinct)
    by_length: dict[int, list[str]] = {length: [] for length in lengths(window)}
    for snippet, encoded in zip(listed, tokenizer.backend_tokenizer.encode_batch(listed), strict=True):
        fitting = [length for length in by_length if len(encoded.ids) + _MARGIN <= length]
        if fitting and len(encoded.ids) >= min(MIN_TOKENS, window // 4):
            by_length[fitting[0]].append(snippet)
    by_length = {length: kept for length, kept in by_length.items() if kept}
    if not by_length:
        raise InvalidRequest(f"the corpus has no Python that can be cut into snippets of at most {window} tokens")
    return Snippets(tokenizer, by_length)


def batches(data: Snippets, tokens: int, seed: int, start: int = 0) -> Iterator[Batch]:
    """Yields endless batches of about ``tokens`` target tokens, all rows of one length.

    Batch i depends on (seed, i) alone, so a run resumes exactly at batch ``start``. New bugs are planted each time a
    snippet is used.
    """
    weights = np.array([length * len(texts) for length, texts in data.by_length.items()], dtype=np.float64)
    step = start
    while True:
        rng = np.random.default_rng([seed, step])
        length = list(data.by_length)[int(rng.choice(len(weights), p=weights / weights.sum()))]
        texts = data.by_length[length]
        rows = [texts[int(i)] for i in rng.integers(len(texts), size=max(1, tokens // length))]
        yield task_batch(data.tokenizer, [RepairTask(plant(text, rng), text) for text in rows], length)
        step += 1


def task_batch(tokenizer: PreTrainedTokenizerFast, tasks: list[RepairTask], length: int) -> Batch:
    """Returns tasks as rows of ``length``. Source and labels end with the end-of-text token, then ``IGNORED``."""
    end = tokenizer.eos_token_id
    encode = tokenizer.backend_tokenizer.encode_batch
    broken = encode([task.broken for task in tasks], add_special_tokens=False)
    right = encode([task.right for task in tasks], add_special_tokens=False)
    labels = torch.full((len(tasks), length), IGNORED)
    source, mask = torch.full((len(tasks), length), end), torch.zeros(len(tasks), length, dtype=torch.bool)
    for i, (question, answer) in enumerate(zip(broken, right, strict=True)):
        # Bugs rarely lengthen a snippet beyond its row. Then the input is the original.
        ids = question.ids if len(question.ids) < length else answer.ids
        source[i, : len(ids)] = torch.tensor(ids)
        mask[i, : len(ids) + 1] = True
        labels[i, : len(answer.ids) + 1] = torch.tensor([*answer.ids, end])
    return labels, source, mask


def held_out(
    count: int,
    seed: int = 0,
    corpus: Corpus | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    window: int = 176,
) -> list[RepairTask]:
    """Returns tasks from held-out files. The same arguments give the same tasks.

    Raises InvalidRequest if there are none.

    count: Greatest number of tasks. seed: Seed of the order and the bugs.
    """
    tokenizer = bundled_tokenizer() if tokenizer is None else tokenizer
    data = snippets((corpus or standard_library()).held_out, tokenizer, window, _HELD_OUT_SEED)
    texts = [text for listed in data.by_length.values() for text in listed]
    rng = np.random.default_rng([_HELD_OUT_SEED, seed])
    return [RepairTask(plant(texts[int(i)], rng), texts[int(i)]) for i in rng.permutation(len(texts))[:count]]


def held_out_batches(
    tokenizer: PreTrainedTokenizerFast, tasks: list[RepairTask], window: int, tokens: int
) -> list[Batch]:
    """Returns tasks as padded batches, each in the shortest rows that hold it."""
    by_length: dict[int, list[RepairTask]] = {length: [] for length in lengths(window)}
    for task in tasks:
        longest = max(len(ids) for ids in tokenizer(list(task), add_special_tokens=False)["input_ids"])
        fitting = [length for length in by_length if longest < length]
        by_length[fitting[0] if fitting else window].append(task)
    rows = {length: max(1, tokens // length) for length in by_length}
    return [
        task_batch(tokenizer, listed[at : at + rows[length]], length)
        for length, listed in by_length.items()
        for at in range(0, len(listed), rows[length])
    ]


def bundled_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the tokenizer of the bundled causal target, which the encoder-decoder pair shares."""
    from transformers import PreTrainedTokenizerFast

    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(zoo.path("target"))
    return tokenizer


def _statement_runs(
    text: str, tokenizer: PreTrainedTokenizerFast, max_tokens: int, rng: np.random.Generator
) -> Iterator[str]:
    """Yields runs of whole statements of one block, of random lengths up to ``max_tokens``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")
    sizes = [len(e.ids) for e in tokenizer.backend_tokenizer.encode_batch([line.strip() + "\n" for line in lines])]
    ends = np.concatenate([[0], np.cumsum(sizes)])
    for block in _blocks(tree):
        at = 0
        while at < len(block):
            first, limit = _first_line(block[at]), int(rng.integers(MIN_TOKENS, max(MIN_TOKENS, max_tokens) + 1))
            stop = at
            while stop < len(block) and ends[block[stop].end_lineno or 0] - ends[first] <= limit:
                stop += 1
            if stop == at and ends[block[at].end_lineno or 0] - ends[first] <= max_tokens:
                stop = at + 1
            if stop > at and not lines[first].lstrip().startswith("elif"):
                yield textwrap.dedent("\n".join(lines[first : block[stop - 1].end_lineno])).rstrip()
            at = max(stop, at + 1)


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block


def _first_line(statement: ast.stmt) -> int:
    """Returns the first line of a statement, decorators included, counted from 0."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)]) - 1

"""Repair tasks: snippets of Python with faults planted in them, and the snippets as they were.

A snippet is a function or a run of statements of one block. The rest of it tells how to mend it: a name misspelt here
stands there, a bracket opened is not closed. Most of the answer is copied from the question, as in any edit.
"""

from __future__ import annotations

import ast
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from foretoken import zoo
from foretoken.core.errors import InvalidRequest
from foretoken.train.data import Corpus, standard_library
from foretoken.train.faults import plant

LEAST = 40  # tokens of a snippet
_MARGIN = 12  # tokens that faults may add, the end token counted
_HELD_OUT_SEED = 1 << 20  # apart from the training batches' numbers
IGNORED = -100  # the label that no loss counts, as transformers has it


class RepairTask(NamedTuple):
    """The question and its answer."""

    broken: str
    right: str


@dataclass(frozen=True)
class Snippets:
    """Snippets by the length [tokens] of the rows they are padded to, shortest first."""

    tokenizer: PreTrainedTokenizerFast
    by_length: dict[int, list[str]]

    @property
    def tokens(self) -> int:
        """How many tokens the padded rows hold."""
        return sum(length * len(texts) for length, texts in self.by_length.items())


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # labels, source int64 [B, T], mask of the source bool [B, T]


def lengths(window: int) -> tuple[int, ...]:
    """The row lengths for snippets of at most ``window`` tokens: few, for each is compiled once."""
    return tuple(sorted({max(16, round(window * share / 16) * 16) for share in (0.375, 0.625)} | {window}))


def snippets(texts: tuple[str, ...], tokenizer: PreTrainedTokenizerFast, window: int, seed: int) -> Snippets:
    """All snippets of ``texts`` that fit ``window``, cut at random lengths. Files that do not parse are left out.

    Raises InvalidRequest where there are none.
    """
    rng = np.random.default_rng(seed)
    found: dict[str, None] = {}
    for text in texts:
        for snippet in _cut(text, tokenizer, window - _MARGIN, rng):
            found.setdefault(snippet)
    listed = list(found)
    by_length: dict[int, list[str]] = {length: [] for length in lengths(window)}
    for snippet, encoded in zip(listed, tokenizer.backend_tokenizer.encode_batch(listed), strict=True):
        fitting = [length for length in by_length if len(encoded.ids) + _MARGIN <= length]
        if fitting and len(encoded.ids) >= min(LEAST, window // 4):
            by_length[fitting[0]].append(snippet)
    by_length = {length: kept for length, kept in by_length.items() if kept}
    if not by_length:
        raise InvalidRequest(f"the corpus has no Python that can be cut into snippets of at most {window} tokens")
    return Snippets(tokenizer, by_length)


def batches(data: Snippets, tokens: int, seed: int, start: int = 0) -> Iterator[Batch]:
    """Endless batches of about ``tokens`` target tokens, all rows of one length.

    Batch ``i`` depends on (seed, i) alone, so a run resumes exactly at ``start``. Each time a snippet comes its
    faults are others.
    """
    weights = np.array([length * len(texts) for length, texts in data.by_length.items()], dtype=np.float64)
    step = start
    while True:
        rng = np.random.default_rng([seed, step])
        length = list(data.by_length)[int(rng.choice(len(weights), p=weights / weights.sum()))]
        texts = data.by_length[length]
        rows = [texts[int(i)] for i in rng.integers(len(texts), size=max(1, tokens // length))]
        yield batch(data.tokenizer, [RepairTask(plant(text, rng), text) for text in rows], length)
        step += 1


def batch(tokenizer: PreTrainedTokenizerFast, tasks: list[RepairTask], length: int) -> Batch:
    """The tasks as rows of ``length``: both sides end with the end token, labels are ignored behind it."""
    end = tokenizer.eos_token_id
    encode = tokenizer.backend_tokenizer.encode_batch
    broken = encode([task.broken for task in tasks], add_special_tokens=False)
    right = encode([task.right for task in tasks], add_special_tokens=False)
    labels = torch.full((len(tasks), length), IGNORED)
    source, mask = torch.full((len(tasks), length), end), torch.zeros(len(tasks), length, dtype=torch.bool)
    for i, (question, answer) in enumerate(zip(broken, right, strict=True)):
        # Faults that swell a snippet beyond its row are rare; it is then one to be copied as it is.
        ids = question.ids if len(question.ids) < length else answer.ids
        source[i, : len(ids)] = torch.tensor(ids)
        mask[i, : len(ids) + 1] = True
        labels[i, : len(answer.ids) + 1] = torch.tensor([*answer.ids, end])
    return labels, source, mask


def held_out(
    count: int, seed: int = 0, corpus: Corpus | None = None, tokenizer: PreTrainedTokenizerFast | None = None,
    window: int = 176,
) -> list[RepairTask]:  # fmt: skip
    """At most ``count`` tasks from files that nobody trained on, of all lengths; the bundled tokenizer and corpus
    by default. The same arguments give the same tasks. Raises InvalidRequest where there are none.
    """
    tokenizer = bundled_tokenizer() if tokenizer is None else tokenizer
    data = snippets((corpus or standard_library()).held_out, tokenizer, window, _HELD_OUT_SEED)
    texts = [text for listed in data.by_length.values() for text in listed]
    rng = np.random.default_rng([_HELD_OUT_SEED, seed])
    return [RepairTask(plant(texts[int(i)], rng), texts[int(i)]) for i in rng.permutation(len(texts))[:count]]


def held_out_batches(
    tokenizer: PreTrainedTokenizerFast, tasks: list[RepairTask], window: int, tokens: int
) -> list[Batch]:
    """The tasks as padded batches, each in the shortest rows that hold it."""
    by_length: dict[int, list[RepairTask]] = {length: [] for length in lengths(window)}
    for task in tasks:
        longest = max(len(ids) for ids in tokenizer(list(task), add_special_tokens=False)["input_ids"])
        fitting = [length for length in by_length if longest < length]
        by_length[fitting[0] if fitting else window].append(task)
    rows = {length: max(1, tokens // length) for length in by_length}
    return [
        batch(tokenizer, listed[at : at + rows[length]], length)
        for length, listed in by_length.items()
        for at in range(0, len(listed), rows[length])
    ]


def bundled_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the bundled causal target, which the encoder-decoder pair shares."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(zoo.path("target"))
    return tokenizer


def _cut(text: str, tokenizer: PreTrainedTokenizerFast, most: int, rng: np.random.Generator) -> Iterator[str]:
    """Runs of whole statements of one block, each of some random length up to ``most`` tokens."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in somebody else's strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")
    sizes = [len(e.ids) for e in tokenizer.backend_tokenizer.encode_batch([line.strip() + "\n" for line in lines])]
    ends = np.concatenate([[0], np.cumsum(sizes)])
    for block in _blocks(tree):
        at = 0
        while at < len(block):
            first, limit = _first_line(block[at]), int(rng.integers(LEAST, max(LEAST, most) + 1))
            stop = at
            while stop < len(block) and ends[block[stop].end_lineno or 0] - ends[first] <= limit:
                stop += 1
            if stop == at and ends[block[at].end_lineno or 0] - ends[first] <= most:
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
    """Counted from 0; decorators belong to what they decorate."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)]) - 1

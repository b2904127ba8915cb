"""The corpus: Python source, split by file, tokenized once, read as seeded random windows."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from foretoken.core.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
HELD_OUT_PERCENT = 2
# Tests are not typical code, and the generated tables are megabytes of character maps.
_SKIPPED = ("site-packages", "test", "tests", "idle_test", "encodings", "__pycache__")


@dataclass(frozen=True)
class Corpus:
    """Texts of training and of held-out files.

    The split hashes the relative name of each file, so that adding a file moves no other.

    Attributes:
        paths: the user's files and folders; empty for the standard library.
    """

    name: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    paths: tuple[Path, ...] = ()


OWN_TEXT = Corpus("the target's own text", (), ())
"""Stands for no files at all: the target writes its training text."""


def standard_library() -> Corpus:
    """Returns the running Python's standard library without its tests and generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(root.rglob("*.py")) if not set(_SKIPPED) & set(f.relative_to(root).parts)]
    version = ".".join(map(str, sys.version_info[:3]))
    return _split(f"CPython {version} standard library", root, files)


def from_files(paths: list[Path]) -> Corpus:
    """Returns a corpus of text files, and of the ``*.py``, ``*.md`` and ``*.txt`` files in folders.

    A ``.jsonl`` file has one text per line: a string, or the "prompt", "text" or "content" of an object.

    Raises:
        InvalidRequest: A path does not exist, or there are fewer than two texts.
    """
    files = text_files(paths)
    corpus = _split("user files", Path("."), files) if files else Corpus("", (), ())
    if (count := len(corpus.train) + len(corpus.held_out)) < 2:
        raise InvalidRequest(f"found {count} text file(s); at least two are needed, one of them to hold out")
    return replace(corpus, paths=tuple(paths))


def text_files(paths: list[Path]) -> list[Path]:
    """Returns the files of ``paths``, and those in its folders that are text by their names. Raises InvalidRequest."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(f for f in path.rglob("*") if f.suffix in {".py", ".md", ".txt"} and f.is_file())
        elif path.is_file():
            files.append(path)
        else:
            raise InvalidRequest(f"no such file or folder: {path}; pass text files or folders of them")
    return files


def _split(name: str, root: Path, files: list[Path]) -> Corpus:
    named: list[tuple[str, str]] = []
    for file in files:
        relative = (file.relative_to(root) if file.is_relative_to(root) else file).as_posix()
        text = file.read_text(encoding="utf-8", errors="ignore")
        if file.suffix == ".jsonl":
            named += [(f"{relative}:{i}", line) for i, line in enumerate(_lines(file, text))]
        else:
            named.append((relative, text))
    ranked = [text for _, text in sorted(named, key=lambda pair: _rank(pair[0]))]
    count = max(1, len(ranked) * HELD_OUT_PERCENT // 100)
    return Corpus(name, tuple(t for t in ranked[count:] if t.strip()), tuple(ranked[:count]))


def _rank(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def _lines(file: Path, text: str) -> list[str]:
    texts = []
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InvalidRequest(f"{file}, text {number}, is not JSON ({error}); expected one value a line") from error
        if isinstance(value, dict):
            value = next((value[key] for key in ("prompt", "text", "content") if key in value), None)
        if not isinstance(value, str):
            raise InvalidRequest(f'{file}, text {number}, has no text; expected a string, or an object with "prompt"')
        texts.append(value)
    return texts


def train_tokenizer(corpus: Corpus, vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """Trains byte-level BPE on the training files. Every byte string round-trips."""
    from transformers import PreTrainedTokenizerFast  # takes seconds to import

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.train, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, model_max_length=8192)


def encode(texts: tuple[str, ...], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Returns all texts as one stream of token ids, int64 [N], with an end-of-text token before each."""
    ids: list[int] = []
    # The backend tokenizer does not warn about files that are longer than the model's positions.
    for encoded in tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False):
        ids.append(tokenizer.eos_token_id)
        ids.extend(encoded.ids)
    return torch.tensor(ids, dtype=torch.int64)


def windows(stream: torch.Tensor, batch: int, length: int, seed: int, start: int = 0) -> Iterator[torch.Tensor]:
    """Yields endless batches [batch, length]. Each epoch cuts the stream at another offset and shuffles the windows.

    Batch i depends on (seed, i) alone, so a run resumes exactly at batch ``start``.
    """
    per_epoch = (len(stream) - length) // length // batch
    if per_epoch < 1:
        raise InvalidRequest(
            f"the corpus has {len(stream)} tokens; at least {(batch + 1) * length} are needed for "
            f"{batch} windows of {length}: add text, or lower --batch or --window"
        )
    step = start
    while True:
        epoch, at = divmod(step, per_epoch)
        rng = np.random.default_rng([seed, epoch])
        offset = int(rng.integers(0, length))
        order = rng.permutation((len(stream) - offset) // length)
        rows = order[at * batch : (at + 1) * batch]
        yield torch.stack([stream[offset + r * length : offset + (r + 1) * length] for r in rows])
        step += 1


def held_out_batches(stream: torch.Tensor, batch: int, length: int) -> list[torch.Tensor]:
    """Returns the held-out stream [N] as batches of consecutive windows, without the incomplete last window."""
    if len(stream) < 16:
        raise InvalidRequest(f"the held-out files have {len(stream)} tokens; at least 16 are needed: add text")
    length = min(length, len(stream))
    rows = stream[: len(stream) // length * length].view(-1, length)
    return list(rows.split(batch))

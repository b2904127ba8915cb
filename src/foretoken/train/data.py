"""The corpus (Python source or files, split by file), and windows of text to train and evaluate heads on.

A head must be accurate on the target's text, not on the corpus's. A target writes text without data, too: both sides of
conversations (Magpie, 2406.08464), or documents.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from foretoken.core.errors import InvalidRequest, TrainingError
from foretoken.core.files import atomic_file
from foretoken.core.progress import Reporter
from foretoken.engine.prompts import apply_template, own_template
from foretoken.models.formats.checkpoint import eos_ids, load_tokenizer, vocabulary_size
from foretoken.train import processes
from foretoken.train.config import TextConfig, TrainConfig
from foretoken.train.frozen_target import fixed_windows
from foretoken.train.sampling import BatchDecoder, Turns, mixed_temperatures, open_decoder, sample_windows

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

    A ``.jsonl`` file has one text per line: a string, or the "prompt", "text" or "content" of an object. Raises
    InvalidRequest if a path does not exist, or there are fewer than two texts.
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
    ranked = [text for _, text in sorted(named, key=lambda pair: hashlib.sha256(pair[0].encode()).digest()[:4])]
    count = max(1, len(ranked) * HELD_OUT_PERCENT // 100)
    return Corpus(name, tuple(t for t in ranked[count:] if t.strip()), tuple(ranked[:count]))


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


MIN_PROMPT, MAX_PROMPT = 30, 150  # tokens
FILE = Path(__file__).with_name("requests.json")
EMPTY_SHARE = 0.3
COMPARED = 96  # windows whose first tokens are equal count as duplicates
_MARKS = ("QXFIRST", "QXSECOND", "QXTHIRD")


def cut_prompts(stream: Tensor, rng: np.random.Generator, count: int, shortest: int, longest: int) -> list[list[int]]:
    """Returns prompts of one random length from random positions of ``stream`` [N]."""
    length = min(int(rng.integers(shortest, longest, endpoint=True)), len(stream))
    return [stream[at : at + length].tolist() for at in rng.integers(0, len(stream) - length, count, endpoint=True)]


def sample_continuations(
    decoder: BatchDecoder,
    stream: Tensor,
    temperatures: Tensor,
    length: int,
    seed: int,
    limit_seconds: float | None = None,
) -> Tensor:
    """Samples windows that continue prompts from a corpus, which fill at most half of a window."""
    longest = min(MAX_PROMPT, max(1, length // 2))
    starts = partial(cut_prompts, stream, shortest=min(MIN_PROMPT, longest), longest=longest)
    return sample_windows(decoder, Turns(()), starts, temperatures, length, seed, limit_seconds)


def prepare_windows(
    target: Path,
    device: torch.device,
    corpus: Corpus,
    folder: Path,
    config: TrainConfig,
    data: TextConfig,
    source: Path | None = None,
) -> dict[str, Tensor]:
    """Returns windows of text, int64 [N, T], by name.

    "train" is for training. ``"greedy"`` and ``"drawn"`` are sampled by the target from prefixes of held-out files at
    temperatures 0 and 1. "text" is cut from held-out files. Without a corpus, the target writes everything, see
    ``conversations``. Windows in ``folder`` for the same target, corpus and settings are reused.

    source: the user's own file of the target, which writes faster on a CPU than the folder ``target``.

    Raises:
        InvalidRequest: ``folder`` holds other windows, or the corpus is shorter than a window.
        TrainingError: The windows cannot be written.
    """
    tokenizer = load_tokenizer(target)
    stream, held_out = encode(corpus.train, tokenizer), encode(corpus.held_out, tokenizer)
    if corpus != OWN_TEXT and min(len(stream), len(held_out)) < config.window:
        raise InvalidRequest(
            f"the corpus has {len(stream)} tokens and {len(held_out)} held out; at least one window of {config.window} "
            "of each is needed: add text or lower --window"
        )
    key, file = _key(target, stream, config, data), folder / "windows.pt"
    if processes.rank() == 0 and not file.exists():
        with open_decoder(target, source or target, device, config.window) as decoder:
            if corpus == OWN_TEXT:
                windows = _own_text(target, decoder, config, data)
            else:
                windows = _from_corpus(decoder, stream, held_out, config, data)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(file) as temporary:
                torch.save(windows | {"key": key}, temporary)
        except (OSError, RuntimeError) as error:  # torch's zip writer raises RuntimeError on a full disk
            with suppress(OSError):
                folder.rmdir()  # if there is nothing else in it
            raise TrainingError(f"cannot keep the target's text in {folder}: {error}; free some space") from error
    processes.wait()
    loaded: dict[str, Tensor] = torch.load(file, weights_only=True)
    if loaded.pop("key") != key:
        raise InvalidRequest(
            f"{folder} holds text of another target, corpus or setting; choose another folder, or delete it"
        )
    return loaded


def _from_corpus(
    decoder: BatchDecoder, stream: Tensor, held_out: Tensor, config: TrainConfig, data: TextConfig
) -> dict[str, Tensor]:
    """Returns all windows. Those for training are shuffled, so that any prefix is a fair sample."""
    windows = {
        name: sample_continuations(
            decoder, held_out, torch.full((data.held_out,), temperature), config.window, config.seed + 1
        )
        for name, temperature in (("greedy", 0.0), ("drawn", 1.0))
    }
    share = data.generated_share
    train = [fixed_windows(stream, config.window, config.seed)[: round(data.windows * (1 - share))]]
    if count := round(data.windows * share):
        temperatures = mixed_temperatures(np.random.default_rng([config.seed, 2]), count)
        limit = _time_limit(config, data)
        sampled = sample_continuations(decoder, stream, temperatures, config.window, config.seed, limit)
        # At the time limit there are fewer, and then fewer windows of the corpus, too.
        cut = train[0][: max(1, round(len(sampled) / share * (1 - share)))] if share < 1 else train[0][:0]
        train = [sampled, cut]
    rows = torch.cat(train)
    windows["text"] = fixed_windows(held_out, config.window, config.seed)[: data.held_out]
    return windows | {"train": rows[torch.from_numpy(np.random.default_rng(config.seed).permutation(len(rows)))]}


def _own_text(target: Path, decoder: BatchDecoder, config: TrainConfig, data: TextConfig) -> dict[str, Tensor]:
    """Returns all windows, written by the target alone. Half of the answers are greedy."""
    tokenizer, size = load_tokenizer(target), vocabulary_size(target) or 0
    turns, kind = turns_of(tokenizer, eos_ids(target, tokenizer, size))
    mixed = mixed_temperatures(np.random.default_rng([config.seed, 5]), data.windows, 0.5, 0.25)
    temperatures = torch.cat((torch.zeros(data.held_out), torch.ones(data.held_out), mixed))
    starts, limit = partial(starts_of, tokenizer, turns), _time_limit(config, data)
    windows = sample_windows(decoder, turns, starts, temperatures, config.window, config.seed + 1, limit)
    greedy, drawn = windows[: data.held_out], windows[data.held_out : 2 * data.held_out]
    train = without_duplicates(windows[2 * data.held_out :])
    with Reporter(kind) as report:
        dropped = len(windows) - 2 * data.held_out - len(train)
        report.line(f"{kind}: {len(train):,} windows of {config.window} tokens, {dropped:,} duplicates dropped")
    return {"train": train, "greedy": greedy, "drawn": drawn, "text": drawn}


def _time_limit(config: TrainConfig, data: TextConfig) -> float | None:
    return None if config.minutes is None else config.minutes * 60 * data.writing_share


def _key(target: Path, stream: Tensor, config: TrainConfig, data: TextConfig) -> str:
    digest = hashlib.sha256(stream.numpy().tobytes())
    for file in sorted(target.glob("*.safetensors")):
        with file.open("rb") as weights:
            digest.update(hashlib.file_digest(weights, "sha256").digest())
    digest.update(f"{config.window} {config.seed} {data.windows} {data.held_out} {data.generated_share}".encode())
    return digest.hexdigest()


def turns_of(tokenizer: Any, ends: list[int]) -> tuple[Turns, str]:
    """Returns the turns of a model with these end-of-sequence ids, and its kind of text: conversations or documents.

    Conversations need a chat template that keeps earlier turns and ends an answer with one of ``ends``.
    """
    try:
        own_template(tokenizer, "this model", "")
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
        rest: str = apply_template(tokenizer, messages, tokenize=False)
        separators = []
        for mark in _MARKS:
            before, rest = rest.split(mark, 1)
            separators.append(tuple(tokenizer.encode(before, add_special_tokens=False)))
        opening, answer, request = separators
        if request[0] in ends and opening:
            marked = [answer[0]] if tokenizer.decode([answer[0]], skip_special_tokens=True) == "" else []
            return Turns(opening, answer, request, tuple({*ends, *marked})), "conversations"
    except (InvalidRequest, ValueError, IndexError):  # no template, or one that omits earlier turns
        pass
    start = tuple(tokenizer.encode("", add_special_tokens=True)) or tuple(ends[:1]) or (0,)
    return Turns(start, ends=tuple(ends)), "documents"


def starts_of(tokenizer: Any, turns: Turns, rng: np.random.Generator, count: int) -> list[list[int]]:
    """Returns first tokens of ``count`` texts: the opening, and in a conversation the beginning of a request."""
    if not turns.answer:
        return [list(turns.opening)] * count
    texts = beginnings(rng, count)
    return [[*turns.opening, *(tokenizer.encode(text, add_special_tokens=False) if text else ())] for text in texts]


def without_duplicates(windows: Tensor) -> Tensor:
    """Returns the windows [N, T] whose first tokens are those of no earlier one."""
    _, first = np.unique(windows[:, :COMPARED].numpy(), axis=0, return_index=True)
    return windows[torch.from_numpy(np.sort(first))]


@cache
def _word_lists() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def beginnings(rng: np.random.Generator, count: int) -> list[str]:
    """Returns beginnings of ``count`` requests, which add variety. A fraction ``EMPTY_SHARE`` of them is empty."""
    # Most words of a vocabulary begin with a space: one at the end of a beginning would exclude them.
    return ["" if rng.random() < EMPTY_SHARE else _beginning(rng).rstrip(" ") for _ in range(count)]


def _beginning(rng: np.random.Generator) -> str:
    def chosen(listed: Sequence[str]) -> str:
        return listed[int(rng.integers(len(listed)))]

    lists = _word_lists()
    return chosen(lists["beginnings"]).format(
        topic=chosen(lists["topics"]),
        name=chosen(lists["names"]),
        other=chosen(lists["names"]),
        number=int(rng.integers(2, 200)),
        language=chosen(lists["languages"]),
        **{name: chosen(words) for name, words in lists["words"].items()},
    )

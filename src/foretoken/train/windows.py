"""Windows of text to train and evaluate heads on. A head must be accurate on the target's text, not on the corpus's."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest, TrainingError
from foretoken.core.files import atomic_file
from foretoken.core.progress import Reporter
from foretoken.models.formats.checkpoint import eos_ids, load_tokenizer, vocabulary_size
from foretoken.train import processes
from foretoken.train.config import TextConfig, TrainConfig
from foretoken.train.conversations import starts_of, turns_of, without_duplicates
from foretoken.train.data import OWN_TEXT, Corpus, encode
from foretoken.train.dataset import fixed_windows
from foretoken.train.sampling import BatchDecoder, Turns, mixed_temperatures, open_decoder, sample_windows

MIN_PROMPT, MAX_PROMPT = 30, 150  # tokens


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

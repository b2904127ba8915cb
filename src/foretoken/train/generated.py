"""Windows of text that the target samples. A draft must be accurate on the target's text, not on the corpus's."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, TrainingError
from foretoken.core.files import atomic_file
from foretoken.models.base import Handle, Model
from foretoken.models.formats.checkpoint import eos_ids, load_tokenizer, vocabulary_size
from foretoken.models.loading import load_model
from foretoken.train import processes
from foretoken.train.conversations import mixed_heats, turns_of, without_duplicates, write_windows
from foretoken.train.data import OWN_TEXT, Corpus, encode
from foretoken.train.head_config import HeadConfig
from foretoken.train.optimization import TrainConfig
from foretoken.train.progress import Reporter
from foretoken.train.steps import open_writer
from foretoken.train.teacher import fixed_windows

_BATCH = 64  # sequences per forward pass


@dataclass(frozen=True)
class Prompts:
    """Random prefixes from a corpus, and the temperatures at which the target continues them.

    Args:
        shortest: Smallest number of tokens.
        longest: Greatest number of tokens.
        temperature: Sampling temperature. None is a mixture: 20 % at 0, 50 % at 1, the others uniform between.
    """

    shortest: int = 30
    longest: int = 150
    temperature: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise InvalidRequest(
                f"prompts of {self.shortest} to {self.longest} tokens; expected 1 <= shortest <= longest"
            )

    def cuts(self, stream: torch.Tensor, rng: np.random.Generator, count: int) -> list[list[int]]:
        """Returns ``count`` prompts from random places of ``stream`` [N]."""
        lengths = rng.integers(self.shortest, self.longest, count, endpoint=True).clip(max=len(stream))
        starts = [int(rng.integers(0, len(stream) - length, endpoint=True)) for length in lengths]
        return [stream[at : at + int(n)].tolist() for at, n in zip(starts, lengths, strict=True)]

    def temperatures(self, rng: np.random.Generator, count: int) -> list[float]:
        """Returns a temperature for each of ``count`` sequences."""
        if self.temperature is not None:
            return [self.temperature] * count
        kinds, between = rng.random(count), rng.random(count)
        return [0.0 if k < 0.2 else 1.0 if k > 0.5 else float(t) for k, t in zip(kinds, between, strict=True)]


PROMPTS = Prompts()


@torch.inference_mode()
def continue_prompts(
    model: Model, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], length: int, seed: int
) -> list[list[int]]:
    """Samples continuations in one batch, and returns each prompt with its continuation, ``length`` tokens in all.

    End-of-text tokens do not stop a text, because windows of the corpus also continue past the end of a file.
    Temperature 0 takes the argmax. The samples depend on ``seed`` and on the other sequences of the batch.
    """
    generator = torch.Generator().manual_seed(seed)
    heat = torch.tensor(temperatures)
    scale = heat.where(heat > 0, 1.0)[:, None]
    alive: dict[int, Handle] = {i: model.open(list(prompt)) for i, prompt in enumerate(prompts)}
    done: list[list[int]] = [list(prompt[:length]) for prompt in prompts]
    try:
        while True:
            for i in [i for i, handle in alive.items() if len(handle.tokens) >= length]:
                handle = alive.pop(i)
                done[i] = handle.tokens[:length]
                model.close(handle)
            if not alive:
                return done
            rows, handles = torch.tensor(list(alive)), list(alive.values())
            scores = model.score(handles, [Draft.empty()] * len(handles))
            logits = torch.cat([score.logits for score in scores]).float()
            weights = (logits / scale[rows]).softmax(-1)
            # Inverse transform sampling: one random number per row. One per token would cost more than the pass.
            summed = weights.cumsum(-1)
            at = torch.rand(len(rows), 1, generator=generator) * summed[:, -1:]
            drawn = torch.searchsorted(summed, at, right=True)[:, 0].clamp(max=model.vocab_size - 1)
            chosen = torch.where(heat[rows] > 0, drawn, logits.argmax(-1))
            model.commit(handles, [[token] for token in chosen.tolist()])
    finally:
        for handle in alive.values():
            model.close(handle)


def sample_windows(
    model: Model,
    stream: torch.Tensor,
    count: int,
    length: int,
    seed: int,
    prompts: Prompts = PROMPTS,
    limit_seconds: float | None = None,
) -> torch.Tensor:
    """Samples windows of text from the model.

    Args:
        model: The target.
        stream: Token ids of the corpus, [N], from which prompts are cut.
        count: Greatest number of windows.
        length: Tokens of a window.
        seed: Seed of prompts and samples.
        prompts: Lengths and temperatures.
        limit_seconds: Time after which no further batch begins.

    Returns:
        [count, length], or fewer rows, but at least one batch.

    Raises:
        InvalidRequest: A window is longer than the model's positions.
    """
    if length > model.max_length:
        raise InvalidRequest(f"windows of {length} exceed the model's {model.max_length} positions; lower --window")
    rows: list[list[int]] = []
    started = time.monotonic()
    with Reporter("sampling text") as report:
        while len(rows) < count:
            rng = np.random.default_rng([seed, 2, len(rows)])
            n = min(_BATCH, count - len(rows))
            cuts, temperatures = prompts.cuts(stream, rng, n), prompts.temperatures(rng, n)
            rows += continue_prompts(model, cuts, temperatures, length, int(rng.integers(2**62)))
            spent = time.monotonic() - started
            report.update(len(rows) / count, f"{len(rows) * length / spent:,.0f} tok/s")
            if limit_seconds is not None and spent > limit_seconds:
                break
    return torch.tensor(rows)


def prepare_windows(
    target: Path,
    device: torch.device,
    corpus: Corpus,
    folder: Path,
    config: TrainConfig,
    data: HeadConfig,
    source: Path | None = None,
) -> dict[str, torch.Tensor]:
    """Returns windows of text, int64 [N, T], by name.

    "train" is for training. "greedy" and "drawn" are sampled by the target from prefixes of held-out files at
    temperatures 0 and 1. "text" is cut from held-out files. Without a corpus, the target writes everything, see
    ``conversations``. Windows in ``folder`` for the same target, corpus and settings are reused.

    Args:
        target: Folder of the target.
        device: Its device.
        corpus: Text, or ``OWN_TEXT``.
        folder: Folder of the windows.
        config: Training configuration.
        data: Settings of the data.
        source: The user's own file of the target, which writes faster on a CPU than the folder.

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
        if corpus == OWN_TEXT:
            windows = _own_text(target, source or target, device, config, data)
        else:
            windows = _windows(load_model(target, "bfloat16", device), stream, held_out, config, data)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(file) as partial:
                torch.save(windows | {"key": key}, partial)
        except (OSError, RuntimeError) as error:  # torch's zip writer raises RuntimeError on a full disk
            with suppress(OSError):
                folder.rmdir()  # if there is nothing else in it
            raise TrainingError(f"cannot keep the target's text in {folder}: {error}; free some space") from error
    processes.wait()
    windows = torch.load(file, weights_only=True)
    if windows.pop("key") != key:
        raise InvalidRequest(
            f"{folder} holds lessons from another target, corpus or setting; choose another folder, or delete it"
        )
    loaded: dict[str, torch.Tensor] = windows
    return loaded


def _windows(
    model: Model, stream: torch.Tensor, held_out: torch.Tensor, config: TrainConfig, data: HeadConfig
) -> dict[str, torch.Tensor]:
    """Returns all windows. Those for training are shuffled, so that any prefix is a fair sample."""
    tests = {
        name: sample_windows(model, held_out, data.held_out, config.window, config.seed + 1, Prompts(temperature=heat))
        for name, heat in (("greedy", 0.0), ("drawn", 1.0))
    }
    cut = fixed_windows(stream, config.window, config.seed)[: round(data.windows * (1 - data.generated_share))]
    parts = [cut]
    if count := round(data.windows * data.generated_share):
        limit = None if config.minutes is None else config.minutes * 60 * data.writing_share
        own = sample_windows(model, stream, count, config.window, config.seed, limit_seconds=limit)
        share = data.generated_share
        parts = [own, cut[: max(1, round(len(own) / share * (1 - share)))] if share < 1 else cut[:0]]
    windows = torch.cat(parts)
    tests["text"] = fixed_windows(held_out, config.window, config.seed)[: data.held_out]
    return tests | {"train": windows[torch.from_numpy(np.random.default_rng(config.seed).permutation(len(windows)))]}


def _own_text(
    target: Path, source: Path, device: torch.device, config: TrainConfig, data: HeadConfig
) -> dict[str, torch.Tensor]:
    """Returns all windows, written by the target alone."""
    tokenizer, size = load_tokenizer(target), vocabulary_size(target) or 0
    turns, kind = turns_of(tokenizer, eos_ids(target, tokenizer, size))
    heats = mixed_heats(np.random.default_rng([config.seed, 5]), data.windows)
    heats = torch.cat((torch.zeros(data.held_out), torch.ones(data.held_out), heats))
    limit = None if config.minutes is None else config.minutes * 60 * data.writing_share
    with open_writer(target, source, device, config.window) as (batch, open_steps):
        windows = write_windows(
            open_steps, tokenizer, turns, heats, config.window, batch, config.seed + 1, device, limit
        )
    greedy, drawn = windows[: data.held_out], windows[data.held_out : 2 * data.held_out]
    train = without_duplicates(windows[2 * data.held_out :])
    with Reporter(kind) as report:
        dropped = len(windows) - 2 * data.held_out - len(train)
        report.line(f"{kind}: {len(train):,} windows of {config.window} tokens, {dropped:,} duplicates dropped")
    return {"train": train, "greedy": greedy, "drawn": drawn, "text": drawn}


def _key(target: Path, stream: torch.Tensor, config: TrainConfig, data: HeadConfig) -> str:
    digest = hashlib.sha256(stream.numpy().tobytes())
    for file in sorted(target.glob("*.safetensors")):
        with file.open("rb") as weights:
            digest.update(hashlib.file_digest(weights, "sha256").digest())
    digest.update(f"{config.window} {config.seed} {data.windows} {data.held_out} {data.generated_share}".encode())
    return digest.hexdigest()

"""Samples windows of text from a model in large batches: through our models on a CPU, through transformers on a GPU."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.progress import Reporter
from foretoken.models.base import Handle, Model
from foretoken.models.formats.checkpoint import load_config
from foretoken.models.formats.gguf import is_gguf
from foretoken.models.loading import load_model
from foretoken.train.frozen_target import FrozenTarget

BATCH = 64  # windows at once through our models
KV_SHARE = 0.6  # of the free memory of a GPU, for keys and values
MAX_BATCH = 4096
MAX_TURN = 448  # tokens; a greedy answer of a small model may never end


DecodeSteps = Callable[[Tensor], Tensor]
"""Appends tokens [B, n] to a batch of sequences, and returns the logits [B, V] of the next ones."""


class ModelSteps:
    """Steps of a batch through a model of ours."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.handles: list[Handle] = []

    def __call__(self, tokens: Tensor) -> Tensor:
        listed = tokens.tolist()
        if self.handles:
            self.model.commit(self.handles, listed)
        else:
            self.handles = [self.model.open(prompt) for prompt in listed]
        scores = self.model.score(self.handles, [Draft.empty()] * len(listed))
        return torch.cat([score.logits for score in scores])

    def close(self) -> None:
        for handle in self.handles:
            self.model.close(handle)
        self.handles = []


class _PreallocatedLayer(DynamicLayer):
    """KV cache of a layer in memory that is allocated once: appending copies nothing."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.used = length, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [
                states.new_empty(*states.shape[:2], self.length, states.shape[-1])
                for states in (key_states, value_states)
            ]
        end = self.used + key_states.shape[-2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.used : end] = states
        self.used = end
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values


class TransformersSteps:
    """Steps of a batch through a model of transformers whose layers all have full attention."""

    def __init__(self, model: Any, length: int) -> None:
        self.model, self.cache = model, DynamicCache()
        self.cache.layers = [
            _PreallocatedLayer(length) for _ in range(model.config.get_text_config().num_hidden_layers)
        ]

    def __call__(self, tokens: Tensor) -> Tensor:
        options = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        logits: Tensor = self.model(tokens, **options).logits[:, -1]
        return logits


def gpu_batch(model: Any, length: int) -> int:
    """Returns the number of windows of ``length`` tokens whose keys and values fit into a GPU's free memory."""
    shape = model.config.get_text_config()
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    row = 4 * length * shape.num_hidden_layers * shape.num_key_value_heads * head_dim
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(MAX_BATCH, int(KV_SHARE * free / row)))


@dataclass(frozen=True)
class BatchDecoder:
    """Decodes batches of at most ``batch`` new sequences of at most ``max_length`` tokens.

    ``begin`` begins a batch, and ends the one before. Its logits are on ``device``.
    """

    batch: int
    begin: Callable[[], DecodeSteps]
    device: torch.device
    max_length: int


@contextmanager
def open_decoder(folder: Path, source: Path, device: torch.device, length: int) -> Iterator[BatchDecoder]:
    """Yields the decoder of the model in ``folder``, for windows of ``length`` tokens.

    source: the user's own file of the model, which is faster on a CPU than the folder.
    """
    config = load_config(folder)
    windowed = bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
    if device.type == "cpu" or windowed or {*(config.get("layer_types") or ())} - {"full_attention"}:
        dtype = "auto" if device.type == "cpu" and is_gguf(source) else "bfloat16"
        model = load_model(source if device.type == "cpu" else folder, dtype, device)
        steps = ModelSteps(model)

        def begin() -> DecodeSteps:
            steps.close()
            return steps

        yield BatchDecoder(BATCH, begin, device, model.max_length)
        steps.close()
    else:
        target = FrozenTarget(folder, device)
        positions = int(target.config.max_position_embeddings)
        batch = gpu_batch(target.model, length)
        yield BatchDecoder(batch, lambda: TransformersSteps(target.model, length), device, positions)
        del target
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Turns:
    """Token ids between the turns of a conversation. A document has an opening alone."""

    opening: tuple[int, ...]  # before the first request
    answer: tuple[int, ...] = ()  # between a request and its answer; the first one ends the request
    request: tuple[int, ...] = ()  # between an answer and the next request; the first one ends the answer
    ends: tuple[int, ...] = ()  # ids that end a turn, or a document


class Sampler:
    """Chooses the tokens of a batch of sequences: given ones first, those of the template between turns, else samples.

    End-of-text tokens do not end a sequence, since windows of a corpus go on after the end of a file, too.

    ``starts`` are the given first tokens of each sequence, [B] lists. Temperatures are [B].
    """

    def __init__(
        self,
        turns: Turns,
        starts: list[list[int]],
        request_temperatures: Tensor,
        answer_temperatures: Tensor,
        device: torch.device,
        seed: int,
    ) -> None:
        bridges = [list(turns.answer), list(turns.request)]
        width = max(map(len, [*starts, *bridges]))
        self.bridges = _padded(bridges, width, device)
        self.bridge_lengths = torch.tensor([len(bridge) for bridge in bridges], device=device)
        self.given, self.count = _padded(starts, width, device), torch.tensor(list(map(len, starts)), device=device)
        self.position = torch.zeros_like(self.count)  # in the given tokens
        self.answering = torch.zeros_like(self.count)
        self.age = torch.zeros_like(self.count)  # tokens sampled in the turn
        self.temperatures = torch.stack((request_temperatures, answer_temperatures)).to(device)
        self.ends = torch.tensor(turns.ends, dtype=torch.int64, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def begin(self) -> Tensor:
        """Returns the given tokens that all sequences have, [B, n], n at least 1."""
        length = int(self.count.min())
        self.position += length
        return self.given[:, :length]

    def next(self, logits: Tensor) -> Tensor:
        """Returns the next token of each sequence [B], from logits [B, V]."""
        logits = logits.to(self.given.device, torch.float32)  # our models return them in host memory
        temperatures = self.temperatures.gather(0, self.answering[None])[0]
        noise = torch.empty_like(logits).exponential_(generator=self.generator).clamp_(min=1e-20).log_()
        sampled = torch.addcmul(logits, noise, temperatures[:, None], value=-1, out=noise).argmax(-1)  # Gumbel maximum
        pending = self.position < self.count
        given = self.given.gather(1, self.position.clamp(max=self.given.shape[1] - 1)[:, None])[:, 0]
        token = torch.where(pending, given, sampled)
        self.position += pending
        self.age = torch.where(pending, 0, self.age + 1)
        if self.bridge_lengths[0] == 0:
            return token
        ended = ~pending & (torch.isin(sampled, self.ends) | (self.age >= MAX_TURN))
        self.given = torch.where(ended[:, None], self.bridges[self.answering], self.given)
        self.count = torch.where(ended, self.bridge_lengths[self.answering], self.count)
        self.position = torch.where(ended, 1, self.position)
        token = torch.where(ended, self.given[:, 0], token)
        self.answering = self.answering ^ ended.long()
        return token


def _padded(lists: list[list[int]], width: int, device: torch.device) -> Tensor:
    return torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in lists], device=device)


@torch.inference_mode()
def sample_windows(
    decoder: BatchDecoder,  # the model's decoder
    turns: Turns,  # the model's turns
    starts: Callable[[np.random.Generator, int], list[list[int]]],  # returns given first tokens for a number of windows
    temperatures: Tensor,  # temperatures of the answers, or of all tokens of documents, [N]; requests have 0.6 to 1
    length: int,  # tokens of a window
    seed: int,  # seed of the starts and samples
    limit_seconds: float | None = None,  # time after which no further batch begins
) -> Tensor:
    """Samples windows of text.

    Returns token ids [N, length], in the order of ``temperatures``. At the time limit, fewer, but at least one batch.
    Raises InvalidRequest if a window is longer than the model's positions.
    """
    if length > decoder.max_length:
        raise InvalidRequest(f"windows of {length} exceed the model's {decoder.max_length} positions; lower --window")
    rows: list[Tensor] = []
    done, started = 0, time.monotonic()
    with Reporter("the target writes text") as report:
        while done < len(temperatures):
            rng = np.random.default_rng([seed, 4, done])
            answers = temperatures[done : done + decoder.batch]
            given = [start[:length] for start in starts(rng, len(answers))]
            requests = torch.from_numpy(rng.uniform(0.6, 1.0, len(answers))).float() if turns.answer else answers
            sampler = Sampler(turns, given, requests, answers, decoder.device, int(rng.integers(2**62)))
            steps, tokens = decoder.begin(), [sampler.begin()]
            for at in range(tokens[0].shape[1], length):
                tokens.append(sampler.next(steps(tokens[-1]))[:, None])
                if at % 64 == 0:
                    written = done * length + len(answers) * at
                    speed = written / (time.monotonic() - started)
                    report.update(written / (len(temperatures) * length), f"{written:,} tokens  {speed:,.0f} tok/s")
            rows.append(torch.cat(tokens, dim=1).cpu())
            done += len(answers)
            if limit_seconds is not None and time.monotonic() - started > limit_seconds:
                break
        windows, spent = torch.cat(rows), time.monotonic() - started
        speed = windows.numel() / spent
        report.line(f"the target wrote {windows.numel():,} tokens in {spent:.0f} s ({speed:,.0f} tok/s)")
    return windows


def mixed_temperatures(rng: np.random.Generator, count: int, greedy: float = 0.2, plain: float = 0.5) -> Tensor:
    """Returns temperatures: a fraction ``greedy`` of them 0, a fraction ``plain`` 1, the others uniform between."""
    kinds, between = rng.random(count), rng.random(count)
    return torch.from_numpy(np.where(kinds < greedy, 0.0, np.where(kinds > 1 - plain, 1.0, between))).float()

"""One token for each sequence of a large batch: through our models on the CPU, through transformers on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from foretoken.core.draft import Draft
from foretoken.models.base import Handle, Model
from foretoken.models.formats.gguf.names import is_gguf
from foretoken.models.loading import load_model
from foretoken.train.conversations import Steps
from foretoken.train.lessons import Teacher

CPU_BATCH = 64
KV_SHARE = 0.6  # of the free memory of a GPU, for keys and values
LARGEST_BATCH = 4096


@contextmanager
def open_writer(
    target: Path, source: Path, device: torch.device, length: int
) -> Iterator[tuple[int, Callable[[int], Steps]]]:
    """Yields the number of windows to write at once, and a function that begins a batch of so many.

    Args:
        target: Folder of the model.
        source: Its file, or the folder.
        device: Device of the model.
        length: Tokens of a window.
    """
    if device.type == "cpu":
        model = load_model(source, "auto" if is_gguf(source) else "bfloat16", device)
        steps: list[ModelSteps] = []

        def begun(_: int) -> Steps:
            for earlier in steps:
                earlier.close()
            steps[:] = [ModelSteps(model)]
            return steps[0]

        yield CPU_BATCH, begun
    else:
        teacher = Teacher(target, device)
        yield gpu_batch(teacher.model, length), lambda _: TransformersSteps(teacher.model, length)
        del teacher
        torch.cuda.empty_cache()


class ModelSteps:
    """Steps of a batch through a model of ours."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.handles: list[Handle] = []

    def __call__(self, tokens: Tensor) -> Tensor:
        listed = [[token] for token in tokens.tolist()]
        if self.handles:
            self.model.commit(self.handles, listed)
        else:
            self.handles = [self.model.open(prompt) for prompt in listed]
        scores = self.model.score(self.handles, [Draft.empty()] * len(listed))
        return torch.cat([score.logits for score in scores])

    def close(self) -> None:
        """Frees the keys and values."""
        for handle in self.handles:
            self.model.close(handle)


class _Room(DynamicLayer):
    """Keys and values of a layer in memory that is allocated once: appending copies nothing."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.used = length, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.room = [
                states.new_empty(*states.shape[:2], self.length, states.shape[-1])
                for states in (key_states, value_states)
            ]
        end = self.used + key_states.shape[-2]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, self.used : end] = states
        self.used = end
        self.keys, self.values = (room[:, :, :end] for room in self.room)
        return self.keys, self.values


class TransformersSteps:
    """Steps of a batch through a model of transformers whose layers all attend to everything before."""

    def __init__(self, model: Any, length: int) -> None:
        self.model, self.cache = model, DynamicCache()
        self.cache.layers = [_Room(length) for _ in range(model.config.get_text_config().num_hidden_layers)]

    def __call__(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens[:, None], past_key_values=self.cache, use_cache=True).logits[:, -1]
        return logits


def gpu_batch(model: Any, length: int) -> int:
    """Returns the number of windows of ``length`` tokens whose keys and values fit into a GPU's free memory."""
    shape = model.config.get_text_config()
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    row = 4 * length * shape.num_hidden_layers * shape.num_key_value_heads * head_dim
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(LARGEST_BATCH, int(KV_SHARE * free / row)))

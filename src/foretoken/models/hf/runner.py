"""A causal model of transformers as a runner: its own module with our KV cache and masks.

The module sees an ordinary padded batch, explicit positions and a 4-D mask. Its cache writes go to our slots, and its
cache reads return the rows of the sequences in the pass. Attention is the module's, so the model is not
batch-invariant.
"""

import heapq
import inspect
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from foretoken.core.devices import on_host
from foretoken.models.hf.rotary import FixedRope
from foretoken.models.runners.attention import visible_keys
from foretoken.models.runners.base import Pass, Runner
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.state.kv import finite
from foretoken.models.state.pages import SlotCache
from foretoken.models.state.replay import Rows


class Slots(SlotCache):
    """The slots of all layers.

    Attributes:
        used: largest number of slots in use at once.
        size: slots of the buffers.
        rows: rows of each slot of the buffers.
        parts: the rows of each sequence in the current pass, inside ``serving``.
        index: slots and rows that the current pass writes, [B, 1] and [B, width].
    """

    def __init__(self) -> None:
        self._layers: list[SlotLayer] = []
        self._free: list[int] = []
        self.used = 0
        self.size, self.rows = 0, 0
        self.parts: Sequence[Rows] = ()
        self.index: tuple[Tensor, Tensor] | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers that were written to."""
        buffers = [b for layer in self._layers for b in (layer.keys, layer.values) if b is not None]
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in buffers)

    def new_layer(self) -> "SlotLayer":
        layer = SlotLayer(self)
        self._layers.append(layer)
        return layer

    @property
    def reach(self) -> int:
        """The highest row of the current pass, plus one: the number of keys that it reads."""
        return max(part.first + part.count for part in self.parts)

    def acquire(self, tokens: Sequence[int] = (), scope: Hashable = None) -> tuple[int, int]:
        if self._free:
            return heapq.heappop(self._free), 0
        self.used += 1
        return self.used - 1, 0

    def release(self, number: int) -> None:
        heapq.heappush(self._free, number)

    def nbytes(self) -> int:
        buffers = [b for layer in self._layers for b in (layer.keys, layer.values) if b is not None]
        return sum(buffer.nbytes for buffer in buffers)

    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        """Moves rows ``sources`` to ``destination`` onward, in order: the accepted path of a draft tree."""
        if list(sources) == list(range(destination, destination + len(sources))):
            return
        for layer in self._layers:
            for buffer in (layer.keys, layer.values):
                if buffer is not None:
                    index = torch.tensor(sources, device=buffer.device)
                    buffer[slot, :, destination : destination + len(sources)] = buffer[slot].index_select(1, index)

    @contextmanager
    def serving(self, parts: Sequence[Rows], device: torch.device) -> Iterator[None]:
        """Context manager: layers that are updated inside write and read the rows of a padded pass.

        Padding is computed and written past a sequence's end, and no row attends to it.
        """
        while self.size < self.used:
            self.size = max(1, 2 * self.size)
        firsts, width = torch.tensor([part.first for part in parts]), max(part.count for part in parts)
        needed = int(firsts.max()) + width
        if needed > self.rows:
            self.rows = max(needed, 2 * self.rows, 64)
        slots, rows = torch.tensor([part.slot for part in parts])[:, None], firsts[:, None] + torch.arange(width)
        self.index, self.parts = (slots.to(device), rows.to(device)), parts
        try:
            yield
        finally:
            self.parts, self.index = (), None


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, each [slots, kv_heads, rows, head_dim].

    They start as zeros and stay finite, because 0 times a masked row must be 0.
    """

    is_sliding = False
    keys: Tensor | None
    values: Tensor | None

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self._slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: buffers are allocated when they are first written."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the rows of the pass, [B, kv_heads, width, head_dim]; returns all keys and values that it reads."""
        self.keys, self.values = self._fit(self.keys, key_states), self._fit(self.values, value_states)
        index = self._slots.index
        if index is None:
            raise RuntimeError("this cache belongs to a foretoken model and is used outside of its pass")
        slots, rows = (part.to(key_states.device) for part in index)
        self.keys[slots, :, rows] = finite(key_states).transpose(1, 2)
        self.values[slots, :, rows] = finite(value_states).transpose(1, 2)
        return self._read(self.keys), self._read(self.values)

    def _read(self, buffer: Tensor) -> Tensor:
        slots, reach = [part.slot for part in self._slots.parts], self._slots.reach
        low = slots[0]
        if slots == list(range(low, low + len(slots))):
            return buffer[low : low + len(slots), :, :reach]
        return buffer[slots, :, :reach]

    def _fit(self, buffer: Tensor | None, states: Tensor) -> Tensor:
        """Returns the buffer, grown if it has fewer slots or rows than needed."""
        size, rows = self._slots.size, self._slots.rows
        if buffer is not None and buffer.shape[0] >= size and buffer.shape[2] >= rows:
            return buffer
        fresh = states.new_zeros(size, states.shape[1], rows, states.shape[3])
        if buffer is not None:
            fresh[: buffer.shape[0], :, : buffer.shape[2]] = buffer
        return fresh

    def get_seq_length(self) -> int:
        parts = self._slots.parts
        return self._slots.reach - max(part.count for part in parts) if parts else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slots.reach if self._slots.parts else query_length, 0

    def get_max_length(self) -> int:
        return -1


class HFRunner(Runner):
    """Computes passes of a transformers module.

    Rotary factors follow from the maximum length (``rotary.py``).

    Args:
        module: the live module; it is shared, not copied.
        max_length: maximum length of a sequence in tokens.
    """

    batch_invariant = chunk_invariant = False
    joint_rows, pass_rows = 32, sys.maxsize
    _pages: Slots

    def __init__(self, module: Any, max_length: int) -> None:
        config = module.config.get_text_config()
        self.module, self._pages = module, Slots()
        self._cache = Cache(layer_class_to_replicate=self._pages.new_layer)
        self._layer_types = sorted(set(getattr(config, "layer_types", None) or ()))
        self._window = getattr(config, "sliding_window", None) or 0
        self._keeps_rows = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._rope = FixedRope(module, max_length)

    @property
    def kv_bytes_per_token(self) -> int:
        config = self.module.config.get_text_config()
        layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
        return sum(map(_cached_values, layers)) * self.module.dtype.itemsize

    @torch.inference_mode()
    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        self._pages.move(slot, destination, sources)

    @torch.inference_mode()
    def unembed(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.module.get_output_embeddings()(hidden.to(self.module.device, self.module.dtype))
        return on_host(logits.float())

    @torch.inference_mode()
    def run(self, plan: PassPlan, taps: Sequence[int], logits: bool) -> Pass:
        output, counts = self.compute(plan, bool(taps)), [part.count for part in plan.parts]
        states = {layer: _joined(output.hidden_states[layer], [slice(count) for count in counts]) for layer in taps}
        if not logits:
            return Pass(None, states)
        first = _first_output(plan) if self._keeps_rows else 0
        rows = [slice(n - outputs - first, n - first) for n, outputs in zip(counts, plan.output_counts, strict=True)]
        return Pass(on_host(_joined(output.logits, rows)), states)

    def compute(self, plan: PassPlan, states: bool) -> Any:
        """Runs one padded pass. Returns the module's output, with hidden states if ``states``."""
        device, keep = self.module.device, {}
        width = max(part.count for part in plan.parts)
        if self._keeps_rows:
            keep["logits_to_keep"] = torch.arange(_first_output(plan), width, device=device)
        with self._pages.serving(plan.parts, device), _evaluating(self.module), self._rope.applied():
            return self.module(
                input_ids=_padded(plan, plan.tokens).to(device),
                attention_mask=self._masks(plan),
                position_ids=_padded(plan, plan.positions).to(device),
                past_key_values=self._cache,
                use_cache=True,
                output_hidden_states=states,
                return_dict=True,
                **keep,
            )

    @torch.inference_mode()
    def plain(self, texts: Tensor) -> Tensor:
        """Returns the module's logits [B, rows, V] of whole texts [B, rows], computed without our cache and masks."""
        with _evaluating(self.module), self._rope.applied():
            output = self.module(input_ids=texts.to(self.module.device), use_cache=False, return_dict=True)
        logits: Tensor = output.logits
        return logits

    def _masks(self, plan: PassPlan) -> Tensor | dict[str, Tensor]:
        """Returns the additive 4-D mask, or one for each kind of layer if there are several."""
        parts = [replace(part, slot=number) for number, part in enumerate(plan.parts)]
        width, device, dtype = max(part.count for part in parts), self.module.device, self.module.dtype

        def additive(window: int) -> Tensor:
            seen = visible_keys(parts, plan.positions, 0, len(parts), width, plan.reach, window, False).to(device)
            mask = torch.zeros(seen.shape, dtype=dtype, device=device)
            return mask.masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1)

        windows = {kind: self._window if kind == "sliding_attention" else 0 for kind in self._layer_types}
        if len(windows) > 1:
            return {kind: additive(window) for kind, window in windows.items()}
        return additive(next(iter(windows.values()), self._window))


def _first_output(plan: PassPlan) -> int:
    """Returns the first row of the padded sequences whose logits are needed."""
    return min(part.count - outputs for part, outputs in zip(plan.parts, plan.output_counts, strict=True))


def _padded(plan: PassPlan, numbers: Sequence[int]) -> Tensor:
    counts = [part.count for part in plan.parts]
    rows = [numbers[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]
    return torch.tensor([[*row, *[0] * (max(counts) - len(row))] for row in rows])


def _joined(states: Tensor, rows: Sequence[slice]) -> Tensor:
    """Returns rows of all sequences [rows, n] from padded ones [B, width, n]."""
    return torch.cat([sequence[part] for sequence, part in zip(states, rows, strict=True)])


def _cached_values(layer: Any) -> int:
    """Returns the number of elements of one token's keys and values in the layer that this configuration describes."""
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    width = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    return 2 * int(heads * width)


@contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    training = module.training
    if training:
        module.eval()
    try:
        yield
    finally:
        if training:
            module.train()

"""A causal model of transformers as a runner: its own module with our KV cache and masks.

The module sees an ordinary padded batch, explicit positions and a 4-D mask. Its cache writes go to our slots, and its
cache reads return the rows of the sequences in the pass. Attention is the module's, so the model is not
batch-invariant.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from foretoken.core.devices import on_host
from foretoken.models.hf.rotary import FixedRope
from foretoken.models.runners.attention import visible_keys
from foretoken.models.runners.base import Pass, Runner
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.state.slots import Slots


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
    """Returns tokens or positions by sequence, [B, width]; those of padding are 0."""
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
    """Context manager: the module is in evaluation mode inside, and back in its own mode afterwards."""
    training = module.training
    if training:
        module.eval()
    try:
        yield
    finally:
        if training:
            module.train()

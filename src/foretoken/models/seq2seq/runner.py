"""Encoder-decoders on torch operators: a decoder with cross-attention, and an encoder whose rows see all others.

The source's keys and values have a separate cache and are never moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.layers import Layers, Source, read_ends
from foretoken.models.formats.quantize import floats
from foretoken.models.formats.weights import Ends
from foretoken.models.runners.attention import KEY_MULTIPLE, Geometry, look_up
from foretoken.models.runners.base import Pass
from foretoken.models.runners.functional import normalize
from foretoken.models.runners.layout import AttentionSizes, Layout
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.runners.torch_runner import TorchRunner
from foretoken.models.seq2seq.encoder import Encoder, SourceRunner, encoded, fingerprint
from foretoken.models.state.kv import KVCache, finite, padded


class Seq2SeqRunner(SourceRunner, TorchRunner):
    """The decoder of an encoder-decoder, for every device and dtype that torch supports."""

    def __init__(self, encoder: Source, decoder: Source, dtype: torch.dtype, device: torch.device) -> None:
        ends = read_ends(decoder)
        super().__init__(decoder.architecture, Layers(decoder), ends, dtype, device)
        stack = EncoderStack(encoder, read_ends(encoder, ends.embedding), dtype, device)
        self.encoder = Encoder(stack.states, encoder.architecture.max_length, fingerprint(encoder))

    def _new_cache(self) -> None:
        super()._new_cache()
        a = self._architecture
        self._set_sources(KVCache([(a.kv_heads, a.head_dim)] * a.layers, self._cache_dtype, self._device))

    @property
    def _sources(self) -> KVCache:
        assert isinstance(self._source_pages, KVCache)
        return self._source_pages

    def injector(self) -> Self:
        """Raises InvalidRequest: an encoder-decoder takes no features."""
        raise InvalidRequest("an encoder-decoder takes no features; block drafters are decoders")

    @torch.inference_mode()
    def run(self, plan: PassPlan, taps: Sequence[int], logits: bool) -> Pass:
        self._encode(plan)
        slots = [part.slot for part in plan.parts]
        self._mask = self._source_mask(range(min(slots), max(slots) + 1))
        return super().run(plan, taps, logits)

    def _mix(
        self, number: int, hidden: Tensor, turns: Sequence[tuple[Tensor, Tensor]], g: Layout, any_kernel: bool
    ) -> Tensor:
        hidden, cross = super()._mix(number, hidden, turns, g, any_kernel), self._layers[number].cross
        assert cross is not None and isinstance(g, Geometry)
        a, cache = self._architecture, self._sources
        sizes = AttentionSizes.of(a, a.stack[number])
        queries = cross.queries(normalize(a, hidden, cross.norm), any_kernel).view(len(hidden), a.heads, a.head_dim)
        keys, values = (rows[number][g.low : g.high, :, : self._mask.shape[-1]] for rows in (cache.keys, cache.values))
        return self._added(
            hidden, cross.out(look_up(queries, keys, values, self._mask, g, sizes), any_kernel), cross.after
        )

    def _source_mask(self, slots: range) -> Tensor:
        """Returns the mask of sources, [slots, 1, 1, 1, keys]. Slots that are not in the pass see all keys."""
        lengths = [self._lengths.get(slot, 0) for slot in slots]
        keys = padded(max(lengths), KEY_MULTIPLE)
        ends = torch.tensor([length or keys for length in lengths])[:, None]
        mask = torch.zeros(len(lengths), keys).masked_fill_(torch.arange(keys) >= ends, -torch.inf)
        return mask[:, None, None, None].to(self._device)

    def _remember(self, slot: int, states: Tensor) -> None:
        count, cache = len(states), self._sources
        rows = states if count > 1 else states.repeat(2, 1)
        cache.reserve(count)
        for number, layer in enumerate(self._layers):
            assert layer.cross is not None
            made = layer.cross.keys_values(rows, True)[:count].view(count, 2, self._architecture.heads, -1)
            for buffers, part in zip((cache.keys, cache.values), made.unbind(1), strict=True):
                buffers[number][slot, :, :count] = finite(part.transpose(0, 1))


class EncoderStack(TorchRunner):
    """The layers of an encoder: each row sees all rows of its source.

    Args:
        source: the encoder's layers.
        ends: their embedding, positions and norms.
        device: device of weights and states.
    """

    def __init__(self, source: Source, ends: Ends, dtype: torch.dtype, device: torch.device) -> None:
        unused = floats(ends.embedding, dtype)[:1]
        super().__init__(source.architecture, Layers(source), replace(ends, head=unused), dtype, device)

    def states(self, source: Sequence[int]) -> Tensor:
        """Returns the normed states of a source, [source, H]."""
        try:
            return encoded(self, self._architecture.layers, source)
        finally:
            self._new_cache()  # keys and values are not read again

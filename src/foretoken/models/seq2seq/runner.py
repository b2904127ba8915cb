"""Encoder-decoders on torch operators: a decoder with cross-attention, and an encoder whose rows see all others.

The source's keys and values have a separate cache and are never moved.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.weights import Ends
from foretoken.models.runners.attention import KEY_MULTIPLE, Geometry, look_up
from foretoken.models.runners.base import Pass
from foretoken.models.runners.functional import normalize
from foretoken.models.runners.layout import AttentionSizes, Layout
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.runners.torch_runner import TorchRunner
from foretoken.models.seq2seq.encoder import Encoder, SourceSlots, encoded
from foretoken.models.seq2seq.weights import Seq2SeqWeights
from foretoken.models.state.kv import KVCache, finite, padded


class Seq2SeqRunner(TorchRunner):
    """The decoder of an encoder-decoder, for every device and dtype that torch supports."""

    def __init__(self, weights: Seq2SeqWeights, dtype: torch.dtype, device: torch.device) -> None:
        a, ends, embedding = weights.architecture, weights.ends("decoder"), weights.embedding()
        head, bias = weights.head(embedding)
        bias = None if bias is None else bias.to(dtype)
        between = Ends(embedding, ends.last, head, bias, ends.positions, ends.norm)
        self._longest = a.source_length
        super().__init__(a.of_side("decoder"), weights.layers("decoder"), between, dtype, device)
        self.encoder = Encoder(EncoderStack(weights, embedding, dtype, device).states)
        self.fingerprint = weights.fingerprint()
        self._forget_sources()

    def _forget_sources(self) -> None:
        a = self._architecture
        shapes = [(a.kv_heads, a.head_dim)] * a.layers
        self._sources = SourceSlots(self._longest, KVCache(shapes, self._cache_dtype, self._device))

    def first(self, architecture: Any, norm: Tensor | None) -> Self:
        view = super().first(self._architecture.first(architecture.layers), norm)
        view._forget_sources()
        return view

    def injector(self) -> Self:
        """Raises InvalidRequest: an encoder-decoder takes no features."""
        raise InvalidRequest("an encoder-decoder takes no features; block drafters are decoders")

    def acquire(
        self, tokens: Sequence[int] = (), scope: Hashable = None, adapter: str | None = None
    ) -> tuple[int, int]:
        slot, rows = super().acquire()
        self._sources.acquire(slot)
        return slot, rows

    def attach(self, slot: int, source: Sequence[int]) -> None:
        self._sources.attach(slot, source)

    def release(self, slot: int) -> None:
        self._sources.release(slot)
        super().release(slot)

    def check(self) -> None:
        self._sources.check()

    def nbytes(self) -> int:
        return super().nbytes() + self._sources.cache.nbytes()

    @torch.inference_mode()
    def run(self, plan: PassPlan, taps: Sequence[int], logits: bool) -> Pass:
        for part in plan.parts:
            self._encode(part.slot)
        slots = [part.slot for part in plan.parts]
        self._mask = self._source_mask(range(min(slots), max(slots) + 1))
        return super().run(plan, taps, logits)

    def _mix(
        self, number: int, hidden: Tensor, turns: Sequence[tuple[Tensor, Tensor]], g: Layout, any_kernel: bool
    ) -> Tensor:
        hidden, cross = super()._mix(number, hidden, turns, g, any_kernel), self._layers[number].cross
        assert cross is not None and isinstance(g, Geometry)
        a, cache = self._architecture, self._sources.cache
        sizes = AttentionSizes.of(a, a.stack[number])
        queries = cross.queries(normalize(a, hidden, cross.norm), any_kernel).view(len(hidden), a.heads, a.head_dim)
        keys, values = (rows[number][g.low : g.high, :, : self._mask.shape[-1]] for rows in (cache.keys, cache.values))
        return self._added(
            hidden, cross.out(look_up(queries, keys, values, self._mask, g, sizes), any_kernel), cross.after
        )

    def _source_mask(self, slots: range) -> Tensor:
        """Returns the mask of sources, [slots, 1, 1, 1, keys]. Slots that are not in the pass see all keys."""
        lengths = [self._sources.lengths.get(slot, 0) for slot in slots]
        keys = padded(max(lengths), KEY_MULTIPLE)
        ends = torch.tensor([length or keys for length in lengths])[:, None]
        mask = torch.zeros(len(lengths), keys).masked_fill_(torch.arange(keys) >= ends, -torch.inf)
        return mask[:, None, None, None].to(self._device)

    def _encode(self, slot: int) -> None:
        """Encodes the slot's source if it is pending, and writes its keys and values by layer."""
        source = self._sources.pending(slot)
        if source is None:
            return
        states, count, cache = self.encoder.states(source), len(source), self._sources.cache
        rows = states if count > 1 else states.repeat(2, 1)
        cache.reserve(count)
        for number, layer in enumerate(self._layers):
            assert layer.cross is not None
            made = layer.cross.keys_values(rows, True)[:count].view(count, 2, self._architecture.heads, -1)
            for buffers, part in zip((cache.keys, cache.values), made.unbind(1), strict=True):
                buffers[number][slot, :, :count] = finite(part.transpose(0, 1))
        self._sources.encoded(slot)


class EncoderStack(TorchRunner):
    """The layers of an encoder: each row sees all rows of its source.

    Args:
        embedding: the embedding that encoder and decoder share, [V, H].
        device: device of weights and states.
    """

    def __init__(self, weights: Seq2SeqWeights, embedding: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        a, ends, unused = weights.architecture.of_side("encoder"), weights.ends("encoder"), embedding[:1]
        between = Ends(embedding, ends.last, unused, None, ends.positions, ends.norm)
        super().__init__(a, weights.layers("encoder"), between, dtype, device)

    def states(self, source: Sequence[int]) -> Tensor:
        """Returns the normed states of a source, [source, H]."""
        try:
            return encoded(self, self._architecture.layers, source)
        finally:
            self._new_cache()  # keys and values are not read again

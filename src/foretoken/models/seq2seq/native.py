"""Encoder-decoders on the compiled kernels.

The encoder is a stack whose rows see all others. Each layer of the decoder attends to the encoder's states, whose keys
and values are computed once per source (csrc/mixer_cross.hpp).
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.weights import Ends, LayerWeights
from foretoken.models.runners.base import Pass
from foretoken.models.runners.native.bindings import ModelSpec
from foretoken.models.runners.native.describe import Description
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.seq2seq.encoder import Encoder, SourceSlots, encoded
from foretoken.models.seq2seq.weights import Seq2SeqWeights, StackEnds
from foretoken.models.state.pages import PAGE, Pages


class NativeSeq2SeqRunner(NativeRunner):
    """The decoder of an encoder-decoder on compiled kernels.

    Args:
        dtype: float32 or bfloat16.
        compress: whether bfloat16 matrices are stored in 12 bits, without loss.
        kv_cache_dtype: one of ``options.KV_CACHE_DTYPES``, for keys and values of the decoder and of sources.

    Raises:
        KernelsUnavailable: the kernels do not support the processor or the model.
    """

    def __init__(
        self, weights: Seq2SeqWeights, dtype: torch.dtype, compress: bool, kv_cache_dtype: str = "auto"
    ) -> None:
        a, ends, embedding = weights.architecture, weights.ends("decoder"), weights.embedding()
        head, bias = weights.head(embedding)
        between = Ends(embedding, ends.last, head, bias, _floats(ends.positions), ends.norm)
        decoder, layers = a.of_side("decoder"), weights.layers("decoder")
        super().__init__(decoder, layers, between, dtype, compress=compress, kv_cache_dtype=kv_cache_dtype)
        self.computes_chains = False  # every pass also needs the sources
        encoder = a.of_side("encoder")
        stack = self.stack(encoder, weights.layers("encoder"), weights.ends("encoder"), dtype, compress)
        self.encoder = Encoder(stack.states)
        self.fingerprint = weights.fingerprint()
        self._longest = a.source_length
        self._forget_sources()

    def stack(
        self,
        architecture: Architecture,
        layers: Iterable[LayerWeights],
        ends: StackEnds,
        dtype: torch.dtype,
        compress: bool,
    ) -> StackRunner:
        """Returns the runner of an encoder with the embedding of this decoder."""
        return StackRunner(architecture, layers, ends, dtype, compress, self._spec, (self._held, self._arena))

    def _forget_sources(self) -> None:
        pages = Pages(self._arena.allocate, PAGE * self.kv_bytes_per_token)
        self._sources = SourceSlots(self._longest, pages)

    def first(self, architecture: Any, norm: Tensor | None) -> Self:
        view = super().first(self._architecture.first(architecture.layers), norm)
        view._forget_sources()
        return view

    def acquire(
        self, tokens: Sequence[int] = (), scope: Hashable = None, adapter: str | None = None
    ) -> tuple[int, int]:
        slot, _ = super().acquire()
        self._sources.acquire(slot)
        return slot, 0

    def attach(self, slot: int, source: Sequence[int]) -> None:
        self._sources.attach(slot, source)

    def release(self, slot: int) -> None:
        self._sources.release(slot)
        super().release(slot)

    def enable_prefix_cache(self, max_bytes: int) -> bool:
        return False  # keys and values depend on the source

    def check(self) -> None:
        super().check()
        self._sources.check()

    def nbytes(self) -> int:
        return super().nbytes() + self._sources.cache.nbytes()

    def run(self, plan: PassPlan, taps: Sequence[int], logits: bool) -> Pass:
        for part in plan.parts:
            self._encode(part.slot)
        return super().run(plan, taps, logits)

    def _beside(self, plan: PassPlan) -> dict[str, array[int]]:
        slots, sources = [part.slot for part in plan.parts], self._sources
        return {
            "source_pages": array("Q", [sources.cache.addresses(slot) for slot in slots]),
            "source_counts": array("i", [sources.cache.count(slot) for slot in slots]),
            "source_lengths": array("i", [sources.lengths[slot] for slot in slots]),
        }

    def _encode(self, slot: int) -> None:
        """Encodes the slot's source if it is pending, and keeps its keys and values for all layers."""
        source = self._sources.pending(slot)
        if source is None:
            return
        states, count = self.encoder.states(source), len(source)
        pages = self._sources.cache.reserve(slot, 0, count)
        target = (pages, self._sources.cache.count(slot), self._workspace, self.threads)
        self._library.foretoken_remember(self._spec, states.data_ptr(), count, *target)
        self._sources.encoded(slot)


class StackRunner(NativeRunner):
    """The layers of an encoder: each row sees all rows of its source.

    Args:
        architecture: sizes and operations of the encoder.
        ends: positions and norms.
        dtype: float32 or bfloat16.
        compress: see ``NativeSeq2SeqRunner``.
        decoder: the specification of the decoder, whose embedding the encoder has.
        owner: object that keeps their memory alive.
    """

    def __init__(
        self,
        architecture: Architecture,
        layers: Iterable[LayerWeights],
        ends: StackEnds,
        dtype: torch.dtype,
        compress: bool,
        decoder: ModelSpec,
        owner: object,
    ) -> None:
        self._begin(architecture, dtype, None)
        description = Description(architecture, dtype, self._arena, compress)
        self._spec = description.stack(layers, ends.last, _floats(ends.positions), ends.norm)
        for number in range(architecture.layers):  # a layer's keys and values are not read after it
            self._spec.layers[number].attention.cache_at = 0
        for name in ("embedding", "table", "embedding_rows"):
            setattr(self._spec, name, getattr(decoder, name))
        self._held.extend((*description.held, owner))
        self.weight_bytes, self.product_bytes = description.weight_bytes, description.weight_bytes
        self._finish()

    @property
    def kv_bytes_per_token(self) -> int:
        return self._architecture.first(1).kv_numbers * self._dtype.itemsize

    def states(self, source: Sequence[int]) -> Tensor:
        """Returns the normed states of a source, float32 [source, H]."""
        return encoded(self, self._architecture.layers, source)


def _floats(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()

"""Encoder-decoders on the compiled kernels.

The encoder is a stack whose rows see all others. Each layer of the decoder attends to the encoder's states, whose keys
and values are computed once per source (csrc/mixer_cross.hpp).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.models.formats.layers import Layers, Source, read_ends
from foretoken.models.formats.weights import Ends
from foretoken.models.runners.base import Pass
from foretoken.models.runners.native.bindings import BatchSpec, ModelSpec
from foretoken.models.runners.native.describe import Description
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.seq2seq.encoder import Encoder, SourceRunner, encoded, fingerprint
from foretoken.models.state.pages import PAGE, Pages


class NativeSeq2SeqRunner(SourceRunner, NativeRunner):
    """The decoder of an encoder-decoder on compiled kernels.

    Args:
        encoder: the encoder's layers.
        decoder: the decoder's.
        dtype: float32 or bfloat16.
        compress: whether bfloat16 matrices are stored in 12 bits, without loss.
        kv_cache_dtype: one of ``options.KV_CACHE_DTYPES``, for keys and values of the decoder and of sources.

    Raises:
        KernelsUnavailable: the kernels do not support the processor or the model.
    """

    def __init__(
        self, encoder: Source, decoder: Source, dtype: torch.dtype, compress: bool, kv_cache_dtype: str = "auto"
    ) -> None:
        ends = read_ends(decoder)
        super().__init__(
            decoder.architecture, Layers(decoder), ends, dtype, compress=compress, kv_cache_dtype=kv_cache_dtype
        )
        self.computes_chains = False  # every pass also needs the sources
        shared, owner = read_ends(encoder, ends.embedding), (self._held, self._arena)
        stack = StackRunner(encoder, shared, dtype, compress, self._spec, owner)
        self.encoder = Encoder(stack.states, encoder.architecture.max_length, fingerprint(encoder))

    def _new_pages(self) -> Pages:
        self._set_sources(Pages(self._arena.allocate, PAGE * self.kv_bytes_per_token))
        return super()._new_pages()

    @property
    def _sources(self) -> Pages:
        assert isinstance(self._source_pages, Pages)
        return self._source_pages

    def run(self, plan: PassPlan, taps: Sequence[int], logits: bool) -> Pass:
        self._encode(plan)
        return super().run(plan, taps, logits)

    def _extend(self, plan: PassPlan, batch: BatchSpec) -> None:
        slots, sources = [part.slot for part in plan.parts], self._sources
        lengths = array("i", [self._lengths[slot] for slot in slots])
        batch.hold(
            source_pages=array("Q", map(sources.addresses, slots)),
            source_counts=array("i", map(sources.count, slots)),
            source_lengths=lengths,
        )
        batch.source_reach = max(lengths)

    def _remember(self, slot: int, states: Tensor) -> None:
        pages, rows = self._sources.reserve(slot, 0, len(states)), len(states)
        target = pages, self._sources.count(slot), self._workspace, self.threads
        self._library.foretoken_remember(self._spec, states.data_ptr(), rows, *target)


class StackRunner(NativeRunner):
    """The layers of an encoder: each row sees all rows of its source.

    Args:
        source: the encoder's layers.
        ends: positions and norms.
        dtype: float32 or bfloat16.
        compress: see ``NativeSeq2SeqRunner``.
        decoder: the specification of the decoder, whose embedding the encoder has.
        owner: object that keeps their memory alive.
    """

    def __init__(
        self,
        source: Source,
        ends: Ends,
        dtype: torch.dtype,
        compress: bool,
        decoder: ModelSpec,
        owner: object,
    ) -> None:
        architecture = source.architecture
        self._begin(architecture, dtype, None)
        description = Description(architecture, dtype, self._arena, compress)
        self._spec = description.stack(Layers(source), ends.norm, ends.positions, ends.embedding_norm)
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

"""Encoder-decoders behind the model contract: a decoder whose sequences each have a source.

The encoder is a stack whose rows see all others. Each layer of the decoder attends to the encoder's states, whose keys
and values are computed once per source, in a separate cache, and never moved (csrc/mixer_cross.hpp).
"""

import hashlib
from abc import abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.native.build import KernelsUnavailable
from foretoken.models.base import NO_SOURCE, Model, check_source
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture
from foretoken.models.families.seq2seq import Seq2SeqArchitecture, supports
from foretoken.models.formats.layers import Layers, Source, read_ends
from foretoken.models.formats.quantize import floats
from foretoken.models.formats.weights import Ends
from foretoken.models.runners.attention import KEY_MULTIPLE, Geometry, look_up
from foretoken.models.runners.base import Pass, Runner
from foretoken.models.runners.choose import check_cache_dtype, check_packed, fall_back
from foretoken.models.runners.functional import normalize
from foretoken.models.runners.layout import AttentionSizes, Layout
from foretoken.models.runners.native.bindings import BatchSpec, ModelSpec
from foretoken.models.runners.native.describe import Description
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.native.support import packs
from foretoken.models.runners.pass_plan import Part, PassPlan
from foretoken.models.runners.torch_runner import TorchRunner
from foretoken.models.state.kv import KVCache, finite, padded
from foretoken.models.state.pages import PAGE, Pages, SlotCache

_SAMPLE = 1024  # elements of each tensor that the fingerprint of an encoder covers
MAX_SOURCES = 32  # cached outputs, for other completions of a request and for a draft that shares the encoder


class Encoder:
    """Encodes one source at a time, so that its output does not depend on others, and caches outputs.

    Args:
        compute: returns the output for a source, [source, H].
        longest: maximum number of tokens of a source.
        fingerprint: hash of its weights; encoders with equal hashes are treated as the same.
    """

    def __init__(self, compute: Callable[[tuple[int, ...]], Tensor], longest: int, fingerprint: str) -> None:
        self._compute, self.longest, self.fingerprint = compute, longest, fingerprint
        self._cached: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def states(self, source: Sequence[int]) -> Tensor:
        """Returns the encoder's output for a source, [source, H]."""
        key = tuple(source)
        states = self._cached.pop(key, None)
        self._cached[key] = states = self._compute(key) if states is None else states
        while len(self._cached) > MAX_SOURCES:
            self._cached.popitem(last=False)
        return states


def fingerprint(encoder: Source) -> str:
    """Returns a hash of an encoder's weights and sizes."""
    a = encoder.architecture
    sizes = a.stack, a.heads, a.head_dim, a.intermediate, a.activation, a.scale, a.embedding_scale
    digest = hashlib.sha256(repr((sizes, encoder.dtype, encoder.quantize)).encode())
    prefixes = (f"{a.names.base}encoder.", f"{a.names.base}shared.")
    for name in sorted(n for n in encoder.weights if n.startswith(prefixes)):
        values = encoder.weights[name]
        flat = values.flatten()
        digest.update(f"{name} {tuple(values.shape)}".encode())
        digest.update(flat[:: max(1, len(flat) // _SAMPLE)].float().numpy().tobytes())
    return digest.hexdigest()


def encoded(runner: Runner, layers: int, source: Sequence[int]) -> Tensor:
    """Returns the normed states of a source, [source, H], from a runner of the encoder's ``layers`` layers."""
    count = len(source)
    slot, _ = runner.acquire()
    try:
        part = Part(slot, 0, count, count, Draft.empty(), mutual=True)
        plan = PassPlan(list(source), list(range(count)), [part], [], [], count)
        return runner.run(plan, (layers,), logits=False).taps[layers]
    finally:
        runner.release(slot)


class SourceRunner(Runner):
    """A runner whose slots have sources, each of which is encoded before the slot's first pass."""

    encoder: Encoder
    _source_pages: SlotCache  # keys and values of sources, with the same slots as the decoder's
    _lengths: dict[int, int]  # of the sources, by slot
    _pending: dict[int, tuple[int, ...]]  # sources that are not encoded yet, by slot

    def _set_sources(self, pages: SlotCache) -> None:
        self._source_pages, self._lengths, self._pending = pages, {}, {}

    def acquire(
        self, tokens: Sequence[int] = (), scope: Hashable = None, adapter: str | None = None
    ) -> tuple[int, int]:
        slot, _ = super().acquire()
        number, _ = self._source_pages.acquire()
        assert number == slot
        return slot, 0

    def attach(self, slot: int, source: Sequence[int]) -> None:
        check_source(source, self.encoder.longest)
        self._pending[slot], self._lengths[slot] = tuple(source), len(source)

    def release(self, slot: int) -> None:
        self._pending.pop(slot, None)
        self._lengths.pop(slot, None)
        self._source_pages.release(slot)
        super().release(slot)

    def enable_prefix_cache(self, max_bytes: int) -> bool:
        return False  # keys and values depend on the source

    def check(self) -> None:
        super().check()
        assert set(self._pending) <= set(self._lengths), "a pending source has no slot"
        self._source_pages.check()

    def nbytes(self) -> int:
        return super().nbytes() + self._source_pages.nbytes()

    def _encode(self, plan: PassPlan) -> None:
        """Encodes the pending sources of a plan's slots. Raises InvalidRequest for a slot without a source."""
        for part in plan.parts:
            if part.slot not in self._lengths:
                raise InvalidRequest(NO_SOURCE)
            if part.slot in self._pending:
                self._remember(part.slot, self.encoder.states(self._pending[part.slot]))
                del self._pending[part.slot]

    @abstractmethod
    def _remember(self, slot: int, states: Tensor) -> None:
        """Keeps the keys and values of a source's states [source, H] for all layers."""


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
        try:
            return encoded(self, self._architecture.layers, source)
        finally:
            self._new_cache()  # keys and values are not read again


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
        self, source: Source, ends: Ends, dtype: torch.dtype, compress: bool, decoder: ModelSpec, owner: object
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
        return encoded(self, self._architecture.layers, source)


class EncoderDecoder(Decoder):
    """An encoder-decoder; its arguments are those of ``Decoder``."""

    no_adapters = "LoRA adapters of encoder-decoders are not supported"
    runner: SourceRunner

    def _runner(
        self,
        config: Mapping[str, Any],
        source: Source,
        quantization: str | None,
        weight_format: str,
        kv_cache_dtype: str,
    ) -> SourceRunner:
        encoder = replace(source, architecture=Seq2SeqArchitecture.of(config).encoder)
        self.source_length = encoder.architecture.max_length
        return build_seq2seq_runner(encoder, source, weight_format, kv_cache_dtype, self.device)

    @staticmethod
    def supports(config: Mapping[str, Any]) -> bool:
        return supports(config)

    @staticmethod
    def decoder_of(config: Mapping[str, Any], max_length: int | None = None) -> Architecture:
        return Seq2SeqArchitecture.of(config, max_length).decoder

    def share(self, other: Model) -> bool:
        """Shares the encoder if both models have the same one."""
        if not isinstance(other, EncoderDecoder) or type(other.runner) is not type(self.runner):
            return False
        if other.runner.encoder.fingerprint != self.runner.encoder.fingerprint:
            return False
        self.runner.encoder = other.runner.encoder
        return True


def build_seq2seq_runner(
    encoder: Source, decoder: Source, weight_format: str, kv_cache_dtype: str, device: torch.device
) -> SourceRunner:
    """Returns the fastest runner for the weights of these stacks on this device.

    Raises InvalidRequest if weights cannot be packed on this device, in this dtype or on this processor, or there are
    no compiled kernels for a KV cache of another dtype.
    """
    dtype = decoder.dtype
    check_packed(weight_format, dtype, device)
    not_compiled = f"the device is {device.type}"
    if device.type == "cpu":
        try:
            compress = packs(decoder.architecture, dtype, weight_format)
            return NativeSeq2SeqRunner(encoder, decoder, dtype, compress, kv_cache_dtype)
        except KernelsUnavailable as reason:
            fall_back(weight_format, reason)
            not_compiled = str(reason)
    check_cache_dtype(kv_cache_dtype, dtype, not_compiled)
    return Seq2SeqRunner(encoder, decoder, dtype, device)

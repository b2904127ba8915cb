"""The compiled runner: weights are packed once, the KV cache is paged, and a pass is one call."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import Self

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.core.native import sampling
from foretoken.core.native.build import KernelsUnavailable
from foretoken.models.base import LogitRows
from foretoken.models.chains import ChainRequest, DraftVocabulary, ModelChain
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.lora.tensors import AdapterLayer
from foretoken.models.formats.weights import Ends, Entry, LayerWeights
from foretoken.models.runners.base import DeeperLayer, Injected, Pass, Runner, injecting
from foretoken.models.runners.native.arrays import Addresses, ChainArrays, PositionTables, pass_batch, replay_pointer
from foretoken.models.runners.native.bindings import (
    UNIT,
    BatchSpec,
    DeeperSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    matrix_kinds,
)
from foretoken.models.runners.native.build import Kind, library, packing_library
from foretoken.models.runners.native.cache import WeightCache
from foretoken.models.runners.native.describe import MLPS, Description
from foretoken.models.runners.native.lora import PackedAdapter
from foretoken.models.runners.native.packing import Arena, padded
from foretoken.models.runners.native.product import multiplied
from foretoken.models.runners.native.support import cache_kind, check_supported, new_pages, token_bytes
from foretoken.models.runners.native.weight_image import WeightImage
from foretoken.models.runners.pass_plan import Part, PassPlan, Tapped, address
from foretoken.models.state.hybrid import HybridState
from foretoken.models.state.pages import PAGE, Pages
from foretoken.models.state.recurrent import StateShape

KEPT_ARRAYS = 64  # numbers and shapes of drafts whose arrays are kept


class NativeRunner(Runner):
    """A runner on compiled CPU kernels.

    Each element of a product, score or weighted value is summed in a fixed order, independent of other rows. So rows
    are bitwise equal by construction: across row counts, trees and batches, in every dtype.

    Raises:
        InvalidRequest: the model's KV cache is not kept as int8.
        KernelsUnavailable: the kernels do not support the processor or the model.
    """

    batch_invariant = chunk_invariant = True
    joint_rows = 256  # chunk-invariant: the last chunk of a prompt shares the pass of the first step
    pass_rows = 512  # more rows evict activations from L2 between units of weights

    def __init__(
        self,
        architecture: Architecture,
        layers: Iterable[LayerWeights],
        ends: Ends,
        dtype: torch.dtype,
        # input side of a model that takes features (``weights.Entry``); None for an ordinary decoder
        entry: Entry | None = None,
        compress: bool = False,  # whether bfloat16 matrices are stored in 12 bits, without loss (csrc/packed.hpp)
        cache: WeightCache | None = None,  # disk cache of packed weights; None for none
        kv_cache_dtype: str = "auto",
    ) -> None:
        self._begin(architecture, dtype, entry, kv_cache_dtype)
        description = Description(architecture, dtype, self._arena, compress)
        self._spec = description.model(layers, ends, entry or Entry())
        self._held.extend(description.held)
        self.weight_bytes, self.product_bytes = description.weight_bytes, description.product_bytes
        if cache is not None:
            cache.keep(WeightImage(self._spec, self._arena.held, self._held), self._arena)
        self._finish()

    @classmethod
    def cached(
        cls, architecture: Architecture, dtype: torch.dtype, cache: WeightCache, kv_cache_dtype: str = "auto"
    ) -> NativeRunner | None:
        """Returns a runner on packed weights from disk; None if there are none. Raises KernelsUnavailable."""
        runner = cls.__new__(cls)
        runner._begin(architecture, dtype, None, kv_cache_dtype)
        image = cache.open()
        if image is None:
            return None
        runner._held.append(image)
        runner._spec = image.spec
        runner._finish()
        return runner

    def _begin(
        self, architecture: Architecture, dtype: torch.dtype, entry: Entry | None, kv_cache_dtype: str = "auto"
    ) -> None:
        """Checks that the kernels support the model. Raises as ``NativeRunner`` does."""
        self._architecture, self._dtype = architecture, dtype
        self._adapters: dict[str, PackedAdapter] = {}
        self._adapted: dict[int, str] = {}  # the adapter of each slot that has one
        check_supported(architecture, dtype, entry is not None)
        self._cache_kind = cache_kind(architecture, dtype, kv_cache_dtype)
        self._arena = Arena(packing_library())
        self._held: list[object] = []  # tensors and structures that the specification points to
        self.weight_bytes = self.product_bytes = 0  # bytes of packed matrices and the embedding; 0 if unknown

    def _finish(self) -> None:
        """Loads the kernels for the specification, and allocates caches and workspace."""
        self._positions = PositionTables(self._architecture, self._spec)
        self._head_alone = ModelSpec.from_buffer_copy(self._spec)  # for passes of features, without layers and norm
        self._head_alone.layer_count, self._head_alone.norm, self._head_alone.joined = 0, NormSpec(), 0
        self._head_alone.fuses_embedding = 0
        self.kinds = matrix_kinds(self._spec)
        self._library = library(self.kinds, self._cache_kind)
        self._workspace = self._library.workspace(self._spec)
        self._pages: Pages = self._new_pages()
        self.computes_chains = self._state_shape() is None  # recurrent layers need a plan of every pass
        self.fuses = bool(self._spec.fused_layers)
        self._width = padded(self._architecture.vocab, UNIT)  # of rows of logits
        self._chain_logits = LogitRows(np.empty((0, 0), np.float32), 0, 0)  # memory of ``chains``
        self._chain_taps: dict[int, BatchSpec] = {}  # passes whose memory for a layer's states ``chains`` uses
        self._kept_arrays: dict[tuple[object, ...], ChainArrays] = {}
        self._last_arrays: ChainArrays | None = None
        self.threads = torch.get_num_threads()

    # the runner's interface

    def acquire(
        self, tokens: Sequence[int] = (), scope: Hashable = None, adapter: str | None = None
    ) -> tuple[int, int]:
        if adapter is None:
            return self._pages.acquire(tokens, scope)
        slot, rows = self._pages.acquire(tokens, (scope, adapter))
        self._adapted[slot] = adapter
        return slot, rows

    def release(self, slot: int) -> None:
        self._adapted.pop(slot, None)
        self._pages.release(slot)

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def pack_adapter(self, layers: Sequence[AdapterLayer]) -> PackedAdapter:
        try:
            library({*self.kinds, Kind.FLOAT32}, self._cache_kind)  # compiled now, so that ``add_adapter`` is quick
        except KernelsUnavailable as reason:
            raise InvalidRequest(f"LoRA adapters need the kernels of float32 matrices: {reason}") from reason
        return PackedAdapter(self._architecture, layers)

    def add_adapter(self, name: str, adapter: PackedAdapter) -> None:
        self._link({Kind.FLOAT32})
        self._adapters[name] = adapter

    def remove_adapter(self, name: str) -> None:
        del self._adapters[name]

    def _link(self, kinds: set[int]) -> None:
        """Loads the kernels of further kinds of matrices, unless they are loaded."""
        if kinds <= self.kinds:
            return
        kinds = kinds | self.kinds
        kernels = library(kinds, self._cache_kind)
        self.kinds, self._library, self._workspace = kinds, kernels, kernels.workspace(self._spec)

    @property
    def kv_bytes_per_token(self) -> int:
        return token_bytes(self._architecture, self._cache_kind)

    @property
    def state_bytes(self) -> int:
        shape = self._state_shape()
        return 0 if shape is None else shape.bytes

    def _state_shape(self) -> StateShape | None:
        a, r = self._architecture, self._architecture.recurrence
        return None if r is None else StateShape.of(r, a.recurrent_layers)

    def _new_pages(self) -> Pages:
        token, shape = self.kv_bytes_per_token, self._state_shape()
        if shape is None or not shape.layers:
            memory = Arena(packing_library())  # not that of the weights, which ``adopt`` exchanges
            return new_pages(memory.allocate, token, self._spec, self._cache_kind)
        return HybridState(self._arena, PAGE * max(token, 1), shape)

    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        self._pages.accept(slot, destination, sources)
        if not sources or (sources[0] == destination and sources[-1] == destination + len(sources) - 1):
            return
        rows = array("i", sources)
        pages = self._pages.addresses(slot)
        count = self._pages.count(slot)
        self._library.foretoken_move(self._spec, pages, count, destination, rows.buffer_info()[0], len(rows))

    def run(self, plan: PassPlan, taps: Sequence[int], logits: bool) -> Pass:
        outputs = len(plan.outputs) if logits else 0
        batch = self._batch(plan)
        tapped = self._tapped(batch, taps)
        argmax = ranked = rows = None
        if outputs and plan.argmax_only:
            argmax = array("i", bytes(4 * outputs))
            batch.likeliest = argmax.buffer_info()[0]
        elif outputs:
            values = np.empty((outputs, self._width), np.float32)
            rows = LogitRows(values, address(values), self._architecture.vocab)
            batch.logits = rows.address
        if outputs and plan.ranks:
            ranked = np.empty((outputs, min(plan.ranks, self._architecture.vocab)), np.int64)
            batch.ranked, batch.ranks = address(ranked), ranked.shape[1]
        steps = self._pages.plan(plan.parts)
        if steps is not None:
            batch.replay = replay_pointer(steps)
        self._library.foretoken_run(self._spec, batch, self._workspace, self.threads)
        self._pages.finish()
        return Pass(rows, tapped, argmax, ranked)

    def chains(
        self,
        plan: PassPlan,
        requests: Sequence[ChainRequest],
        vocabulary: DraftVocabulary,
        state: int | None = None,
        foreseen: bool = False,
        deeper: Sequence[DeeperLayer] = (),
        injected: Injected | None = None,
    ) -> list[ModelChain]:
        if injected is not None:
            injected.runner.run(injected.plan, (), False)
        if vocabulary.successors is not None:
            self._link(vocabulary.successors.kinds)
        chains = self._chain_arrays(requests, vocabulary, foreseen)
        rows, logits = max(len(plan.outputs), chains.widest), self._chain_logits
        if len(logits.values) < rows:
            values = np.empty((rows, self._width), np.float32)
            logits = self._chain_logits = LogitRows(values, address(values), self._architecture.vocab)
        batch = self._batch(plan, chains.further)
        batch.logits = logits.address
        if state is not None:
            self._tap_again(batch, state)
        carried = self._add_deeper(batch, chains, deeper) if deeper else []
        self._library.foretoken_chains(self._spec, batch, chains.spec, self._workspace, self.threads)
        for layer, states in zip(deeper, carried, strict=True):
            layer.carried[:] = states.split(1)
        return chains.results()

    def _add_deeper(self, batch: BatchSpec, chains: ChainArrays, deeper: Sequence[DeeperLayer]) -> list[Tensor]:
        """Adds layers that draft a level each to a call. Returns their carried states, which the call replaces."""
        assert chains.further is not None  # a model that foresees all levels has one layer's passes
        specs, none = (DeeperSpec * len(deeper))(), torch.zeros(1, self._architecture.hidden)
        carried = [torch.cat([none if state is None else state for state in layer.carried]) for layer in deeper]
        for layer, spec, states in zip(deeper, specs, carried, strict=True):
            runner = layer.runner
            assert isinstance(runner, NativeRunner)
            self._link(runner.kinds)
            cached = array("i", [part.first for part in layer.parts])
            pages, counts = runner._reserved(layer.parts, chains.further)
            batch.held += [cached, pages, counts]
            spec.model, spec.workspace = ctypes.pointer(runner._spec), runner._workspace.address
            spec.pages, spec.page_counts, spec.cached = (a.buffer_info()[0] for a in (pages, counts, cached))
            spec.carried = states.data_ptr()
        batch.held.append(specs)
        chains.spec.deeper, chains.spec.deeper_count = ctypes.addressof(specs), len(deeper)
        return carried

    @cached_property
    def _drawing(self) -> Addresses:
        return sampling.drawing()

    def _chain_arrays(
        self, requests: Sequence[ChainRequest], vocabulary: DraftVocabulary, foreseen: bool
    ) -> ChainArrays:
        """Returns the arrays of a call; those of drafts that only differ in their text are kept."""
        last = self._last_arrays
        if last and last.vocabulary is vocabulary and last.foreseen is foreseen and last.requests == requests:
            return last
        if any(request.draws or request.end or request.changes for request in requests):
            return ChainArrays(requests, vocabulary, foreseen, self._drawing)
        shape = vocabulary.size, vocabulary.width, id(vocabulary.ids), foreseen
        key = (shape, *((request.limit, request.tree) for request in requests))
        if key not in self._kept_arrays:
            if len(self._kept_arrays) >= KEPT_ARRAYS:
                self._kept_arrays.clear()
            self._kept_arrays[key] = ChainArrays(requests, vocabulary, foreseen)
        self._last_arrays = self._kept_arrays[key]
        return self._last_arrays

    def _tap_again(self, batch: BatchSpec, layer: int) -> None:
        """Lets a pass write the states of a layer where the last such pass wrote them."""
        kept = self._chain_taps.get(layer)
        if kept is None or kept.rows < batch.rows:
            kept = self._chain_taps[layer] = BatchSpec(rows=batch.rows)
            kept.held = []
            self._tapped(kept, (layer,))
        batch.tap_layers, batch.taps, batch.tap_count = kept.tap_layers, kept.taps, 1

    def _tapped(self, batch: BatchSpec, taps: Sequence[int]) -> Mapping[int, Tensor]:
        if not taps:
            return {}
        layers = tuple(dict.fromkeys(taps))
        tapped = Tapped(layers, np.empty((len(layers), batch.rows, self._architecture.hidden), np.float32))
        batch.hold(tap_layers=array("i", layers), taps=array("Q", tapped.starts))
        batch.held.append(tapped)
        batch.tap_count = len(layers)
        return tapped

    def _batch(self, plan: PassPlan, further: Sequence[int] | None = None) -> BatchSpec:
        """Returns a pass for the kernels; pages are reserved for its rows and ``further`` ones of each sequence."""
        further = further or [0] * len(plan.parts)
        batch = pass_batch(plan)
        pages, counts = self._reserved(plan.parts, further)
        batch.hold(pages=pages, page_counts=counts)
        if plan.features is not None:
            features = plan.features.float().contiguous()
            batch.held.append(features)
            batch.features = features.data_ptr()
        if plan.states is not None:
            batch.hold(states=plan.states.addresses())
        if self._adapted:
            batch.hold(adapters=self._adapters_of(plan.parts))
        self._extend(plan, batch)
        return batch

    def _reserved(self, parts: Sequence[Part], further: Sequence[int]) -> tuple[array[int], array[int]]:
        """Returns the pages of each sequence, and tables that reach ``further`` rows beyond its new ones."""
        self._positions.reserve(max([part.end + rows for part, rows in zip(parts, further, strict=True)]))
        return self._page_lists(parts, further)

    def _page_lists(self, parts: Sequence[Part], further: Sequence[int]) -> tuple[array[int], array[int]]:
        """Returns ``page_lists``; pages are reserved for new rows and ``further`` ones of each sequence."""
        for part, rows in zip(parts, further, strict=True):
            self._pages.reserve(part.slot, part.first, part.end + rows)
            self._pages.discard_before(part.slot, min(part.first, part.nodes_at))  # a draft's rows may be rejected
        return self.page_lists([part.slot for part in parts])

    def page_lists(self, slots: Sequence[int]) -> tuple[array[int], array[int]]:
        """Returns the addresses of the slots' arrays of pages, and their lengths, for a pass that reads them."""
        pages = self._pages
        return array("Q", map(pages.addresses, slots)), array("i", map(pages.count, slots))

    def place_of(self, layer: int) -> tuple[int, int]:
        """Returns the offsets in the cache of the keys that a layer reads, in elements and in scales per token."""
        attention = self._spec.layers[layer].attention
        return attention.cache_at, attention.scales_at

    def _adapters_of(self, parts: Sequence[Part]) -> array[int]:
        self._link({Kind.FLOAT32})
        names = [self._adapted.get(part.slot) for part in parts]
        return array("Q", [0 if name is None else self._adapters[name].address for name in names])

    def _extend(self, plan: PassPlan, batch: BatchSpec) -> None:
        """Adds what a subclass reads to a pass."""

    def first(self, architecture: Architecture, norm: Tensor | None) -> Self:
        view = self._view(architecture)
        view._spec.layer_count = architecture.layers
        if norm is not None:
            view._held.append(norm := norm.contiguous())
            view._spec.norm = NormSpec(norm.data_ptr())
        view._pages = view._new_pages()
        return view

    def injector(self) -> Self:
        a = self._architecture
        view = self._view(injecting(a))
        layers = (LayerSpec * a.layers)()
        for number in range(a.layers):
            layers[number] = self._spec.layers[number]
            layer = layers[number]
            layer.norm = layer.after_mixer = NormSpec()
            layer.mlp, layer.attention.window = MLPS[None], 1
        view._spec.layers, view._spec.attention_factor = layers, 0.0
        view._held.append(layers)
        return view

    def _view(self, architecture: Architecture) -> Self:
        """Returns a runner on the same weights and slots, with a separate specification."""
        view = copy(self)
        view._architecture = architecture
        view._held = [self._held, self._spec]  # both specifications point to these
        view._workspace = self._library.workspace(self._spec)
        view.kinds, view._adapted = set(self.kinds), {}
        view._spec = ModelSpec.from_buffer_copy(self._spec)
        view._positions = PositionTables(architecture, view._spec)
        return view

    def attach_to(self, model: NativeRunner) -> bool:
        """Takes the embedding and the slots of ``model``, a runner of the same model in another number format.

        Rows that this runner writes behind the committed ones of a slot stay until a pass of ``model`` overwrites them.
        Returns whether the slots are shared. Recurrent layers are not: their states have one history.
        """
        own, spec = self._spec.embedding, model._spec
        self._held = [each for each in self._held if not isinstance(each, Tensor) or each.data_ptr() != own]
        self._held.append(model)
        for name in ("embedding", "table", "embedding_rows"):
            setattr(self._spec, name, getattr(spec, name))
        self._cache_kind = model._cache_kind
        self._finish()
        shares = self._state_shape() is None
        if shares:
            self._pages = model._pages
        return shares

    def borrow_head(self, lender: Runner) -> bool:
        if not isinstance(lender, NativeRunner):
            return False
        head, vocab = lender._spec, lender._architecture.vocab
        self.kinds = {*self.kinds, head.head.kind}
        self._library = library(self.kinds, self._cache_kind)
        self._spec.head, self._spec.vocab, self._architecture = (
            head.head,
            vocab,
            replace(self._architecture, vocab=vocab),
        )
        self._spec.logit_scale, self._spec.logit_cap = head.logit_scale, head.logit_cap
        self._width = padded(vocab, UNIT)
        self._workspace = self._library.workspace(self._spec)
        self._held.append(lender)
        return True

    def unembed(self, hidden: Tensor) -> Tensor:
        return multiplied(self._library, self._head_alone, self._workspace, self.threads, hidden)

    def floor(self, rows: int) -> float:
        """Runs only the matrix products of a pass.

        Returns their seconds: a lower bound for a pass over ``rows`` rows.
        """
        started = perf_counter()
        self._library.foretoken_floor(self._spec, self._workspace, rows, self.threads)
        return perf_counter() - started

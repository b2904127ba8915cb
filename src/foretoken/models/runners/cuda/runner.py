"""The runner for CUDA: row-independent kernels, captured as CUDA graphs and replayed.

A graph reads and writes fixed addresses, so the layout of a pass is one table (``layout.py``). No row's logits depend
on what shares the pass: attention and norms are computed by programs of single rows, and products by calls of a fixed
number of rows (``linear.py``). So they depend neither on the chunks of a prefill nor on prefix-cache hits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.devices import fetching
from foretoken.models.chains import TREE_KINDS, ChainRequest, DraftVocabulary, ModelChain
from foretoken.models.device_drafts import DraftMemory, UnreadChain, UnreadChains
from foretoken.models.device_logits import DeviceRows, DeviceTaps, TappedMemory
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.weights import Ends, Entry, ExpertWeights, LayerWeights
from foretoken.models.runners.base import DeeperLayer, Injected, Move, Pass, Runner
from foretoken.models.runners.cuda.changes import DraftChanges
from foretoken.models.runners.cuda.choice import DeviceChooser
from foretoken.models.runners.cuda.drafts import (
    DraftBucket,
    fill_drafts,
    level_width,
    link,
    rows_behind,
)
from foretoken.models.runners.cuda.graphs import Capture, CudaCapture, Graphs, Inputs, States
from foretoken.models.runners.cuda.growth import NODES, ROWS, grow_chains, grow_trees
from foretoken.models.runners.cuda.layout import (
    MAX_ROWS,
    OUTPUTS,
    Bucket,
    RowLayout,
    fill,
    move_first,
    move_rows,
    read_nodes,
    read_states,
    receive,
)
from foretoken.models.runners.cuda.levels import LayerPasses, Levels, Run
from foretoken.models.runners.cuda.page_cache import Moves, PageCache, Places
from foretoken.models.runners.cuda.sampled_trees import grow_sampled_trees
from foretoken.models.runners.functional import best, normalize
from foretoken.models.runners.layout import Layout
from foretoken.models.runners.linear import product
from foretoken.models.runners.pass_plan import Part, PassPlan
from foretoken.models.runners.torch_experts import by_kernels
from foretoken.models.runners.torch_layers import moved_norm
from foretoken.models.runners.torch_runner import TorchRunner, cached_sizes
from foretoken.models.runners.triton_kernels.rows import rows_per_tile
from foretoken.models.runners.triton_kernels.steps import fill_steps
from foretoken.models.state.recurrent import StateShape

# Results of a pass: logits, or the likeliest tokens; all taps in one tensor; nodes that the host has not read.
LOGITS, LIKELIEST, TAPS, DRAFTED = range(4)


class KindDrafts(NamedTuple):
    """Drafts of one kind that a graph computes."""

    bucket: DraftBucket
    fill: Callable[[Tensor], None]  # writes their tables
    fed: Tensor | None  # features of the first pass
    compute: Callable[[Inputs], States]
    held: object  # tensors besides the inputs


class CudaRunner(TorchRunner):
    """A runner that replays CUDA graphs. Results of a pass are not overwritten by later passes.

    Args:
        ends: embedding, last norm and vocabulary head.
        entry: input side of a model that takes features (``weights.Entry``); None for an ordinary decoder.
        capture: creates the object that captures graphs, again whenever the old graphs are dropped; None for CUDA's.
        kv_cache_dtype: one of ``options.KV_CACHE_DTYPES``.
    """

    chunk_invariant = runs_ahead = True
    joint_rows = 256  # chunk-invariant: the last chunk of a prompt shares the pass of the first step
    pass_rows = 4096  # bounds the memory of a pass

    def __init__(
        self,
        architecture: Architecture,
        layers: Iterable[LayerWeights],
        ends: Ends,
        dtype: torch.dtype,
        device: torch.device,
        entry: Entry | None = None,
        capture: Callable[[torch.device], Capture] | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self._kept_as = {"auto": dtype, "bfloat16": torch.bfloat16, "int8": torch.int8}[kv_cache_dtype]
        self._biases: Tensor | None = None
        super().__init__(architecture, layers, ends, dtype, device, entry)
        self.batch_invariant = True
        self._graphs = Graphs(device, capture or CudaCapture)
        self._chooser = DeviceChooser(self._graphs.fresh())
        # Results of the last graphs, while anything may read them.
        self._last: list[weakref.ref[DeviceRows] | weakref.ref[DraftMemory] | weakref.ref[TappedMemory]] = []
        # Experts computed by products need their numbers of rows on the host.
        mlps = (layer.mlp for layer in self._layers)
        self._captured = not any(isinstance(mlp, ExpertWeights) and not by_kernels(mlp) for mlp in mlps)
        self.computes_chains = self._captured and not architecture.recurrent_layers
        self.adapts_levels, self.takes_unread = not self.computes_chains, self.computes_chains
        groups = [architecture.heads // size.kv_heads for size in cached_sizes(architecture) if size is not None]
        self._tile = min(map(rows_per_tile, groups), default=1)
        self._fuse(entry or Entry())
        self._ids: tuple[Tensor, Tensor] | None = None  # tokens of a draft vocabulary, here and on the device

    def _fuse(self, entry: Entry) -> None:
        """Prepares the product that makes features from a target's states, if there is one; see ``weights.Entry``."""
        self.fuses, self._fuses_embedding = entry.fusion is not None, entry.fuses_embedding
        self._state_norms = [[moved_norm(norm, self._device) for norm in norms] for norms in entry.state_norms]
        if entry.fusion is not None:
            bias = None if entry.fusion_bias is None else entry.fusion_bias.to(self._device, self._dtype)
            self._fusion = product(entry.fusion.to(self._device, self._dtype), bias)
            self._fusion_norms = [moved_norm(norm, self._device) for norm in entry.fusion_norms or (None, None)]

    def _begin(self, features: Tensor, g: Layout) -> Tensor:
        if not self._fuses_embedding:
            return super()._begin(features, g)
        parts = zip((F.embedding(g.tokens, self._embedding), features), self._fusion_norms, strict=True)
        return self._fusion(torch.cat([normalize(self._architecture, x, norm) for x, norm in parts], dim=-1))

    def _features(self, inputs: Inputs, bucket: Bucket) -> Tensor | None:
        """Returns the features of a pass, which ``_begin`` takes."""
        if inputs.features is None or not bucket.fused or self._fuses_embedding:
            return inputs.features
        states = inputs.features
        for norms in self._state_norms:
            parts = zip(states.chunk(len(norms), -1), norms, strict=True)
            states = torch.cat([normalize(self._architecture, part, norm) for part, norm in parts], -1)
        return self._fusion(states)

    def _new_cache(self) -> None:
        a = self._architecture
        layers, recurrence = a.recurrent_layers, a.recurrence
        shape = StateShape.of(recurrence, layers) if recurrence is not None and layers else None
        rank = 0 if a.latent is None else a.latent.rank
        self._paged = PageCache(cached_sizes(a), self._kept_as, self._device, shape, rank)
        self._pages = self._paged.pages

    @property
    def kv_bytes_per_token(self) -> int:
        return self._paged.token_bytes

    @property
    def state_bytes(self) -> int:
        return self._paged.state_bytes

    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        self.move_all([(slot, destination, sources)])

    @torch.inference_mode()
    def move_all(self, moves: Sequence[Move]) -> None:
        move_rows(self._paged, moves)

    def adopt(self, other: Runner) -> None:
        assert isinstance(other, CudaRunner)
        super().adopt(other)
        self._paged = other._paged

    def first(self, architecture: Architecture, norm: Tensor | None) -> Self:
        view = super().first(architecture, norm)
        view._graphs, view._last = self._graphs.fresh(), []
        return view

    def injector(self) -> Self:
        view = super().injector()
        view._graphs, view._last = self._graphs.fresh(), []
        return view

    def _reserve_positions(self, count: int) -> None:
        super()._reserve_positions(count)
        alibi = self._architecture.alibi
        if alibi is not None and (self._biases is None or self._biases.shape[1] < count):
            self._biases = alibi.table(count).to(self._device)

    @torch.inference_mode()
    def run(self, plan: PassPlan, taps: Sequence[int], logits: bool) -> Pass:
        pages = [self._paged.reserve(part.slot, part.first, part.end) for part in plan.parts]
        plan = replace(plan, replay=self._paged.pages.plan(plan.parts))
        bucket = Bucket.of(plan, taps, logits)
        # A capture computes the pass several times, and rows may move only once, before any of them is written over.
        moves = self._paged.settle(bucket.moved, bucket.rows * (bucket in self._graphs))
        self._reserve_positions(bucket.longest)
        inputs = self._inputs_of(plan, bucket, pages, moves)
        if self._captured and bucket.rows <= MAX_ROWS:
            computed = self._run(bucket, inputs, lambda inputs: self._compute(inputs, bucket))
        else:
            computed = self._compute(inputs.to(self._device), bucket)
        self._paged.pages.finish()
        tapped = self._taps_of(computed, bucket, len(plan.tokens))
        if not logits:
            return Pass(None, tapped)
        if bucket.ranks:
            results = fetching(computed[LIKELIEST][: len(plan.outputs)])

            @cache
            def likeliest() -> NDArray[np.int64]:
                found = results().numpy()
                if bucket.unread:
                    receive(plan, found[:, bucket.ranks :])
                return found[:, : bucket.ranks]

            return Pass(None, tapped, late=likeliest)
        rows = DeviceRows(computed[LOGITS][: len(plan.outputs)], self._chooser, drafted=computed.get(DRAFTED))
        self._last.append(weakref.ref(rows))
        return Pass(rows, tapped)

    def _taps_of(self, computed: States, bucket: Bucket, rows: int) -> Mapping[int, Tensor]:
        if not bucket.taps:
            return {}
        memory = TappedMemory(bucket.taps, computed[TAPS][:, :rows])
        self._last.append(weakref.ref(memory))
        return DeviceTaps(memory, bucket.taps, 0, rows)

    @torch.inference_mode()
    def chains(
        self,
        plan: PassPlan,
        requests: Sequence[ChainRequest],
        vocabulary: DraftVocabulary,
        state: int | None = None,
        foreseen: bool = False,
        deeper: Sequence[DeeperLayer] = (),
        injected: Injected | None = None,
    ) -> Sequence[ModelChain]:
        kinds, ranked = dict[tuple[str, int], list[int]](), TREE_KINDS[0]
        shapes = [(each.tree.kind, each.tree.width) if each.tree else None for each in requests]
        beside = max((shape for shape in shapes if shape and shape[0] == ranked), default=(ranked, 0))
        for number, shape in enumerate(shapes):
            kinds.setdefault(shape or beside, []).append(number)
        replaced, drafts = self._replaced(deeper, len(requests)), list[KindDrafts]()
        for numbers in kinds.values():
            whole = len(kinds) == 1
            asked = [requests[number] for number in numbers]
            part = plan if whole else plan.only(numbers)
            below = [layer.only(numbers) for layer in deeper]
            carried = [[states[number] for number in numbers] for states in replaced]
            drafts.append(self._prepared(part, asked, vocabulary, state, foreseen, injected, below, carried))
            injected = None
        drafted: dict[int, UnreadChain] = {}
        for numbers, memory in zip(kinds.values(), self._draft(drafts), strict=True):
            drafted |= {each: UnreadChain(memory, at, requests[each]) for at, each in enumerate(numbers)}
        for layer, states in zip(deeper, replaced, strict=True):
            layer.carried[:] = states
        return UnreadChains([drafted[number] for number in range(len(requests))])

    def _replaced(self, deeper: Sequence[DeeperLayer], sequences: int) -> Sequence[Sequence[Tensor]]:
        """Returns memory for the states that replace ``carried`` of each layer, [1, H] for each sequence."""
        shape = len(deeper), sequences, self._architecture.hidden
        return [rows.split(1) for rows in torch.empty(shape, dtype=self._dtype, device=self._device)]

    def _prepared(
        self,
        plan: PassPlan,
        requests: Sequence[ChainRequest],
        vocabulary: DraftVocabulary,
        state: int | None,
        foreseen: bool,
        injected: Injected | None,
        deeper: Sequence[DeeperLayer],
        replaced: Sequence[Sequence[Tensor]],
    ) -> KindDrafts:
        """Prepares chains, and trees of one kind and width; see ``chains`` and ``_replaced``."""
        width = level_width(requests, vocabulary.size)
        further = [0 if foreseen else rows_behind(request, width) for request in requests]
        before, injector = ([], None) if injected is None else ([injected.plan], injected.runner)
        assert injector is None or isinstance(injector, CudaRunner)
        reach = max(part.end + more for part, more in zip(plan.parts, further, strict=True))
        plans, pages = [*before, replace(plan, reach=reach)], [self._reserved(rows.parts) for rows in before]
        pages.append(self._reserved(plan.parts, further))
        runners, links = [self], list[NDArray[np.int64]]()
        for layer, states in zip(deeper, replaced, strict=True):
            assert isinstance(layer.runner, CudaRunner)
            runners.append(layer.runner)
            pages.append(layer.runner._reserved(layer.parts, further))
            rows, table = link(plans[-1], layer, states)
            plans.append(rows)
            links.append(table)
        changes = DraftChanges(requests, vocabulary.width)
        bucket = DraftBucket.of(plans, requests, vocabulary, state, foreseen, len(deeper), changes.sizes)
        for runner in filter(None, (injector, *runners)):
            runner._reserve_positions(bucket.first.longest)
        filled = partial(fill_drafts, plans, requests, bucket, pages, self._tile, links, changes)
        fed, ids = self._fed(plans[0]) if bucket.fed is None else None, self._token_ids(vocabulary)

        def compute(inputs: Inputs) -> States:
            layers = [LayerPasses(each._level_of(bucket), each._paged, each._biases) for each in runners]
            levels = Levels(layers, self._entered(inputs, bucket, injector), bucket, ids, vocabulary.after)
            grow = grow_sampled_trees if bucket.drawn else grow_trees if bucket.kept else grow_chains
            grown = grow(levels)
            levels.finish()
            return grown

        held = ids, vocabulary.ids, vocabulary.after, injector and injector._tables, [each._tables for each in runners]
        return KindDrafts(bucket, filled, fed, compute, held)

    def _draft(self, kinds: Sequence[KindDrafts]) -> list[DraftMemory]:
        """Computes the drafts of all kinds by one graph."""
        sizes, fed = [kind.bucket.size for kind in kinds], [kind.fed for kind in kinds if kind.fed is not None]
        table = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        for kind, part in zip(kinds, table.split(sizes), strict=True):
            kind.fill(part)
        rows = [kind.bucket.passes[0].rows if kind.fed is not None else 0 for kind in kinds]
        if len(fed) > 1:
            fed = [
                F.pad(each, (0, 0, 0, count - len(each))) for each, count in zip(fed, filter(None, rows), strict=True)
            ]

        def compute(inputs: Inputs) -> States:
            computed, features = States(), inputs.features
            parts = [None] * len(rows) if features is None else features.split(rows)
            for number, (kind, part, states) in enumerate(zip(kinds, inputs.table.split(sizes), parts, strict=True)):
                results = kind.compute(Inputs(part, states if rows[number] else None))
                computed |= {number + len(rows) * key: result for key, result in results.items()}
            return computed

        inputs = Inputs(table, torch.cat(fed) if len(fed) > 1 else fed[0] if fed else None, rows=sum(rows))
        bucket = tuple(kind.bucket for kind in kinds)
        computed = self._run(bucket, inputs, compute, [kind.held for kind in kinds])
        found = [(computed[at + len(kinds) * NODES], computed.get(at + len(kinds) * ROWS)) for at in range(len(kinds))]
        memories = [DraftMemory(nodes, distributions) for nodes, distributions in found]
        self._last += map(weakref.ref, memories)
        return memories

    def _reserved(self, parts: Sequence[Part], further: Sequence[int] = ()) -> list[Places]:
        """Returns the pages of each part's sequence, with those of the rows ``further`` behind it."""
        self._paged.settle()
        ends = [part.end + more for part, more in zip(parts, further or [0] * len(parts), strict=True)]
        return [self._paged.reserve(part.slot, part.first, end) for part, end in zip(parts, ends, strict=True)]

    def _entered(self, inputs: Inputs, bucket: DraftBucket, injector: CudaRunner | None) -> Inputs:
        """Returns the inputs of the first pass of drafts, before which rows may be injected."""
        if bucket.fed is not None:
            states = read_states(bucket.split(inputs.table).states, *bucket.fed[1:], self._dtype)
            inputs = replace(inputs, features=states)
        inputs = replace(inputs, features=self._features(inputs, bucket.passes[0]))
        return inputs if injector is None else injector._inject(inputs, bucket)

    def _inject(self, inputs: Inputs, bucket: DraftBucket) -> Inputs:
        """Writes the keys and values of injected rows. Returns the inputs of the pass behind them."""
        layout = RowLayout.of(bucket.split(inputs.table).passes[0], bucket.passes[0], self._paged, self._biases)
        self._states(layout, (), features=inputs.features)
        return replace(inputs, features=None)

    def _level_of(self, bucket: DraftBucket) -> Run:
        """Returns the function that computes the passes of drafts; see ``levels.Run``."""
        taps, last = bucket.first.taps, self._architecture.layers

        def run(layout: RowLayout, outputs: Tensor | None, features: Tensor | None) -> tuple[Tensor, Tensor | None]:
            states = self._states(layout, taps, features=features)
            rows = states[last] if outputs is None else states[last].index_select(0, outputs)
            logits = self._unembed(normalize(self._architecture, rows, self._norm))
            return logits, self._tapped(states, taps, slice(None))[taps[0]] if taps else None

        return run

    def _token_ids(self, vocabulary: DraftVocabulary) -> Tensor | None:
        """Returns the target's token of each logit on the device, int64; None if it is the logit's index."""
        if vocabulary.ids is None:
            return None
        if self._ids is None or self._ids[0] is not vocabulary.ids:
            self._ids = vocabulary.ids, vocabulary.ids.to(self._device, torch.int64)
        return self._ids[1]

    def borrow_head(self, lender: Runner) -> bool:
        if not isinstance(lender, CudaRunner) or lender._device != self._device:
            return False
        a = lender._architecture
        self._architecture = replace(
            self._architecture, vocab=a.vocab, logit_scale=a.logit_scale, final_softcap=a.final_softcap
        )
        self._head = lender._head
        shared = lender._embedding
        like = self._embedding.shape == shared.shape and self._embedding.dtype == shared.dtype
        if like and torch.equal(self._embedding, shared):
            self._embedding = shared  # frees the memory of the copy
        return True

    def _inputs_of(self, plan: PassPlan, bucket: Bucket, pages: Sequence[Places], moves: Moves | None) -> Inputs:
        """Returns the inputs of the pass, in the host's memory."""
        pinned = self._device.type == "cuda"
        steps = None
        if plan.replay is not None and bucket.steps is not None:
            steps = fill_steps(plan.replay, bucket.steps, pinned)
        table = fill(plan, bucket, pages, self._tile, pinned, moves)
        return Inputs(table, self._fed(plan), steps, bucket.rows)

    def _compute(self, inputs: Inputs, bucket: Bucket) -> States:
        """Computes the taps of all rows of the bucket, and logits, the plan's outputs first."""
        computed = States()
        if bucket.moved:
            move_first(self._paged, inputs.table, bucket)
        if bucket.unread:
            computed[DRAFTED] = read_nodes(inputs.table, bucket)
        layout = RowLayout.of(inputs.table, bucket, self._paged, self._biases, inputs.steps)
        states = self._states(layout, bucket.taps, features=self._features(inputs, bucket))
        if bucket.taps:
            computed[TAPS] = torch.stack([*self._tapped(states, bucket.taps, slice(None)).values()])
        if bucket.outputs:
            last = states[self._architecture.layers].index_select(0, inputs.table[OUTPUTS, : bucket.outputs])
            computed[LOGITS] = self._unembed(normalize(self._architecture, last, self._norm))
        if bucket.ranks:
            likeliest = best(computed.pop(LOGITS), bucket.ranks - 1)
            computed[LIKELIEST] = torch.cat((likeliest, computed.pop(DRAFTED)), 1) if bucket.unread else likeliest
        return computed

    def _fed(self, plan: PassPlan) -> Tensor | None:
        """Returns ``plan.fed`` on the device."""
        fed = plan.fed
        return None if fed is None else fed.to(self._device, self._dtype)

    def _run(
        self, bucket: Hashable, inputs: Inputs, compute: Callable[[Inputs], States], held: object = None
    ) -> States:
        """Runs a graph, which may overwrite the logits of the last pass; see ``Graphs.run``."""
        for last in self._last:
            if (before := last()) is not None:
                before.release()
        self._last.clear()
        return self._graphs.run(bucket, inputs, compute, (self._tables, self._biases, held))

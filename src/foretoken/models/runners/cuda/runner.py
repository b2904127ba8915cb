"""The runner for CUDA: row-independent kernels, captured as CUDA graphs and replayed.

A graph reads and writes fixed addresses, so the layout of a pass is one table (``layout.py``). No row's logits depend
on what shares the pass: attention and norms are computed by programs of single rows, and products by calls of a fixed
number of rows (``linear.py``). So they depend neither on the chunks of a prefill nor on prefix-cache hits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from foretoken.core.devices import on_host
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.weights import Ends, Entry, ExpertWeights, LayerWeights
from foretoken.models.runners.base import Pass
from foretoken.models.runners.cuda.graphs import Capture, CudaCapture, Graph, Graphs, Inputs, States
from foretoken.models.runners.cuda.layout import OUTPUTS, Bucket, RowLayout, fill
from foretoken.models.runners.cuda.page_cache import PageCache, Places
from foretoken.models.runners.functional import normalize
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.runners.torch_experts import by_kernels
from foretoken.models.runners.torch_runner import TorchRunner, cached_sizes
from foretoken.models.runners.triton_kernels.rows import rows_per_tile
from foretoken.models.runners.triton_kernels.steps import fill_steps
from foretoken.models.state.recurrent import StateShape

MAX_ROWS = 256  # with more rows, products take longer than launches
LOGITS = -1  # key of the logits, beside the layers of taps
MAX_GRAPHS = 128  # graphs hold memory; beyond this number all are dropped


class CudaRunner(TorchRunner):
    """A runner that replays CUDA graphs. Results of a pass are not overwritten by later passes.

    Args:
        ends: embedding, last norm and vocabulary head.
        entry: input side of a model that takes features (``weights.Entry``); None for an ordinary decoder.
        capture: creates the object that captures graphs, again whenever the old graphs are dropped; None for CUDA's.
        kv_cache_dtype: one of ``options.KV_CACHE_DTYPES``.
    """

    chunk_invariant = True
    joint_rows = MAX_ROWS  # chunk-invariant: the last chunk of a prompt shares the pass of the first step
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
        self._new_capture = capture or CudaCapture
        # Experts computed by products need their numbers of rows on the host.
        mlps = (layer.mlp for layer in self._layers)
        self._captured = not any(isinstance(mlp, ExpertWeights) and not by_kernels(mlp) for mlp in mlps)
        groups = [architecture.heads // size.kv_heads for size in cached_sizes(architecture) if size is not None]
        self._tile = min(map(rows_per_tile, groups), default=1)
        self._graphs: Graphs | None = None

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

    @torch.inference_mode()
    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        self._paged.move(slot, destination, sources)

    def first(self, architecture: Architecture, norm: Tensor | None) -> Self:
        view = super().first(architecture, norm)
        view._graphs = None
        return view

    def injector(self) -> Self:
        view = super().injector()
        view._graphs = None
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
        self._reserve_positions(bucket.longest)
        inputs = self._inputs_of(plan, bucket, pages)
        if self._captured and bucket.rows <= MAX_ROWS:
            graph = self._graph(bucket, inputs)
            graph.inputs.overwrite(inputs)
            computed = graph.replay()
        else:
            computed = self._compute(inputs.to(self._device), bucket)
        self._paged.pages.finish()
        tapped = {number: computed[number][: len(plan.tokens)].clone() for number in taps}
        return Pass(fetched(computed[LOGITS][: len(plan.outputs)]) if logits else None, tapped)

    def _inputs_of(self, plan: PassPlan, bucket: Bucket, pages: Sequence[Places]) -> Inputs:
        """Returns the inputs of the pass, in the host's memory."""
        pinned = self._device.type == "cuda"
        features = None if plan.features is None else self._padded(plan.features, bucket.rows)
        steps = None
        if plan.replay is not None and bucket.steps is not None:
            steps = fill_steps(plan.replay, bucket.steps, pinned)
        return Inputs(fill(plan, bucket, pages, self._tile, pinned), features, steps)

    def _compute(self, inputs: Inputs, bucket: Bucket) -> States:
        """Computes the taps of all rows of the bucket, and logits, the plan's outputs first."""
        layout = RowLayout.of(inputs.table, bucket, self._paged, self._biases, inputs.steps)
        states = self._states(layout, bucket.taps, features=inputs.features)
        computed = self._tapped(states, bucket.taps, slice(None))
        if bucket.logits:
            last = states[self._architecture.layers].index_select(0, inputs.table[OUTPUTS])
            computed[LOGITS] = self._unembed(normalize(self._architecture, last, self._norm))
        return computed

    def _padded(self, features: Tensor, rows: int) -> Tensor:
        """Returns features [n, H] with zeros for the rows of padding."""
        padded = torch.zeros((rows, features.shape[1]), dtype=self._dtype, device=self._device)
        padded[: len(features)] = features
        return padded

    def _graph(self, bucket: Bucket, inputs: Inputs) -> Graph:
        """Returns the bucket's graph. It is captured on first use, with these inputs."""
        graphs = self._graphs
        if graphs is None or (bucket not in graphs.known and len(graphs.known) >= MAX_GRAPHS):
            self._graphs = graphs = None  # frees the memory of the old graphs first
            self._graphs = graphs = Graphs(self._new_capture(self._device))
        by_bucket = graphs.known
        if bucket not in by_bucket:
            graph_inputs = inputs.idle(self._device)
            replay = graphs.capture.capture(lambda: self._compute(graph_inputs, bucket))
            by_bucket[bucket] = Graph(graph_inputs, (self._tables, self._biases), replay)
        return by_bucket[bucket]


def fetched(logits: Tensor) -> Tensor:
    """Returns a copy in the host's memory, which the next replay does not overwrite."""
    return logits.clone() if logits.is_cpu else on_host(logits)

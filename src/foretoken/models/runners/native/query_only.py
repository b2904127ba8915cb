"""Layers with queries alone, on compiled kernels: they read the keys and values of another model's cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch

from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.weights import Ends, Entry, LayerWeights
from foretoken.models.runners.native.bindings import BatchSpec
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.pass_plan import Part, PassPlan


class QueryOnlyRunner(NativeRunner):
    """A runner whose rows see only the first rows of a slot of another runner.

    All rows of a plan's part see the ``first`` rows of its slot; they write nothing.

    Args:
        architecture: architecture of the layers, each with a ``source``.
        layers: their weights.
        ends: embedding, last norm and vocabulary head.
        dtype: dtype of the computation, equal to that of ``target``.
        target: the runner of the model whose cache is read.
        sources: for each layer the target's layer whose keys and values it reads; their sizes are equal.

    Raises:
        KernelsUnavailable: the kernels do not support the model.
    """

    def __init__(
        self,
        architecture: Architecture,
        layers: Iterable[LayerWeights],
        ends: Ends,
        dtype: torch.dtype,
        target: NativeRunner,
        sources: Sequence[int],
    ) -> None:
        self._target = target
        super().__init__(architecture, layers, ends, dtype, Entry())
        self.computes_chains = False  # its rows do not see each other
        for number, layer in enumerate(sources):
            attention = self._spec.layers[number].attention
            attention.cache_at, attention.scales_at = target.place_of(layer)

    def _begin(
        self, architecture: Architecture, dtype: torch.dtype, entry: Entry | None, kv_cache_dtype: str = "auto"
    ) -> None:
        super()._begin(architecture, dtype, entry, kv_cache_dtype)
        self._cache_kind = self._target._cache_kind

    def _page_lists(self, parts: Sequence[Part], further: Sequence[int]) -> tuple[array[int], array[int]]:
        return self._target.page_lists([part.slot for part in parts])

    def _extend(self, plan: PassPlan, batch: BatchSpec) -> None:
        batch.hold(prefix=array("i", [part.first for part in plan.parts for _ in range(part.count)]))

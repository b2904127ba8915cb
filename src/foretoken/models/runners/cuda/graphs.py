"""CUDA graphs: a pass launches hundreds of small kernels, which a graph launches at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_GRAPHS = 128  # graphs hold memory; beyond this number all are dropped
WARM_UPS = 2  # runs before a capture, in which libraries choose kernels and allocate workspaces

States = dict[int, Tensor]


class Capture(Protocol):
    """Captures functions as graphs.

    The graphs of one object share memory, so a graph's result must be read before another one is replayed.
    """

    def capture(self, function: Callable[[], States]) -> Callable[[], States]:
        """Returns a function that repeats the work on the current content of the same tensors.

        It returns the same tensors every time, overwritten.
        """


class CudaCapture:
    """CUDA graphs in one private pool of memory, as torch.cuda.graphs documents them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], States]) -> Callable[[], States]:
        with torch.cuda.device(self._device):
            side, current = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    function()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                states = function()

        def replay() -> States:
            graph.replay()
            return states

        return replay


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a pass."""

    table: Tensor  # result of ``layout.fill``
    features: Tensor | None = None  # [rows without padding, H]; None for a model that takes tokens alone
    steps: Tensor | None = None  # result of ``steps.fill_steps``; None for a model without recurrent layers
    rows: int = 0  # number of rows of features with padding

    def to(self, device: torch.device) -> Inputs:
        return Inputs(self.table.to(device), self._padded(), None if self.steps is None else self.steps.to(device))

    def _padded(self) -> Tensor | None:
        """Returns a copy of the features with zeros for the rows of padding."""
        features = self.features
        return None if features is None else F.pad(features, (0, 0, 0, self.rows - len(features)))

    def idle(self, device: torch.device) -> Inputs:
        """Returns copies without steps: passes over them change no recurrent state."""
        return Inputs(
            self.table.to(device, copy=True),
            self._padded(),
            None if self.steps is None else torch.zeros_like(self.steps, device=device),
        )

    def overwrite(self, other: Inputs) -> None:
        """Copies the contents of ``other``, which has the same fields; rows of padding keep any features."""
        pairs = (self.table, other.table), (self.features, other.features), (self.steps, other.steps)
        for old, new in pairs:
            if old is not None and new is not None:
                old[: len(new)].copy_(new, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured graph and its inputs."""

    inputs: Inputs  # inputs that change from pass to pass
    # other tensors that the graph reads, kept alive here: tables by position, after longer ones replace them
    held: object
    replay: Callable[[], States]  # computes the pass


class Graphs:
    """All graphs in one pool of memory, each captured on its first use.

    Args:
        device: the device.
        capture: creates the object that captures graphs, again whenever the old graphs are dropped.
    """

    def __init__(self, device: torch.device, capture: Callable[[torch.device], Capture]) -> None:
        self._device, self._new_capture = device, capture
        self._capture: Capture | None = None
        self._known: dict[Hashable, Graph] = {}

    @property
    def pinned(self) -> bool:
        """Whether inputs are copied from pinned memory, asynchronously."""
        return self._device.type == "cuda"

    def fresh(self) -> Graphs:
        """Returns an object without graphs, for another runner."""
        return Graphs(self._device, self._new_capture)

    def __contains__(self, bucket: Hashable) -> bool:
        return bucket in self._known

    def run(self, bucket: Hashable, inputs: Inputs, compute: Callable[[Inputs], States], held: object = None) -> States:
        """Returns the results of ``compute``, which the next call overwrites.

        Args:
            bucket: all that the graph depends on, besides the content of its inputs.
            inputs: the inputs, in the host's memory.
            compute: the work.
            held: tensors besides the inputs, which are kept alive.
        """
        graph = self._known.get(bucket)
        if graph is None:
            if self._capture is None or len(self._known) >= MAX_GRAPHS:
                self._known.clear()  # frees the memory of the old graphs first
                self._capture = None
                self._capture = self._new_capture(self._device)
            own = inputs.idle(self._device)
            graph = self._known[bucket] = Graph(own, held, self._capture.capture(lambda: compute(own)))
        graph.inputs.overwrite(inputs)
        return graph.replay()

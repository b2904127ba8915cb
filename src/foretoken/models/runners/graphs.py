"""The runner for CUDA: passes are padded to buckets, captured once as CUDA graphs, and replayed.

A pass launches hundreds of small kernels, which takes longer than the arithmetic of a short pass; a graph launches them
at once. A graph reads and writes fixed addresses. So the layout of a pass is one table of integers, which is copied at
once, and everything else, masks included, is computed from it on the device. Long passes and chunks of prompts run as
in ``TorchRunner``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.weights import Ends, LayerWeights
from foretoken.models.runners.attention import Geometry
from foretoken.models.runners.base import Pass
from foretoken.models.runners.pass_plan import Part, PassPlan
from foretoken.models.runners.torch_runner import TorchRunner

WIDTHS = (2, 4, 8, 16, 32, 64)  # rows per sequence
MIN_KEYS = 256  # doubled until all rows fit
MAX_ROWS = 256  # with more rows, a GPU's time goes into products, which hide the launches
MAX_GRAPHS = 128  # graphs hold memory; beyond this number all are dropped
WARM_UPS = 2  # runs before a capture, in which libraries choose kernels and allocate workspaces
WORD = 32  # draft nodes in one integer

# Rows of the table. OUTPUTS and COMPUTED hold indices of rows of the bucket. A row sees the keys before PREFIX and,
# from cache row NODES on, the draft nodes whose bits are set in its words. The words begin at SEEN: for each window as
# many as the bucket has.
TOKENS, POSITIONS, CACHE_ROWS, OUTPUTS, COMPUTED, PREFIX, NODES, SEEN = range(8)

States = dict[int, Tensor]


class Capture(Protocol):
    """Captures functions as graphs.

    The graphs of one object share memory, so the result of one is read before another is replayed.
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
class Bucket:
    """Everything that a graph depends on.

    Attributes:
        low: the lowest slot.
        high: the highest slot, plus one.
        width: rows per sequence, padding included.
        keys: number of cache rows that are read.
        words: integers per row whose bits are the draft nodes that it sees; 0 if all drafts are chains.
        taps: layers whose hidden states are returned.
    """

    low: int
    high: int
    width: int
    keys: int
    words: int
    taps: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of the pass, padding included."""
        return (self.high - self.low) * self.width

    @staticmethod
    def of(plan: PassPlan, taps: Sequence[int], widths: Sequence[int], cached: int) -> Bucket | None:
        """Returns the smallest bucket that holds the plan; None if the plan is too large.

        Args:
            plan: the rows of the pass.
            taps: layers whose hidden states are needed.
            widths: rows per sequence to choose from, ascending.
            cached: rows per slot of the KV cache.
        """
        slots = [part.slot for part in plan.parts]
        longest = max(part.count for part in plan.parts)
        nodes = max(0 if part.draft.is_chain else len(part.draft) for part in plan.parts)
        bucket = Bucket(
            low=min(slots),
            high=max(slots) + 1,
            width=next((width for width in widths if width >= longest), MAX_ROWS + 1),
            keys=min(doubled(plan.reach, MIN_KEYS), cached),
            words=doubled(-(-nodes // WORD), 1) if nodes else 0,
            taps=tuple(sorted(set(taps))),
        )
        return bucket if bucket.rows <= MAX_ROWS else None


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured graph, and the table that it reads, int32 [rows of the table, rows of the bucket]."""

    table: Tensor
    replay: Callable[[], States]


@dataclass(slots=True)
class Graphs:
    """All graphs over cache buffers of one shape [slots, rows]; with other buffers they would read freed memory."""

    shape: tuple[int, int]
    capture: Capture
    known: dict[Bucket, Graph] = field(default_factory=dict)


class GraphRunner(TorchRunner):
    """A runner that replays CUDA graphs. Results of a pass are not overwritten by later passes.

    Args:
        architecture: sizes and operations of the decoder.
        layers: weights of each layer.
        ends: embedding, last norm and vocabulary head.
        dtype: dtype of the computation.
        device: device of weights and KV cache.
        widths: rows per sequence that graphs are captured for; the measured cost of a pass rises at the defaults.
        capture: creates the object that captures graphs, again whenever the old graphs are dropped.
    """

    def __init__(
        self,
        architecture: Architecture,
        layers: Iterable[LayerWeights],
        ends: Ends,
        dtype: torch.dtype,
        device: torch.device,
        widths: Sequence[int] = WIDTHS,
        capture: Callable[[torch.device], Capture] = CudaCapture,
    ) -> None:
        if not widths or min(widths) < 1:
            raise InvalidRequest(f"graphs need at least one width, and each of at least one row; got {tuple(widths)}")
        super().__init__(architecture, layers, ends, dtype, device)
        self.batch_invariant = False  # the libraries choose kernels by the number of rows
        self._widths, self._new_capture = sorted(set(widths)), capture
        self._windows = sorted(set(architecture.windows))
        self._graphs: Graphs | None = None

    def first(self, architecture: Architecture, norm: Tensor | None) -> Self:
        view = super().first(architecture, norm)
        view._graphs = None
        return view

    @torch.inference_mode()
    def run(self, plan: PassPlan, taps: Sequence[int], logits: bool) -> Pass:
        self._reserve(plan.reach + 1)  # padding is written to the cache's last row, which stays unused
        bucket = Bucket.of(plan, taps, self._widths, self.cache.rows) if logits or taps else None
        if bucket is None:
            return super().run(plan, taps, logits)
        filled = self._fill(plan, bucket)
        graph = self._graph(bucket, filled)
        graph.table.copy_(filled, non_blocking=True)
        # The head is not part of the graph: its number of rows varies, and it is launched while the graph runs.
        outputs = graph.table[OUTPUTS, : len(plan.outputs)]
        computed = graph.table[COMPUTED, : len(plan.tokens)]
        states = graph.replay()
        return Pass(self._logits(states, outputs) if logits else None, self._tapped(states, taps, computed))

    def _graph(self, bucket: Bucket, filled: Tensor) -> Graph:
        """Returns the bucket's graph. It is captured on first use, with a table of the content ``filled``."""
        shape = (self.cache.slots, self.cache.rows)
        graphs = self._graphs
        if graphs is None or graphs.shape != shape or (bucket not in graphs.known and len(graphs.known) >= MAX_GRAPHS):
            self._graphs = graphs = None  # frees the memory of the old ones first
            self._graphs = graphs = Graphs(shape, self._new_capture(self._device))
        known = graphs.known
        if bucket not in known:
            table = filled.to(self._device, copy=True)
            replay = graphs.capture.capture(lambda: self._states(self._geometry(table, bucket), bucket.taps))
            known[bucket] = Graph(table, replay)
        return known[bucket]

    def _fill(self, plan: PassPlan, bucket: Bucket) -> Tensor:
        """Returns the plan as a table in pinned memory, which torch does not reuse until it has been copied.

        Padding is token 0 at position 0 and sees key 0 alone: its states are finite, and are written to the unused row.
        """
        shape = (SEEN + len(self._windows) * bucket.words, bucket.rows)
        filled = torch.zeros(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        table = filled.numpy().view(np.uint32)
        table[CACHE_ROWS], table[PREFIX] = self.cache.rows - 1, 1
        places: list[int] = []
        for part in plan.parts:
            at, start = len(places), (part.slot - bucket.low) * bucket.width
            own = table[:, start : start + part.count]
            own[TOKENS] = plan.tokens[at : at + part.count]
            own[POSITIONS] = plan.positions[at : at + part.count]
            own[CACHE_ROWS] = range(part.first, part.first + part.count)
            own[PREFIX] = own[CACHE_ROWS] + 1
            if not part.draft.is_chain:
                self._fill_tree(own, part, bucket.words)
            places += range(start, start + part.count)
        table[OUTPUTS, : len(plan.outputs)] = [places[row] for row in plan.outputs]
        table[COMPUTED, : len(places)] = places
        return filled

    def _fill_tree(self, own: NDArray[np.uint32], part: Part, words: int) -> None:
        """Fills in what the draft nodes, the last rows of a part, see: committed tokens and their ancestors."""
        scored = max(0, part.first - part.nodes_at)  # nodes whose rows an earlier pass computed
        nodes = own[:, part.count - (len(part.draft) - scored) :]
        nodes[PREFIX] = nodes[NODES] = part.nodes_at
        for number, window in enumerate(self._windows):
            seen = b"".join(bits.to_bytes(words * WORD // 8, "little") for bits in ancestors(part.draft, window))
            start = SEEN + number * words
            nodes[start : start + words] = np.frombuffer(seen, "<u4").reshape(-1, words)[scored:].T

    def _geometry(self, table: Tensor, b: Bucket) -> Geometry:
        """Returns the layout for ``attend``, computed from the table on the device."""
        fields = table.long()
        slots = torch.arange(b.low, b.high, device=self._device)
        return Geometry(
            tokens=fields[TOKENS],
            positions=fields[POSITIONS],
            rows=fields[CACHE_ROWS],
            slots=slots[:, None].expand(-1, b.width).reshape(-1),
            places=None,
            low=b.low,
            high=b.high,
            width=b.width,
            keys=b.keys,
            single=None,
            masks=self._masks(fields, b),
        )

    def _masks(self, fields: Tensor, b: Bucket) -> dict[tuple[int, bool], Tensor]:
        """Returns the masks by view, 0 or -inf [S, 1, width, 1, keys]. A committed key's row is its position."""
        by_row = fields.view(-1, b.high - b.low, b.width, 1)
        keys = torch.arange(b.keys, device=self._device)
        masks: dict[tuple[int, bool], Tensor] = {}
        for number, window in enumerate(self._windows):
            seen = keys < by_row[PREFIX]
            if window:
                seen &= keys > by_row[POSITIONS] - window
            if b.words:
                start = SEEN + number * b.words
                seen |= chosen(by_row[start : start + b.words, ..., 0].movedim(0, -1), keys - by_row[NODES])
            mask = torch.zeros(seen.shape, device=self._device).masked_fill_(~seen, -torch.inf)
            masks[window, False] = mask[:, None, :, None, :]
        return masks


def chosen(words: Tensor, nodes: Tensor) -> Tensor:
    """Returns whether a row's bit is set for each of ``nodes``; False beyond its words.

    Args:
        words: int64 [..., words].
        nodes: int64 [..., keys].
    """
    bits = words.shape[-1] * WORD
    word = words.gather(-1, nodes.clamp(0, bits - 1) // WORD)
    return (nodes >= 0) & (nodes < bits) & ((word >> nodes % WORD) & 1).bool()


def doubled(count: int, start: int) -> int:
    """Returns ``start``, doubled until it is at least ``count``."""
    while start < count:
        start *= 2
    return start


def ancestors(draft: Draft, window: int) -> Iterator[int]:
    """Yields an integer for each node. Its bit i says whether the node sees node i: itself or an ancestor.

    With a window other than 0, a node sees only the nearest ``window`` of them.
    """
    if window and window < max(draft.depths):
        yield from (sum(1 << i for i in draft.path(node)[-window:]) for node in range(len(draft)))
        return
    seen: list[int] = []
    for node, parent in enumerate(draft.parents):
        seen.append(1 << node | (seen[parent] if parent >= 0 else 0))
        yield seen[-1]

"""Plans of passes and chains as arrays for the kernels, and tables by position."""

import ctypes
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foretoken.models.chains import TREE_KINDS, ChainEnd, ChainRequest, DraftVocabulary, Draws, ModelChain
from foretoken.models.families.architecture import Architecture
from foretoken.models.runners.native.bindings import (
    BatchSpec,
    ChainSpec,
    ModelSpec,
    ReplaySpec,
    RopeSpec,
    SamplerSpec,
    TreeSpec,
)
from foretoken.models.runners.native.packing import padded
from foretoken.models.runners.pass_plan import Part, PassPlan
from foretoken.models.state.replay import ReplayPlan

_CHUNK = 512  # positions that are computed at once, which bounds the temporary arrays


def replay_pointer(plan: ReplayPlan) -> Any:
    """Returns a pointer to a plan's arrays, which must outlive it."""
    names = [field[0] for field in ReplaySpec._fields_ if field[1] is ctypes.c_void_p]
    places = {name: getattr(plan, name).buffer_info()[0] for name in names}
    counts = {"steps": len(plan.sources), "moves": len(plan.moved), "snapshot_count": len(plan.snapshots)}
    return ctypes.pointer(ReplaySpec(**places, **counts, copies=plan.copies))


def pass_batch(plan: PassPlan) -> BatchSpec:
    """Returns the plan for the kernels: tokens, positions, cache rows, and the keys that each row attends to.

    All integers are in one array, because a step touches every object for the first time since the last pass.
    """
    places: list[int] = []
    prefix: list[int] = []
    branch_from, branches, sequence_from = [0], list[int](), [0]
    for part in plan.parts:
        first, end = part.first, part.end
        places += range(first, end)
        if part.mutual:
            prefix += [end] * part.count
            branch_from += [len(branches)] * part.count
        elif part.draft.is_chain:
            prefix += range(first + 1, end + 1)
            branch_from += [len(branches)] * part.count
        else:
            _add_tree(part, prefix, branch_from, branches)
        sequence_from.append(len(places))
    tokens, positions, outputs = plan.tokens, plan.positions, plan.outputs
    numbers = array("i", [*tokens, *positions, *places, *prefix, *branch_from, *sequence_from, *outputs, *branches])
    batch, rows, at = BatchSpec(), 4 * len(tokens), numbers.buffer_info()[0]
    batch.held = [numbers]
    batch.tokens, batch.positions, batch.places, batch.prefix = at, at + rows, at + 2 * rows, at + 3 * rows
    batch.branch_from = at = at + 4 * rows
    batch.sequence_from = at = at + rows + 4
    batch.outputs = at = at + 4 * len(sequence_from)
    batch.branches = at + 4 * len(outputs)
    batch.rows, batch.sequences, batch.reach = len(tokens), len(plan.parts), plan.reach
    batch.output_count, batch.branch_count = len(outputs), len(branches)
    return batch


def _add_tree(part: Part, prefix: list[int], branch_from: list[int], branches: list[int]) -> None:
    """Adds a tree's rows, which attend to the committed rows and to their ancestors."""
    for place in range(part.first, part.end):
        node = place - part.nodes_at
        prefix.append(min(place + 1, part.nodes_at))
        if node >= 0:
            branches.extend(part.nodes_at + above for above in part.draft.path(node))
        branch_from.append(len(branches))


Addresses = tuple[int | None, ...] | None  # of kernels


class ChainArrays:
    """Inputs and results of the kernels for the chains of a pass.

    Args:
        requests: The chains. Their ends have the same bounds.
        vocabulary: The tokens that may be drafted.
        foreseen: Whether the pass has the logits of all levels.
        drawing: Addresses of the kernels that sample and change logits; see ``sampling.drawing``.

    Attributes:
        further: Number of rows behind those of each sequence; None for none.
        widest: Number of rows of a level of all requests.
    """

    def __init__(
        self, requests: Sequence[ChainRequest], vocabulary: DraftVocabulary, foreseen: bool, drawing: Addresses = None
    ) -> None:
        self._drawing, count = drawing or (None,) * 4, len(requests)
        self.requests, self.vocabulary, self.foreseen = requests, vocabulary, foreseen
        self.further = None if foreseen else [request.rows + 1 for request in requests]
        self.widest = sum([request.widest for request in requests])
        self._limits = array("i", [request.limit for request in requests])
        longest = self._longest = max(self._limits)
        self._end(requests)
        size = count * longest
        self._trees, self._parents = (TreeSpec * count)(), array("i", bytes(4 * size))
        self._tokens, self._probabilities = array("i", bytes(4 * size)), array("f", bytes(4 * size))
        self._counts, self._tried = array("i", bytes(4 * count)), array("i", bytes(4 * count))
        self._samplers, self._rows = (SamplerSpec * count)(), dict[int, Tensor]()
        self._held: list[object] = []
        for number, request in enumerate(requests):
            if request.tree is not None:
                shape = request.tree
                kind = TREE_KINDS.index(shape.kind)
                self._trees[number] = TreeSpec(shape.width, shape.steps, shape.temperature, shape.floor, kind)
            if request.draws is not None:
                self._samplers[number] = self._sampler(number, request, request.draws)
            if request.changes is not None:
                self._held.append(changes := request.changes(vocabulary.width))
                self._samplers[number].changes = ctypes.addressof(changes)

    def _end(self, requests: Sequence[ChainRequest]) -> None:
        """Sets where chains end; without an end every token counts as accepted."""
        count, ends = len(requests), [request.end for request in requests]
        self._bounds = array("f")
        if not any(ends):
            self._bases, self._slopes = array("f", [1.0]) * count, array("f", [0.0]) * count
            self._floors = array("f", bytes(4 * count * self._longest))
            return
        self._bounds = array("f", next(end.bounds for end in ends if end is not None))
        buckets = len(self._bounds) + 1
        never = ChainEnd(self._bounds, [1.0] * buckets, [0.0] * buckets, [0.0])
        set_ends = [end or never for end in ends]
        self._bases = array("f", [base for end in set_ends for base in end.bases])
        self._slopes = array("f", [slope for end in set_ends for slope in end.slopes])
        self._floors = array("f", [end.minimum(depth) for end in set_ends for depth in range(self._longest)])

    @cached_property
    def spec(self) -> ChainSpec:
        inputs = (self._limits, self._floors, self._bases, self._slopes, self._bounds)
        results = (self._tokens, self._probabilities, self._parents, self._counts, self._tried)
        ids, successors = self.vocabulary.ids, self.vocabulary.successors
        return ChainSpec(
            *(values.buffer_info()[0] for values in (*inputs, *results)),
            ctypes.addressof(self._samplers),
            ctypes.addressof(self._trees),
            *self._drawing,
            None if ids is None else ids.data_ptr(),
            *((None, None) if successors is None else successors.addresses),
            None,  # deeper layers
            self._longest,
            len(self._bounds) + 1,
            self.vocabulary.size,
            self.vocabulary.width,
            self.foreseen,
        )

    def results(self) -> list[ModelChain]:
        chains = []
        for number, (limit, count, tried) in enumerate(zip(self._limits, self._counts, self._tried, strict=True)):
            start = number * self._longest
            if self.requests[number].tree is not None:
                nodes = slice(start, start + count)
                parents = self._parents[nodes].tolist()
                chains.append(
                    ModelChain(
                        self._tokens[nodes].tolist(),
                        count < limit,
                        probabilities=self._probabilities[nodes].tolist(),
                        rows=self._rows[number][: max(parents, default=-2) + 2] if number in self._rows else None,
                        parents=parents,
                    )
                )
                continue
            tokens, known = self._tokens[start : start + count].tolist(), slice(start, start + tried)
            rows = self._rows[number][:count] if number in self._rows else None
            candidates, probabilities = self._tokens[known].tolist(), self._probabilities[known].tolist()
            chains.append(ModelChain(tokens, count < limit, candidates, probabilities, rows))
        return chains

    def _sampler(self, number: int, request: ChainRequest, draws: Draws) -> SamplerSpec:
        noise = array("Q", draws.keys) if draws.keys else array("d", draws.uniforms)
        kept, rows = draws.kept.spec(self.vocabulary.size), None
        self._held += [noise, kept]
        if draws.rows:
            # All rows of a chain are written. New zeroed memory would make the pass that follows a third slower.
            new = torch.zeros if request.tree else torch.empty
            rows = self._rows[number] = new(request.limit, self.vocabulary.width)
        return SamplerSpec(
            kept=ctypes.addressof(kept),
            noise=noise.buffer_info()[0],
            rows=None if rows is None else rows.data_ptr(),
            races=bool(draws.keys),
        )


class PositionTables:
    """The tables that a specification points to, as long as passes have reached so far.

    spec: its specification, whose pointers are set.
    """

    def __init__(self, architecture: Architecture, spec: ModelSpec) -> None:
        self._architecture, self._spec, self._rows = architecture, spec, 0
        self._ropes = (RopeSpec * max(1, len(architecture.frequencies)))()
        spec.ropes = self._ropes
        self._tables: list[Tensor] = []

    def reserve(self, rows: int) -> None:
        """Grows the tables to at least ``rows`` positions: rotary ones are [positions, 2 * half]."""
        if rows <= self._rows:
            return
        a, self._rows = self._architecture, padded(rows + rows // 4, _CHUNK)
        self._spec.table_positions = self._rows
        positions = torch.arange(self._rows).float()
        self._tables = []
        for number, frequencies in enumerate(a.frequencies):
            table = torch.empty(self._rows, 2 * len(frequencies))
            for part, chunk in zip(table.split(_CHUNK), positions.split(_CHUNK), strict=True):
                angles = torch.outer(chunk, frequencies)
                torch.mul(
                    torch.cat((angles.cos(), angles.sin()), -1), (a.rotary_scales or (1.0,) * 2)[number], out=part
                )
            self._tables.append(table)
            self._ropes[number] = RopeSpec(table.data_ptr(), len(frequencies), a.paired)
        if a.alibi is not None:
            self._tables.append(a.alibi.table(self._rows))
            self._spec.biases, self._spec.bias_stride = self._tables[-1].data_ptr(), self._rows
        if a.query_growth is not None:
            self._tables.append(a.query_factors(positions))
            self._spec.query_scales = self._tables[-1].data_ptr()

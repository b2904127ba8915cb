"""A stand-in for a device that counts launches, copies, read-backs and other waits of a decode step.

Graphs and kernels run on the CPU, and each counts as one launch. Every other operator that reads a result of a graph
counts as a launch, too, and every look at such a result as a wait, unless it goes through ``core.devices``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from struct import pack, unpack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from foretoken.core import devices
from foretoken.core.native import sampling as native
from foretoken.core.native.build import SWITCH
from foretoken.models import device_drafts, device_logits
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.formats.layers import Layers, Source, read_ends
from foretoken.models.runners import choose
from foretoken.models.runners.cuda import choice, layout, runner
from foretoken.models.runners.cuda.graphs import States
from foretoken.models.runners.cuda.runner import CudaRunner
from foretoken.models.runners.triton_kernels.rows import ChainRows, SampledRows, TreeRows
from foretoken.verify.residual import excess, ratio
from foretoken.verify.tree import _without as without

from .test_graphs import InTorch, memory
from .tiny import only_runner

CPU = torch.device("cpu")
READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "nonzero"}


class HostSampling:
    """Stands in for ``triton_kernels/sampling.py``: the compiled kernels choose each row's token."""

    @staticmethod
    def gathered(addresses: Tensor, vocabulary: int) -> Tensor:
        zeros = torch.zeros(vocabulary)
        return torch.stack([memory(at, (vocabulary,), torch.float32) if at else zeros for at in addresses.tolist()])

    @staticmethod
    def nodes(addresses: Tensor) -> Tensor:
        zeros = torch.zeros(4, dtype=torch.int64)
        return torch.stack([memory(at, (4,), torch.int64) if at else zeros for at in addresses.tolist()])

    @staticmethod
    def chosen(
        logits: Tensor,
        rows: SampledRows,
        narrow: bool,
        chains: ChainRows | None = None,
        start: int = 0,
        trees: TreeRows | None = None,
    ) -> Tensor:
        kernels, tokens = native.kernels(), torch.full((len(logits),), -1)
        measures = torch.zeros(len(logits), 3, dtype=torch.float64)
        assert kernels is not None
        for row, source in enumerate(rows.sources.tolist()):
            if not source:  # padding
                continue
            request = native.TokenRow.of(logits[row : row + 1], native.TokenSource(source))
            request.noise = int(rows.noise[row]) % 2**64
            numbers = rows.inverse[row], rows.floor[row], rows.top_k[row], rows.top_p[row]
            request.filter = native.FilterSpec(*(number.item() for number in numbers))
            assert narrow or not (request.filter.top_k or request.filter.top_p < 1.0)
            kernels.choose_tokens([request], logits.shape[1])
            tokens[row] = request.token
            if trees is not None and trees.drawn_from[start + row]:
                tokens[row] = HostSampling.rejected(logits[row : row + 1], request, trees, start + row)
            if chains is not None:
                measures[row, 1] = HostSampling.weight(chains, start + row)
                if address := int(chains.drawn_from[start + row]):
                    token, measures[row, 0], measures[row, 2] = HostSampling.beyond(
                        logits[row : row + 1],
                        memory(address, (logits.shape[1],), torch.float32),
                        request,
                        chains,
                        start + row,
                    )
                    tokens[row] = token if request.token >= 0 else -1
        measured = chains is not None or trees is not None
        return torch.cat((tokens[:, None], measures.view(torch.int64)), 1) if measured else tokens[:, None]

    @staticmethod
    def rejected(logits: Tensor, request: native.TokenRow, trees: TreeRows, row: int) -> int:
        """Rejects the children of a row one after another. Returns the token that follows then."""
        kernels = native.kernels()
        assert kernels is not None
        (p,), weight = kernels.rows(logits, kept(request)), float(trees.weights[row, 0])
        q = drawn = memory(int(trees.drawn_from[row]), (logits.shape[1],), torch.float32)
        for rank, child in enumerate(trees.children[row].tolist()):
            if child < 0:
                break
            token = int(trees.drafted[child])
            trees.reached[child] = min(1.0, weight * ratio(float(p[token]), float(q[token])))
            trees.weights[child, 0] = 1.0 if trees.recursive[child] else trees.reached[child]
            trees.chances[child] = drawn[token]
            if request.token >= 0:
                residual, mass = excess(p, q, weight)
                remaining = mass + (1.0 - weight)
                weight = mass / remaining if remaining > 0.0 else 1.0
                p, q = residual / mass if mass > 0.0 else p, without(q, [token])
            trees.weights[row, rank + 1] = weight
        (fraction,) = unpack("<d", pack("<Q", request.noise))
        return kernels.draw(p, fraction)[0] if request.token >= 0 else -1

    @staticmethod
    def weight(chains: ChainRows, row: int) -> float:
        weight = 1.0
        for at in range(int(chains.firsts[row]), row):
            weight = min(1.0, weight * float(chains.ratios[at]))
        return weight

    @staticmethod
    def beyond(
        logits: Tensor, q: Tensor, request: native.TokenRow, chains: ChainRows, row: int
    ) -> tuple[int, float, float]:
        """Returns the token of a row's excess over the draft, the excess, and the draft's probability of its token."""
        kernels, token = native.kernels(), int(chains.drafted[row])
        assert kernels is not None

        (p,), below = kernels.rows(logits, kept(request)), float(q[token])
        q = q if chains.masses[row] == 1.0 else q.double() / chains.masses[row]
        chains.ratios[row] = ratio(float(p[token]), float(q[token]))
        left, mass = excess(p, q, HostSampling.weight(chains, row))
        (fraction,) = unpack("<d", pack("<Q", request.noise))
        return kernels.draw(left if mass > 0.0 else p, fraction)[0], mass, below

    @staticmethod
    def described(logits: Tensor, tokens: Tensor, ids: Tensor) -> Tensor:
        count = ids.shape[1]
        kernels, results = native.kernels(), torch.zeros((len(logits), 2 + 2 * count), dtype=torch.int64)
        assert kernels is not None
        for row, token in enumerate(tokens.tolist()):
            if token < 0:
                continue
            request = native.TokenRow.of(logits[row : row + 1], native.TokenSource.GIVEN)
            request.token = token
            request.list_top(count)
            kernels.choose_tokens([request], logits.shape[1])
            bits = torch.tensor([request.logprob, *(value for _, value in request.top)], dtype=torch.float64)
            values = bits.view(torch.int64).tolist()
            results[row] = torch.tensor([values[0], request.rank, *ids[row].tolist(), *values[1:]])
        return results


def kept(request: native.TokenRow) -> Any:
    class Kept:
        spec = staticmethod(lambda vocabulary: request.filter)

    return Kept


@dataclass
class Counts:
    """Counts of one step.

    Attributes:
        launches: replays of graphs, and kernels and operators beside them.
        copies: copies to the device.
        reads: copies to the host, each with the only wait that a step may have.
        waits: other waits.
        captures: graphs that were captured.
    """

    launches: int = 0
    copies: int = 0
    reads: int = 0
    waits: int = 0
    captures: int = 0
    inside: bool = field(default=False, repr=False)  # of a graph, a kernel or a copy that is counted as one

    def apart(self, function: Callable[..., Any], counter: str = "") -> Callable[..., Any]:
        """Returns the function, which counts as one of ``counter``, or as nothing, whatever it does."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return function(*args, **kwargs)
            if counter:
                setattr(self, counter, getattr(self, counter) + 1)
            self.inside = True
            try:
                with DisableTorchFunction(), _disable_current_modes():  # which would count nothing inside
                    return function(*args, **kwargs)
            finally:
                self.inside = False

        return counted


class CountedOperators(TorchDispatchMode):
    """Counts operators outside of graphs. ``placed`` is memory of the device, kept so that no address is used again."""

    def __init__(self, counts: Counts, placed: dict[int, Tensor]) -> None:
        super().__init__()
        self._counts, self._placed = counts, placed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._counts.inside:
            return result
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy):
            self._counts.copies += 1
        elif not func.is_view and any(address(each) in self._placed for each in tree_leaves((args, kwargs))):
            self._counts.launches += 1
            self._placed |= {address(each): each for each in tree_leaves(result) if address(each)}
        return result


class CountedReads(TorchFunctionMode):
    """Counts looks of the host at memory of the device."""

    def __init__(self, counts: Counts, placed: dict[int, Tensor]) -> None:
        super().__init__()
        self._counts, self._placed = counts, placed

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in READS and not self._counts.inside and address(args[0]) in self._placed:
            self._counts.waits += 1
        return func(*args, **(kwargs or {}))


def address(value: Any) -> int:
    strided = isinstance(value, Tensor) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() if strided else 0


class CountedDevice:
    """The stand-in. Between ``step``s nothing is counted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts, self._placed = Counts(inside=True), dict[int, Tensor]()
        patch.setattr(layout, "attention_kernels", lambda: InTorch)
        patch.setattr(choice, "sampling_kernels", lambda: HostSampling)
        patch.setattr(InTorch, "move", staticmethod(self._counted(InTorch.move, "launches")))
        for module in (device_logits, device_drafts):
            patch.setattr(module, "fetched", self._counted(devices.fetched, "reads"))
        for module in (runner, choice):
            patch.setattr(module, "fetching", self._fetching)
        patch.setattr(devices, "on_host", self._counted(devices.on_host, "reads"))
        patch.setattr(devices, "wait_for", self._counted(devices.wait_for, "waits"))

    def _counted(self, function: Callable[..., Any], counter: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.counts.apart(function, counter)(*args, **kwargs)

    def _fetching(self, tensor: Tensor) -> Callable[[], Tensor]:
        """See ``devices.fetching``. A copy counts when the host waits for it."""
        return self._counted(self.counts.apart(devices.fetching)(tensor), "reads")

    def capture(self, function: Callable[[], States]) -> Callable[[], States]:
        """See ``graphs.Capture``: as a graph does, a replay writes over the tensors of the first time."""
        self.counts.captures += 1
        static = {key: state.clone() for key, state in self.counts.apart(function)().items()}
        self._placed |= {address(state): state for state in static.values()}

        def replay() -> States:
            for key, state in function().items():
                static[key].copy_(state)
            return static

        return self._counted(replay, "launches")

    @contextmanager
    def building(self) -> Iterator[None]:
        """Heads built inside are on this device."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SWITCH, "0")
            patch.setattr(choose, "has_kernels", lambda device: True)
            patch.setattr(choose, "CudaRunner", partial(CudaRunner, capture=lambda _: self))
            yield

    def model(self, path: Path) -> Decoder:
        """Returns a model on this device."""
        with only_runner("torch"):
            model = Decoder(load_config(path), open_weights(path), torch.float32, CPU)
        architecture = Architecture.of(load_config(path))
        source = Source(open_weights(path), architecture, torch.float32, None)
        parts = architecture, Layers(source), read_ends(source), torch.float32, CPU
        model.runner = CudaRunner(*parts, capture=lambda _: self)
        model.batch_invariant = model.chunk_invariant = True
        return model

    @contextmanager
    def step(self) -> Iterator[Counts]:
        """Counts what happens inside."""
        self.counts.__init__()  # type: ignore[misc]
        with CountedReads(self.counts, self._placed), CountedOperators(self.counts, self._placed):
            yield self.counts
        self.counts.inside = True

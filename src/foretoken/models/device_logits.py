"""Logits and hidden states that stay on a device until they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from foretoken.core.devices import fetched, on_device
from foretoken.core.native.sampling import TokenRow


class TokenChooser(Protocol):
    """Chooses the tokens of rows of logits where these are."""

    def choose_tokens(self, rows: Sequence[TokenRow], vocabulary: int, threads: int = 0) -> Callable[[], None] | None:
        """Computes the results of requests, whose addresses of logits are the device's; see ``native.Kernels``.

        Returns a function that waits for the results and writes them to the requests; None if they are there.
        """


class DeviceRows:
    """Rows of a pass's logits on a device, in the place of a tensor in ``Scores``.

    Args:
        values: the logits [rows, V], in memory that a later pass overwrites.
        chooser: chooses tokens by them.
        whole: all rows of the pass; None for this object.
        start: the first of these rows among all.
        drafted: int64 [rows, 4] of all rows, the nodes of drafts that the host has not read; see ``read_nodes`` of
            ``runners/cuda/layout.py``. None without them.
    """

    def __init__(
        self,
        values: Tensor,
        chooser: TokenChooser,
        whole: DeviceRows | None = None,
        start: int = 0,
        drafted: Tensor | None = None,
    ) -> None:
        self._values, self._chooser, self._whole, self._start = values, chooser, whole, start
        self._drafted = drafted
        self._host: Tensor | None = None
        self._overwritten = False

    @property
    def tensor(self) -> Tensor:
        """The logits [rows, V] in the host's memory. The first use copies those of the whole pass."""
        whole = self._whole or self
        if whole._host is None:
            whole._host = fetched(whole._values)
        return whole._host[self._start : self._start + len(self._values)]

    def release(self) -> None:
        """Copies the rows to the host's memory, before those of the device are overwritten."""
        assert self.tensor is not None
        self._overwritten = True

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return self._values.shape[1]

    @property
    def chooser(self) -> TokenChooser | None:
        """Chooses tokens by these rows on the device; None once they are in the host's memory alone."""
        return None if (self._whole or self)._overwritten else self._chooser

    @property
    def memory(self) -> tuple[int, int, int]:
        """See ``Scores.memory``."""
        rows = self._values if self.chooser else self.tensor
        return rows.data_ptr(), rows.shape[0], rows.stride(0)

    def split(self, counts: Sequence[int]) -> list[DeviceRows]:
        """Returns the first ``counts[0]`` rows, the next ``counts[1]`` rows, and so on."""
        parts = zip(self._values.split(list(counts)), accumulate(counts, initial=0), strict=False)
        whole, drafted = self._whole or self, self._drafted
        return [type(self)(values, self._chooser, whole, self._start + start, drafted) for values, start in parts]

    @property
    def node_address(self) -> int:
        """The address of the node of row 1, if the host has not read it; else 0."""
        if self._drafted is None:
            return 0
        return self._drafted.data_ptr() + (self._start + 1) * self._drafted.stride(0) * self._drafted.itemsize


class TappedMemory:
    """Hidden states of a pass on a device.

    Args:
        layers: the layers.
        states: [layers, rows, H], in memory that a later pass overwrites.
    """

    def __init__(self, layers: Sequence[int], states: Tensor) -> None:
        self.layers, self.states = tuple(layers), states
        self._kept = False

    def release(self) -> None:
        """Copies the states on the device, before they are overwritten."""
        if not self._kept:
            self.states, self._kept = self.states.clone(), True


class DeviceTaps(Mapping[int, Tensor]):
    """Hidden states of some rows. A tensor of a layer is a copy; kernels read the states where they are.

    Args:
        memory: those of all rows of the pass.
        layers: the layers, in the order in which kernels read them.
        start: the first row.
        rows: number of rows.
    """

    def __init__(self, memory: TappedMemory, layers: Sequence[int], start: int, rows: int) -> None:
        self.memory, self.layers, self.start, self.rows = memory, tuple(layers), start, rows

    def __getitem__(self, layer: int) -> Tensor:
        if layer not in self.layers:
            raise KeyError(layer)
        self.memory.release()
        return self.memory.states[self.memory.layers.index(layer), self.start : self.start + self.rows]

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def of(self, layers: Sequence[int]) -> DeviceTaps:
        """Returns the states of these layers, in this order."""
        return DeviceTaps(self.memory, layers, self.start, self.rows)

    def split(self, counts: Sequence[int]) -> list[DeviceTaps]:
        """Returns the first ``counts[0]`` rows, the next ``counts[1]`` rows, and so on."""
        starts = accumulate(counts, initial=self.start)
        return [
            DeviceTaps(self.memory, self.layers, start, count) for start, count in zip(starts, counts, strict=False)
        ]

    def only(self, rows: Sequence[int]) -> DeviceTaps:
        """Returns a copy of some rows."""
        index = on_device([self.start + row for row in rows], self.memory.states.device)
        return DeviceTaps(
            TappedMemory(self.memory.layers, self.memory.states.index_select(1, index)), self.layers, 0, len(rows)
        )

    @property
    def held(self) -> int:
        """Number of rows whose memory these keep."""
        return self.memory.states.shape[1]

    @property
    def places(self) -> tuple[list[int], int]:
        """The address of each layer's first row, and the number of bytes from a row to the next."""
        states = self.memory.states
        size, (layer, row, _) = states.itemsize, states.stride()
        first = states.data_ptr() + self.start * row * size
        return [first + self.memory.layers.index(number) * layer * size for number in self.layers], row * size

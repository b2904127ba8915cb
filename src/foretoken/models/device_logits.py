"""Logits that stay on a device until the host reads them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from foretoken.core.devices import fetched
from foretoken.core.native.sampling import TokenRow


class TokenChooser(Protocol):
    """Chooses the tokens of rows of logits where these are."""

    def choose_tokens(self, rows: Sequence[TokenRow], vocabulary: int, threads: int = 0) -> None:
        """Computes the results of requests, whose addresses of logits are the device's; see ``native.Kernels``."""


class DeviceRows:
    """Rows of a pass's logits on a device, in the place of a tensor in ``Scores``.

    Args:
        values: the logits [rows, V], in memory that a later pass overwrites.
        chooser: chooses tokens by them.
        whole: all rows of the pass; None for this object.
        start: the first of these rows among all.
    """

    def __init__(self, values: Tensor, chooser: TokenChooser, whole: DeviceRows | None = None, start: int = 0) -> None:
        self._values, self._chooser, self._whole, self._start = values, chooser, whole, start
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
        return [type(self)(values, self._chooser, self._whole or self, self._start + start) for values, start in parts]

"""Memory of a device by its addresses, as pages of the KV cache and recurrent states need it."""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceMemory:
    """Zeroed memory, freed when it is given back, or with this object.

    Args:
        device: where the memory is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: dict[int, Tensor] = {}

    def allocate(self, size: int) -> int:
        """Returns the address of ``size`` zeroed bytes."""
        block = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._blocks[block.data_ptr()] = block
        return block.data_ptr()

    def free(self, address: int) -> None:
        """Frees memory that ``allocate`` returned; passes that were started before may still use it."""
        del self._blocks[address]

    @torch.inference_mode()
    def copy(self, to: int, source: int, size: int) -> None:
        """Copies ``size`` bytes to the address ``to``, after the passes that were started before."""
        if size:
            self._part(to, size).copy_(self._part(source, size))

    def block(self, address: int) -> Tensor:
        """Returns the bytes that ``allocate`` returned the address of."""
        return self._blocks[address]

    def _part(self, address: int, size: int) -> Tensor:
        start = address if address in self._blocks else max(block for block in self._blocks if block <= address)
        return self._blocks[start][address - start : address - start + size]

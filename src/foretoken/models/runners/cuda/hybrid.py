"""The runner for CUDA of models with recurrent layers: states and logs beside the KV cache.

A pass changes states in place and must not be computed twice, so graphs are captured on a pass without steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.weights import Ends, Entry, LayerWeights
from foretoken.models.runners.base import Pass
from foretoken.models.runners.cuda.graphs import Capture
from foretoken.models.runners.cuda.memory import DeviceMemory
from foretoken.models.runners.cuda.runner import CudaRunner
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.state.recurrent import RecurrentStates, StateShape


class HybridCudaRunner(CudaRunner):
    """A runner of models with recurrent layers; see ``CudaRunner``.

    Drafts are replayed as on CPUs (``models/state/replay.py``); states, logs and their order are kept by the same code.
    """

    def __init__(
        self,
        architecture: Architecture,
        layers: Iterable[LayerWeights],
        ends: Ends,
        dtype: torch.dtype,
        device: torch.device,
        entry: Entry | None = None,
        capture: Callable[[torch.device], Capture] | None = None,
    ) -> None:
        super().__init__(architecture, layers, ends, dtype, device, entry, capture)
        self._recurrent = self._new_states(architecture)

    def _new_states(self, a: Architecture) -> RecurrentStates:
        assert a.recurrence is not None
        return RecurrentStates(DeviceMemory(self._device), StateShape.of(a.recurrence, a.recurrent_layers))

    def first(self, architecture: Architecture, norm: Tensor | None) -> Self:
        view = super().first(architecture, norm)
        view._recurrent = self._new_states(architecture)
        return view

    @property
    def state_bytes(self) -> int:
        return self._recurrent.shape.bytes

    def nbytes(self) -> int:
        return super().nbytes() + self._recurrent.nbytes()

    def acquire(
        self, tokens: Sequence[int] = (), scope: Hashable = None, adapter: str | None = None
    ) -> tuple[int, int]:
        slot, rows = super().acquire(tokens, scope, adapter)
        self._recurrent.reset(self._recurrent.slot(slot))
        return slot, rows

    def resume(self, slot: int, rows: int) -> int:
        state = self._recurrent.slot(slot)
        reached = self._recurrent.reaches(state, rows)
        if not reached:
            self._recurrent.reset(state)
        return reached

    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        self._recurrent.accept(self._recurrent.slot(slot), destination, sources)
        super().move(slot, destination, sources)

    def enable_prefix_cache(self, max_bytes: int) -> bool:
        return False

    def check(self) -> None:
        super().check()
        self._recurrent.check()

    @torch.inference_mode()
    def run(self, plan: PassPlan, taps: Sequence[int], logits: bool) -> Pass:
        steps = self._recurrent.plan(plan.parts, _no_snapshots)
        result = super().run(replace(plan, replay=steps), taps, logits)
        self._recurrent.finish()
        return result


def _no_snapshots(slot: int, start: int, end: int) -> dict[int, int]:
    return {}

"""The runner for CUDA of models with recurrent layers: states and logs beside the KV cache.

A pass changes states in place and must not be computed twice, so graphs are captured on a pass without steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from foretoken.models.families.architecture import Architecture
from foretoken.models.runners.base import Pass
from foretoken.models.runners.cuda.memory import DeviceMemory
from foretoken.models.runners.cuda.page_cache import PageCache
from foretoken.models.runners.cuda.runner import CudaRunner
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.state.recurrent import RecurrentStates, StateShape


class HybridCudaRunner(CudaRunner):
    """A runner of models with recurrent layers; see ``CudaRunner``.

    Drafts are replayed as on CPUs (``models/state/replay.py``); states, logs and their order are kept by the same code.
    """

    def _new_cache(self, a: Architecture) -> PageCache:
        """Returns a KV cache; the states beside it are new as well."""
        assert a.recurrence is not None
        shape = StateShape.of(a.recurrence, a.recurrent_layers)
        self._recurrent = RecurrentStates(DeviceMemory(self._device), shape)
        return super()._new_cache(a)

    @property
    def state_bytes(self) -> int:
        return self._recurrent.shape.bytes

    def nbytes(self) -> int:
        return super().nbytes() + self._recurrent.nbytes()

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

"""The seam between the contract and the arithmetic: a runner holds weights and key/value rows, and computes passes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foretoken.models.architecture import Architecture
from foretoken.models.plan import Plan
from foretoken.models.weights import Ends, LayerWeights

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass gives for the plan's ``outputs``, in their order.

    logits: [outputs, V], None when they were not asked for. taps: hidden states by layer, [outputs, H]; index i
    is the input of layer i, the number of layers the normed output.
    """

    logits: Tensor | None
    taps: dict[int, Tensor] = field(default_factory=dict)


class Runner(Protocol):
    """Everything below ``Decoder``: slots of key/value rows, and passes over them."""

    rows_independent: bool

    def acquire(self) -> int:
        """A free slot, the lowest one."""

    def release(self, slot: int) -> None:
        """Give a slot back; its rows are never seen again."""

    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        """Bring rows ``sources`` (ascending) to ``destination`` onward, in order; used after a tree's verdict."""

    def nbytes(self) -> int:
        """Bytes held by keys and values."""

    def run(self, plan: Plan, taps: Sequence[int], logits: bool) -> Pass:
        """Compute every row of the plan and keep its keys and values."""


def build(
    architecture: Architecture,
    layers: Iterable[LayerWeights],
    ends: Ends,
    dtype: torch.dtype,
    device: torch.device,
) -> Runner:
    """The fastest runner here for that model. ``layers`` is read one at a time, so that only one is held twice."""
    from foretoken.models.native.build import Unavailable
    from foretoken.models.native.runner import NativeRunner
    from foretoken.models.torch_runner import TorchRunner

    if device.type == "cpu":
        try:
            return NativeRunner(architecture, layers, ends, dtype)
        except Unavailable as reason:
            _log.info("torch operators compute the model: %s", reason)
    return TorchRunner(architecture, layers, ends, dtype, device)

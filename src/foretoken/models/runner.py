"""The seam between the contract and the arithmetic: a runner holds weights and key/value rows, and computes passes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.models.architecture import Architecture
from foretoken.models.base import NO_ENCODER
from foretoken.models.plan import Plan
from foretoken.models.quantize import Int8
from foretoken.models.weights import Ends, Entry, LayerWeights

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass gives.

    logits: float32 [outputs, V], None when they were not asked for. taps: hidden states of all rows by layer,
    [rows, H]; index i is the input of layer i, the number of layers the normed output, and one more the same before
    the norm.
    """

    logits: Tensor | None
    taps: dict[int, Tensor] = field(default_factory=dict)


class DecoderOnly:
    """What runners have that know no encoder."""

    def attach(self, slot: int, source: Sequence[int]) -> None:
        raise InvalidRequest(NO_ENCODER)


class Runner(Protocol):
    """Everything below ``Decoder``: slots of key/value rows, and passes over them."""

    rows_independent: bool
    cuts_freely: bool
    joint_rows: int  # a sequence with more pending rows than this is prefilled by itself

    @property
    def row_bytes(self) -> int:
        """Bytes that one token's keys and values take."""

    def acquire(self, tokens: Sequence[int] = (), cache_salt: str | None = None) -> tuple[int, int]:
        """A free slot, the lowest one. -> it, and how many rows of a prompt of ``tokens`` it holds already

        cache_salt: rows are shared only between prompts of the same salt.
        """

    def attach(self, slot: int, source: Sequence[int]) -> None:
        """What an encoder is to read for the slot, before its first pass. Raises InvalidRequest without an encoder."""

    def release(self, slot: int) -> None:
        """Give a slot back; its rows are seen again only by prompts of the same salt that begin alike."""

    def publish(self, slot: int, tokens: Sequence[int], rows: int) -> None:
        """The slot's first ``rows`` rows hold the first of ``tokens`` for good, so that others may share them."""

    def keep(self, limit: int) -> bool:
        """Hold at most ``limit`` bytes, rows for later prompts that begin alike among them. -> whether it can do so"""

    def check(self) -> None:
        """Raises AssertionError where slots and rows do not add up."""

    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        """Bring rows ``sources`` (ascending) to ``destination`` onward, in order; used after a tree's verdict."""

    def nbytes(self) -> int:
        """Bytes held by keys and values."""

    def first(self, architecture: Any, norm: Tensor | None) -> Runner:
        """A runner of the first ``architecture.layers`` layers and the same head: shared weights, slots of its own.

        norm: float32 [H], in the place of the last norm; None keeps that.
        """

    def unembed(self, hidden: Tensor) -> Tensor:
        """The vocabulary head alone: normed states [rows, H] -> float32 [rows, V]."""

    def run(self, plan: Plan, taps: Sequence[int], logits: bool) -> Pass:
        """Compute every row of the plan and keep its keys and values.

        Without ``logits`` and ``taps`` the rows are a piece of one prompt, whose cut depends on that sequence alone.
        """


def build(
    architecture: Architecture,
    layers: Iterable[LayerWeights],
    ends: Ends,
    dtype: torch.dtype,
    device: torch.device,
    entry: Entry | None = None,
) -> Runner:
    """The fastest runner here for that model.

    ``layers`` is read one at a time, so that only one is held twice, and again from the start where the compiled
    kernels turn out not to serve.
    """
    from foretoken.core.native.build import Unavailable
    from foretoken.models.graphs import GraphRunner
    from foretoken.models.native.runner import NativeRunner
    from foretoken.models.torch_runner import TorchRunner

    if device.type == "cpu":
        try:
            return NativeRunner(architecture, _of_one_kind(layers, ends), ends, dtype, entry)
        except Unavailable as reason:
            _log.info("torch operators compute the model: %s", reason)
    if device.type == "cuda" and entry is None:
        return GraphRunner(architecture, layers, ends, dtype, device)
    return TorchRunner(architecture, layers, ends, dtype, device, entry)


def _of_one_kind(layers: Iterable[LayerWeights], ends: Ends) -> Iterator[LayerWeights]:
    """The layers, as long as all matrices are int8 or none is: kernels are compiled for one kind."""
    from foretoken.core.native.build import Unavailable

    int8 = isinstance(ends.head, Int8)
    for layer in layers:
        if any(isinstance(matrix, Int8) != int8 for matrix in (*layer.qkv, layer.out, *layer.gate_up, layer.down)):
            raise Unavailable("only some of its matrices are int8; quantization='int8' makes the others so")
        yield layer
        del layer  # before the next is read

"""The steps of recurrent layers in a pass (``models/state/replay.py``) as tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from foretoken.models.families.layers import RecurrentMixer
from foretoken.models.families.recurrence import Recurrence
from foretoken.models.state.replay import NOWHERE, OWN, ZEROS, ReplayPlan

ON = -3  # beside the indices of ``replay``: a step continues with the state of the step before it
MIN_SEQUENCES, MIN_STEPS = 8, 64  # doubled until all fit
COUNTS = 2  # integers before the arrays of a table


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Lengths of the arrays, rounded up so that few graphs suffice."""

    sequences: int  # sequences of the pass
    steps: int  # steps of all sequences, or rows whose inputs are copied, if they are more
    taps: int  # rows that a convolution reads
    copies: int  # states of each sequence that branches of trees store

    @staticmethod
    def of(plan: ReplayPlan) -> StepSizes:
        """Returns the smallest sizes that hold a plan."""
        steps, sequences = len(plan.sources), len(plan.states)
        copies = 1 + max(transfers(plan)[1], default=0)
        return StepSizes(
            sequences=doubled(sequences, MIN_SEQUENCES),
            steps=doubled(max(steps, len(plan.moved)), MIN_STEPS),
            taps=len(plan.inputs) // steps,
            copies=doubled(copies, 1) if copies > 0 else 0,
        )

    @property
    def arrays(self) -> list[int]:
        """Lengths of the arrays in a table: those of ``Steps``, in their order."""
        return [COUNTS, *[self.sequences] * 5, *[self.steps] * 4, self.steps * self.taps, *[self.steps] * 4]


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a pass, int64; see ``replay.ReplayPlan``."""

    copies: int  # stored states of each sequence
    counts: Tensor  # [2]; number of steps, and of rows whose inputs are copied
    firsts: Tensor  # [sequences]; the first step of each sequence
    ends: Tensor  # [sequences]; the step after its last one
    states: Tensor  # [sequences]; address of its states of all layers
    logs: Tensor  # [sequences]; address of its log
    log_rows: Tensor  # [sequences]; rows of its log of one layer
    sequences: Tensor  # [steps]; the sequence of each step
    sources: Tensor  # [steps]; the state that it reads, or ``ON``
    targets: Tensor  # [steps]; the state that it writes; most steps write none
    saves: Tensor  # [steps]; address of the snapshot that it also writes; 0 for none
    inputs: Tensor  # [steps, taps]; encoded rows: of the step, then the rows before it
    moved: Tensor  # encoded rows whose inputs are copied
    moved_of: Tensor  # the sequence of each
    moved_to: Tensor  # the address in the first layer to which each is copied
    moved_stride: Tensor  # rows between this place in one layer and in the next

    @staticmethod
    def of(table: Tensor, sizes: StepSizes) -> Steps:
        """Reads a table on the device."""
        return Steps(sizes.copies, *table.split(sizes.arrays))


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentLayer:
    """Computation of a recurrent layer between its products; see ``formats.recurrent.RecurrentWeights``."""

    kind: RecurrentMixer  # kind of the mixer
    sizes: Recurrence  # sizes of the mixer
    number: int  # index among the recurrent layers
    eps: float  # epsilon of the norm
    conv: Tensor
    conv_bias: Tensor | None
    decay: Tensor | None
    step_bias: Tensor | None
    norm: Tensor | None
    skip: Tensor | None


def fill_steps(plan: ReplayPlan, sizes: StepSizes, pinned: bool) -> Tensor:
    """Returns a plan as a table for ``Steps.of``, in memory that torch keeps until it has been copied.

    A table of zeros is a pass without steps.
    """
    rooms = sizes.arrays
    filled = torch.zeros(sum(rooms), dtype=torch.int64, pin_memory=pinned)
    sources, targets = transfers(plan)
    lengths = np.diff(plan.first_step)
    arrays: list[Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]] = [
        [len(sources), len(plan.moved)],
        plan.first_step[:-1],
        plan.first_step[1:],
        plan.states,
        plan.logs,
        plan.log_rows,
        np.repeat(np.arange(len(lengths)), lengths),
        sources,
        targets,
        np.array([*plan.snapshots, 0])[plan.saves],
        plan.inputs,
        plan.moved,
        plan.moved_of,
        plan.moved_to,
        plan.moved_stride,
    ]
    table, at = filled.numpy(), 0
    for room, numbers in zip(rooms, arrays, strict=True):
        table[at : at + len(numbers)] = numbers
        at += room
    return filled


def transfers(plan: ReplayPlan) -> tuple[list[int], list[int]]:
    """Returns the states that each step reads and writes, without states that stay in registers."""
    sources, targets = list(plan.sources), list(plan.targets)
    for first, end in pairwise(plan.first_step):
        read = {OWN}
        for step in range(end - 1, first - 1, -1):
            if targets[step] not in read:
                targets[step] = NOWHERE
            read.discard(targets[step])
            if step > first and sources[step] == plan.targets[step - 1] != NOWHERE:
                sources[step] = ON
            elif sources[step] != ZEROS:
                read.add(sources[step])
    return sources, targets


def doubled(count: int, start: int) -> int:
    """Returns ``start``, doubled until it is at least ``count``."""
    while start < count:
        start *= 2
    return start

"""Recurrent layers alone: a token's inputs are rows of a table, so that what follows is the kernels' work."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.base import Handle, growing
from foretoken.models.families.layers import RecurrentMixer
from foretoken.models.families.recurrence import MambaFactors, Recurrence
from foretoken.models.runners.cuda.page_cache import DeviceMemory
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.runners.triton_kernels.steps import RecurrentLayer, Steps, StepSizes, fill_steps
from foretoken.models.state.recurrent import RecurrentStates, StateShape

Mix = Callable[[RecurrentLayer, Tensor, Tensor, Steps], Tensor]
TOKENS, SAVED = 50, 2
HEADS = {"key_heads": 1, "value_heads": 2, "key_dim": 24, "value_dim": 12}  # no powers of two
SIZES: dict[RecurrentMixer, Recurrence] = {
    "delta": Recurrence(window=3, channels=72, out=24, gates=4, norm_first=True, **HEADS),
    "mamba": Recurrence(
        window=3, channels=72, out=24, gates=4, factors=MambaFactors(input=1.5, gate=0.7, step=0.6), **HEADS
    ),
    "convolution": Recurrence(window=2, channels=48, out=48, paired=True),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layers(kind: RecurrentMixer, count: int, device: torch.device) -> list[RecurrentLayer]:
    """Returns random layers of a kind."""
    s, result = SIZES[kind], []
    for number in range(count):

        def random(*shape: int, seed: int, number: int = number) -> Tensor:
            return numbers(*shape, seed=100 * number + seed).to(device)

        heads = None if kind == "convolution" else random(s.value_heads, seed=1)
        result.append(
            RecurrentLayer(
                kind=kind,
                sizes=s,
                number=number,
                eps=1e-5,
                conv=random(s.window + 1, s.channels, seed=2),
                conv_bias=None if kind == "delta" else random(s.channels, seed=3),
                decay=None if heads is None else -heads.abs(),
                step_bias=None if heads is None else random(s.value_heads, seed=4),
                norm=None if heads is None else random(s.value_dim if kind == "delta" else s.out, seed=5),
                skip=random(s.value_heads, seed=6) if kind == "mamba" else None,
            )
        )
    return result


class Sequences:
    """Sequences of tokens through recurrent layers.

    Args:
        kind: kind of the layers.
        device: where they are computed.
        mix: computes a layer.
        dtype: of the inputs.
        count: number of layers.
    """

    def __init__(
        self, kind: RecurrentMixer, device: torch.device, mix: Mix, dtype: torch.dtype, count: int = 1
    ) -> None:
        s = SIZES[kind]
        self._layers, self._mix, self._device = layers(kind, count, device), mix, device
        shape, self._memory = StateShape.of(s, count), DeviceMemory(device)
        self.states = RecurrentStates(self._memory, shape)
        self._snapshot = self._memory.allocate(shape.snapshot_bytes)
        gates = {"delta": 2 * s.value_heads, "mamba": s.value_heads, "convolution": 1}[kind]
        widths = (1 + s.paired) * s.channels + s.out, gates
        self._tables = [numbers(TOKENS, width, seed=9).to(device, dtype) for width in widths]
        self._opened = 0

    def open(self, prompt: Sequence[int]) -> Handle:
        self._opened += 1
        return Handle(self._opened - 1, list(prompt))

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft]) -> list[Tensor]:
        """Returns the layers' results at the outputs of each sequence, [outputs, layers * out]."""
        done = [growing(handle, draft) for handle, draft in zip(handles, drafts, strict=True)]
        plan = PassPlan.of(handles, drafts, done)
        replay = self.states.plan(plan.parts, self._take)
        sizes = StepSizes.of(replay)
        steps = Steps.of(fill_steps(replay, sizes, pinned=False).to(self._device), sizes)
        rows, gates = (table[torch.tensor(plan.tokens)] for table in self._tables)
        mixed = torch.cat([self._mix(layer, rows, gates, steps) for layer in self._layers], dim=1)
        self.states.finish()
        for handle, draft in zip(handles, drafts, strict=True):
            handle.cached = len(handle.tokens)
            handle.nodes[:], handle.parents[:] = draft.ids, draft.parents
        return list(mixed[torch.tensor(plan.outputs)].cpu().split(plan.output_counts))

    def _take(self, slot: int, start: int, end: int) -> dict[int, int]:
        return {} if slot or not start < SAVED <= end else {SAVED: self._snapshot}

    def snapshot(self) -> Tensor:
        """Returns the state of the first sequence after its first ``SAVED`` tokens, with the inputs before it."""
        return self._memory.block(self._snapshot).view(torch.float32).cpu()

    def commit(self, handle: Handle, tokens: Sequence[int]) -> None:
        destination, sources = handle.advance(tokens)
        self.states.accept(self.states.slot(handle.slot), destination, sources)

    def one_by_one(self, prompt: Sequence[int], follows: Sequence[int]) -> list[Tensor]:
        """Returns the outputs before each token of ``follows``, decoded alone."""
        handle, outputs = self.open(prompt), []
        for token in follows:
            outputs.append(self.score([handle], [Draft.empty()])[0][0])
            self.commit(handle, [token])
        return outputs

"""The weights of a layer's experts as the runner takes them: one expert at a time, for every layout of a checkpoint.

Checkpoints store experts under separate names (``experts.0.gate_proj.weight``), as stacks of all experts with gate and
up joined (``experts.gate_up_proj`` [experts, 2 I, H]), or separate (GGUF: [experts, I, H]). gpt-oss stores stacks with
inputs first and rows of gate and up in turns, and packed ones with outputs first.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.models.families.experts import Experts
from foretoken.models.formats.quantize import Grouped, Matrix
from foretoken.models.formats.reader import TensorReader, as_one_kind
from foretoken.models.formats.weights import ExpertWeights, LinearWeights, MatrixStack, NormWeight


def read_experts(reader: TensorReader, at: str, e: Experts, hidden: int) -> ExpertWeights[LinearWeights, MatrixStack]:
    """Reads the experts of the layer with names below ``at``."""
    router, shared, b = f"{at}.{e.names.router}", f"{at}.{e.names.shared}", e.beside
    shared_up = reader.halves(tuple(f"{shared}.{part}" for part in e.names.shared_up))
    stored = reader.shaped(f"{router}.weight", (e.count, hidden))
    router_bias = reader.floats(f"{router}.bias", (e.count,)) if e.biased else None
    up, down = _stacks(reader, f"{at}.{e.names.experts}", e, hidden)
    scale = None if b is None else reader.floats(f"{at}.{b.scale}", (hidden,)) * hidden**-0.5
    return ExpertWeights(
        experts=e,
        router=LinearWeights((stored.clone() if stored.dtype == torch.bfloat16 else stored.float(),), router_bias),
        correction=reader.floats(f"{at}.{e.names.correction}", (e.count,)) if e.correction else None,
        up=up,
        down=down,
        shared_up=reader.linear(shared_up, (1 + e.gated) * e.shared, hidden) if e.shared else None,
        shared_down=reader.linear((f"{shared}.{e.names.shared_down}",), hidden, e.shared) if e.shared else None,
        shared_gate=_shared_gate(reader, f"{shared}_gate.weight", hidden) if e.shared_gate else None,
        router_norm=None if scale is None else NormWeight(scale),
        expert_scales=None if b is None else reader.floats(f"{at}.{b.expert_scales}", (e.count,)),
    )


def _shared_gate(reader: TensorReader, name: str, hidden: int) -> Tensor:
    """Reads the gate of the shared expert: a matrix of one output, or a vector (GGUF)."""
    shape = (hidden,) if reader.get(name).ndim == 1 else (1, hidden)
    return reader.floats(name, shape).flatten()


def _stacks(reader: TensorReader, at: str, e: Experts, hidden: int) -> tuple[MatrixStack, MatrixStack]:
    """Returns gate and up, and down, of all experts, in the first layout whose tensors are there."""
    for joined, last in (("gate_up_proj", "down_proj"), ("input_linear.weight", "output_linear.weight")):
        if f"{at}.{joined}" in reader.weights:
            return _joined(reader, f"{at}.{joined}", f"{at}.{last}", e, hidden)
    if f"{at}.{e.names.down}.weight" in reader.weights:
        return _separate(reader, at, e, hidden)

    def up_parts(expert: int) -> tuple[Matrix, ...]:
        names = tuple(f"{at}.{expert}.{part}" for part in e.names.up)
        return reader.parts(names, (1 + e.gated) * e.intermediate, hidden)

    def down_parts(expert: int) -> tuple[Matrix, ...]:
        return (reader.matrix(f"{at}.{expert}.{e.names.down}", hidden, e.intermediate),)

    quantized = reader.quantize is not None
    return MatrixStack(e.count, up_parts, (), quantized), MatrixStack(e.count, down_parts, (), quantized)


def _joined(reader: TensorReader, up: str, down: str, e: Experts, hidden: int) -> tuple[MatrixStack, MatrixStack]:
    """Reads stacks of all experts with gate and up in one tensor: one below the other or, with biases, in turns."""
    joined = _Stack.of(reader, up, (e.count, 2 * e.intermediate, hidden), e.inputs_first)
    down_stack = _Stack.of(reader, down, (e.count, hidden, e.intermediate), e.inputs_first)
    inner = e.intermediate
    rows = (slice(0, None, 2), slice(1, None, 2)) if e.biased else (slice(0, inner), slice(inner, None))
    biases: tuple[Tensor, ...] = ()
    if e.biased:
        bias = reader.shaped(f"{up}_bias", (e.count, 2 * inner)).to(reader.dtype)
        biases = (bias[:, 0::2], bias[:, 1::2])
    return (
        joined.stack(*rows, biases=biases),
        down_stack.stack(slice(None), biases=_biases(reader, ((f"{down}_bias", hidden),), e)),
    )


def _separate(reader: TensorReader, at: str, e: Experts, hidden: int) -> tuple[MatrixStack, MatrixStack]:
    """Reads a stack of all experts for each of gate, up and down, or of up and down."""
    names = [f"{at}.{part}" for part in (*e.names.up, e.names.down)]
    sizes = [*[(e.intermediate, hidden)] * len(e.names.up), (hidden, e.intermediate)]
    stacks = [_Stack.of(reader, f"{name}.weight", (e.count, *size)) for name, size in zip(names, sizes, strict=True)]
    *up, down = (stack.stack(slice(None)) for stack in stacks)
    biases = _biases(reader, [(f"{name}.bias", size[0]) for name, size in zip(names, sizes, strict=True)], e)

    def up_parts(expert: int) -> tuple[Matrix, ...]:
        return as_one_kind(tuple(part for stack in up for part in stack.read(expert)), reader.dtype)

    return (
        MatrixStack(e.count, up_parts, biases[:-1], down.quantized),
        MatrixStack(e.count, down.read, biases[-1:], down.quantized),
    )


def _biases(reader: TensorReader, sizes: Iterable[tuple[str, int]], e: Experts) -> tuple[Tensor, ...]:
    if not e.biased:
        return ()
    return tuple(reader.shaped(name, (e.count, size)).to(reader.dtype) for name, size in sizes)


@dataclass(frozen=True, slots=True, eq=False)
class _Stack:
    """One tensor with the matrices of all experts, [experts, out, in]."""

    reader: TensorReader  # reads, and converts or quantizes
    name: str  # name of the tensor
    values: Tensor | None  # floats [experts, out, in]; None if they are quantized
    groups: Grouped | None  # quantized rows [experts * out, in]; or None
    shape: tuple[int, int, int]  # (experts, out, in)

    @staticmethod
    def of(reader: TensorReader, name: str, shape: tuple[int, int, int], inputs_first: bool = False) -> "_Stack":
        """Opens a tensor.

        Args:
            shape: (experts, out, in).
            inputs_first: whether floats are stored as [experts, in, out].
        """
        experts, out, inputs = shape
        groups = reader.groups(name)
        if groups is not None:
            if groups.shape != (experts * out, inputs):
                raise _misshapen(name, groups.shape, shape)
            return _Stack(reader, name, None, groups, shape)
        stored = reader.get(name)
        if stored.shape == (experts * out, inputs):
            stored = stored.view(shape)  # dequantized
        elif inputs_first and stored.shape == (experts, inputs, out):
            stored = stored.transpose(1, 2)
        if tuple(stored.shape) != shape:
            raise _misshapen(name, tuple(stored.shape), shape)
        return _Stack(reader, name, stored, None, shape)

    def stack(self, *rows: slice, biases: tuple[Tensor, ...] = ()) -> MatrixStack:
        """Returns the experts, each in one part per range of outputs."""
        experts = self.shape[0]

        def read(expert: int) -> tuple[Matrix, ...]:
            return tuple(self._part(expert, part) for part in rows)

        return MatrixStack(experts, read, biases, self.reader.quantize is not None)

    def _part(self, expert: int, rows: slice) -> Matrix:
        out = self.shape[1]
        if self.values is not None:
            return self.reader.made(self.name, self.values[expert, rows].contiguous())
        assert self.groups is not None
        first, last, step = rows.indices(out)
        whole = self.groups.part(expert * out, (expert + 1) * out)
        return whole.part(first, last) if step == 1 else whole.every(step, first)


def read_stack(reader: TensorReader, name: str, shape: tuple[int, int, int]) -> MatrixStack:
    """Reads one tensor with a matrix for each expert or head."""
    return _Stack.of(reader, name, shape).stack(slice(None))


def _misshapen(name: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> ModelLoadError:
    return ModelLoadError(f"{name} has the shape {stored}, but config.json says {shape}")

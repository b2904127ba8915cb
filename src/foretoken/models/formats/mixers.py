"""Reads the weights of token mixers other than attention on cached heads: recurrent ones, and latent attention."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.models.families.latent import LatentAttention
from foretoken.models.families.recurrence import Recurrence
from foretoken.models.formats.experts import read_stack
from foretoken.models.formats.quantize import Grouped, Int8, Matrix, floats
from foretoken.models.formats.reader import TensorReader
from foretoken.models.formats.weights import LatentWeights, LinearWeights, MatrixStack, NormWeight, RecurrentWeights


def slices(matrix: Matrix, ranges: Sequence[tuple[int, int]]) -> Iterator[Matrix]:
    for first, last in ranges:
        if isinstance(matrix, Grouped):
            yield matrix.part(first, last)
        elif isinstance(matrix, Int8):
            yield Int8(matrix.values[first:last], matrix.scales[first:last])
        else:
            yield matrix[first:last]


def read_delta(r: Recurrence, reader: TensorReader, at: str, hidden: int) -> RecurrentWeights[LinearWeights]:
    """Reads a layer of gated DeltaNet: of Qwen3.5, or of Qwen3-Next, which stores the rows of each head together."""
    exact = replace(reader, quantize=None)  # gates are few, and the state is sensitive to them
    if f"{at}in_proj_qkvz.weight" in reader.weights:
        joined = reader.matrix(f"{at}in_proj_qkvz", r.channels + r.out, hidden)
        into = tuple(slices(joined, delta_ranges(r)))
    else:
        into = reader.parts((f"{at}in_proj_qkv", f"{at}in_proj_z"), r.channels + r.out, hidden)
    if f"{at}in_proj_ba.weight" in reader.weights:
        joined_gates = floats(exact.matrix(f"{at}in_proj_ba", r.gates, hidden), reader.dtype)
        gates = torch.cat([joined_gates[first:last] for first, last in gate_ranges(r)])
    else:
        parts = [exact.matrix(f"{at}in_proj_{name}", r.value_heads, hidden) for name in "ba"]
        gates = torch.cat([floats(part, reader.dtype) for part in parts])
    return RecurrentWeights(
        into=LinearWeights(into),
        gates=LinearWeights((gates.contiguous(),)),
        conv=_taps(r, reader, f"{at}conv1d"),
        conv_bias=None,
        decay=_decay(r, reader, at),
        step_bias=reader.floats(f"{at}dt_bias", (r.value_heads,)),
        norm=reader.floats(f"{at}norm.weight", (r.value_dim,)),
        out=reader.linear((f"{at}out_proj",), hidden, r.out),
    )


def delta_ranges(r: Recurrence) -> list[tuple[int, int]]:
    """Returns the ranges of Qwen3-Next's rows, those of queries first, then of keys, values and gates.

    It stores, for each head of keys: query, key, the values that the head serves, and their gates.
    """
    values = r.value_heads // r.key_heads * r.value_dim
    sizes = (r.key_dim, r.key_dim, values, values)
    starts = [sum(sizes[:kind]) for kind in range(4)]
    heads = [head * sum(sizes) for head in range(r.key_heads)]
    return [(head + starts[kind], head + starts[kind] + sizes[kind]) for kind in range(4) for head in heads]


def gate_ranges(r: Recurrence) -> list[tuple[int, int]]:
    """Returns the ranges of Qwen3-Next's gates, betas first, then steps; it stores them by head of keys."""
    group = r.value_heads // r.key_heads
    return [
        ((2 * head + kind) * group, (2 * head + kind + 1) * group) for kind in range(2) for head in range(r.key_heads)
    ]


def mamba_ranges(r: Recurrence) -> list[tuple[int, int]]:
    """Returns the ranges of Mamba-2's rows of C, B, x and the gates of the output; those of steps are the last ones."""
    keys = r.key_heads * r.key_dim
    return [(2 * r.out + keys, 2 * r.out + 2 * keys), (2 * r.out, 2 * r.out + keys), (r.out, 2 * r.out), (0, r.out)]


def convolution_ranges(r: Recurrence) -> list[tuple[int, int]]:
    """Returns the ranges of LFM2's rows of the two factors of the input, and of the gates of the output."""
    return [(0, r.channels), (2 * r.channels, 3 * r.channels), (r.channels, 2 * r.channels)]


def read_mamba(r: Recurrence, reader: TensorReader, at: str, hidden: int) -> RecurrentWeights[LinearWeights]:
    """Reads a layer of Mamba-2, whose rows are gates of the output, x, B, C, and steps of heads."""
    name, exact, f = f"{at}in_proj", replace(reader, quantize=None), r.factors
    rows, order = r.channels + r.out + r.value_heads, mamba_ranges(r)
    factors = [f.input * factor for factor in (f.queries, f.keys, f.values)]  # multiplied into the taps
    steps = [(rows - r.value_heads, rows)]
    bias = reader.bias((name,), rows)
    channels = [(first - r.out, last - r.out) for first, last in order[:-1]]
    taps, conv_bias = _taps(r, reader, f"{at}conv1d"), f"{at}conv1d.bias"
    stored = reader.floats(conv_bias, (r.channels,)) if conv_bias in reader.weights else None
    (gates,) = slices(exact.matrix(name, rows, hidden), steps)
    step_bias = reader.floats(f"{at}dt_bias", (r.value_heads,))
    if bias is not None:
        step_bias += bias[rows - r.value_heads :].float() * f.step
        bias = bias if f.input == 1.0 else bias / f.input
    return RecurrentWeights(
        into=_in_order(reader.matrix(name, rows, hidden), bias, order),
        gates=LinearWeights((floats(gates, reader.dtype).contiguous(),)),
        conv=torch.cat([taps[:, a:b] * by for (a, b), by in zip(channels, factors, strict=True)], dim=1).contiguous(),
        conv_bias=None if stored is None else torch.cat([stored[first:last] for first, last in channels]),
        decay=_decay(r, reader, at),
        step_bias=step_bias,
        norm=reader.floats(f"{at}norm.weight", (r.out,)) if r.normed else None,
        out=reader.linear((f"{at}out_proj",), hidden, r.out),
        skip=reader.floats(f"{at}D", (r.value_heads,)),
    )


def read_convolution(r: Recurrence, reader: TensorReader, at: str, hidden: int) -> RecurrentWeights[LinearWeights]:
    """Reads a short convolution of LFM2, whose rows are gates of the input, gates of the output, and the input."""
    joined, conv_bias = reader.linear((f"{at}in_proj",), 3 * r.channels, hidden), f"{at}conv.bias"
    return RecurrentWeights(
        into=_in_order(joined.parts[0], joined.bias, convolution_ranges(r)),
        gates=None,
        conv=_taps(r, reader, f"{at}conv"),
        conv_bias=reader.floats(conv_bias, (r.channels,)) if conv_bias in reader.weights else None,
        decay=None,
        step_bias=None,
        norm=None,
        out=reader.linear((f"{at}out_proj",), hidden, r.out),
    )


def _in_order(matrix: Matrix, bias: Tensor | None, ranges: Sequence[tuple[int, int]]) -> LinearWeights:
    """Returns ranges of a matrix's outputs as one product."""
    ordered = None if bias is None else torch.cat([bias[first:last] for first, last in ranges])
    return LinearWeights(tuple(slices(matrix, ranges)), ordered)


def _decay(r: Recurrence, reader: TensorReader, at: str) -> Tensor:
    """Returns the decays of heads. Checkpoints store log(-decay), GGUF files the decays."""
    if f"{at}A" in reader.weights:
        return reader.floats(f"{at}A", (r.value_heads,))
    return reader.floats(f"{at}A_log", (r.value_heads,)).exp_().neg_()


def _taps(r: Recurrence, reader: TensorReader, name: str) -> Tensor:
    """Returns the weights of a convolution by distance; checkpoints store the farthest row first."""
    stored = reader.floats(f"{name}.weight", (r.channels, 1, r.window + 1))
    return stored[:, 0].flip(1).t().contiguous()


def read_latent(
    s: LatentAttention, heads: int, reader: TensorReader, at: str, hidden: int
) -> LatentWeights[LinearWeights, MatrixStack]:
    """Reads the layer whose attention has names below ``at``.

    The matrix from latents to keys and values is split by head, and its part for keys transposed; see ``_by_head``.
    Raises ModelLoadError if a tensor is missing or has the wrong shape.
    """
    wide, narrow, rank = heads * (s.plain + s.rotated), s.rank + s.rotated, s.query_rank
    first, last = f"{at}q_a_proj" if rank else f"{at}q_proj", f"{at}kv_a_proj_with_mqa"
    absorb, expand = _by_head(s, heads, reader, at)
    into = reader.parts((first, last), (rank or wide) + narrow, hidden)
    return LatentWeights(
        into=LinearWeights(into, _bias(reader, first, rank or wide, last, narrow)),
        query_norm=NormWeight(reader.norm(f"{at}q_a_layernorm", rank)) if rank else None,
        query_up=LinearWeights((reader.matrix(f"{at}q_b_proj", wide, rank),)) if rank else None,
        latent_norm=NormWeight(reader.norm(f"{at}kv_a_layernorm", s.rank)),
        absorb=absorb,
        expand=expand,
        out=reader.linear((f"{at}o_proj",), hidden, heads * s.value),
    )


def _by_head(s: LatentAttention, heads: int, reader: TensorReader, at: str) -> tuple[MatrixStack, MatrixStack]:
    """Returns ``LatentWeights.absorb`` and ``expand``.

    Checkpoints have them in one matrix, which is dequantized. GGUF files have a stack of each, the first transposed.
    """
    if f"{at}k_b_proj.weight" in reader.weights:
        return (
            read_stack(reader, f"{at}k_b_proj.weight", (heads, s.rank, s.plain)),
            read_stack(reader, f"{at}v_b_proj.weight", (heads, s.value, s.rank)),
        )
    name, exact = f"{at}kv_b_proj", replace(reader, quantize=None)
    joined = floats(exact.matrix(name, heads * (s.plain + s.value), s.rank), reader.dtype).unflatten(0, (heads, -1))

    def absorb(head: int) -> tuple[Matrix, ...]:
        return (reader.made(name, joined[head, : s.plain].t().contiguous()),)

    def expand(head: int) -> tuple[Matrix, ...]:
        return (reader.made(name, joined[head, s.plain :].contiguous()),)

    quantized = reader.quantize is not None
    return MatrixStack(heads, absorb, (), quantized), MatrixStack(heads, expand, (), quantized)


def _bias(reader: TensorReader, first: str, first_rows: int, last: str, last_rows: int) -> Tensor | None:
    """Returns the bias of the first product; one of its matrices may have none."""
    biases = reader.bias((first,), first_rows), reader.bias((last,), last_rows)
    if biases[0] is None and biases[1] is None:
        return None
    sizes = first_rows, last_rows
    return torch.cat(
        [torch.zeros(n, dtype=reader.dtype) if b is None else b for b, n in zip(biases, sizes, strict=True)]
    )

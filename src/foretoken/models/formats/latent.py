"""Reads the weights of latent attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foretoken.models.families.latent import LatentAttention
from foretoken.models.formats.experts import read_stack
from foretoken.models.formats.quantize import Matrix, floats
from foretoken.models.formats.reader import TensorReader
from foretoken.models.formats.weights import LatentWeights, LinearWeights, MatrixStack, NormWeight


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

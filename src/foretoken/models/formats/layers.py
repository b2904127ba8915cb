"""Reads a decoder's weights from a checkpoint, one layer at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.models.families.architecture import Architecture
from foretoken.models.families.experts import Beside
from foretoken.models.families.family import group_order
from foretoken.models.families.layers import Layer, LayerInputs, RecurrentMixer
from foretoken.models.formats.experts import read_experts
from foretoken.models.formats.memory import give_back, reuse_freed
from foretoken.models.formats.mixers import read_convolution, read_delta, read_latent, read_mamba, slices
from foretoken.models.formats.quantize import Matrix, Quantizer, floats
from foretoken.models.formats.reader import TensorReader, located, rows_of
from foretoken.models.formats.weight_files import converted
from foretoken.models.formats.weights import (
    BesideWeights,
    CrossAttentionWeights,
    DecoderLayer,
    DenseMlpWeights,
    Ends,
    ExpertWeights,
    LatentWeights,
    LayerInputEnds,
    LayerInputWeights,
    LayerWeights,
    LinearWeights,
    MatrixStack,
    NormWeight,
    RecurrentWeights,
    SelfAttentionWeights,
)

_Mlp = DenseMlpWeights[LinearWeights]
_Experts = ExpertWeights[LinearWeights, MatrixStack]
_Attention = SelfAttentionWeights[LinearWeights] | LatentWeights[LinearWeights, MatrixStack]


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint's tensors with the dtype to convert them to. quantize: quantizer of float matrices, or None."""

    weights: Mapping[str, Tensor]
    architecture: Architecture
    dtype: torch.dtype
    quantize: Quantizer | None = None

    @property
    def reader(self) -> TensorReader:
        a = self.architecture
        base, head = located(self.weights, a.names)
        return TensorReader(
            self.weights, self.dtype, self.quantize, a.norm_offset, a.names.transposed, base=base, head=head
        )


@dataclass(frozen=True, slots=True)
class Layers:
    """Iterates over all layers. Each is read when the iteration reaches it; another iteration reads it again."""

    source: Source

    def __iter__(self) -> Iterator[LayerWeights]:
        reuse_freed()
        for index in range(self.source.architecture.layers):
            yield read_layer(self.source, index)
            give_back(self.source.architecture.hidden)


def read_layer(source: Source, index: int) -> LayerWeights:
    """Reads layer ``index``. Raises ModelLoadError if a tensor is missing or has the wrong shape."""
    reader = source.reader
    return layer_at(source.architecture, reader, reader.base + source.architecture.names.layer.format(index), index)


def layer_at(a: Architecture, reader: TensorReader, at: str, index: int) -> LayerWeights:
    """Reads layer ``index`` of an architecture, whose names begin with ``at``."""
    names, layer = a.names, a.stack[index]
    beside = None if layer.experts is None else layer.experts.beside

    def norm(name: str, exists: bool) -> NormWeight | None:
        return _norm(a, reader, at + name) if exists else None

    return DecoderLayer(
        norm=norm(names.norm, layer.norms.mixer),
        attention=_attention(a, reader, at, layer) if layer.attention else None,
        recurrent=_recurrent(a, reader, at, layer.recurrent),
        cross=_cross(a, reader, at, layer) if names.cross else None,
        after_mixer=norm(names.after_mixer, layer.norms.after_mixer),
        mlp_norm=norm(names.mlp_norm if beside is None else beside.norm, layer.norms.mlp),
        mlp=_mlp(a, reader, at, layer),
        after_mlp=norm(names.after_mlp, layer.norms.after_mlp),
        beside=None if beside is None else _beside(a, reader, at, layer, beside),
        own_input=None if a.layer_inputs is None else _layer_input(reader, at, a.layer_inputs, a.hidden),
        scalar=1.0 if names.scalar is None else float(reader.floats(at + names.scalar, (1,))),
    )


def _recurrent(
    a: Architecture, reader: TensorReader, at: str, mixer: RecurrentMixer | None
) -> RecurrentWeights[LinearWeights] | None:
    if mixer is None or a.recurrence is None:
        return None
    read = {"delta": read_delta, "mamba": read_mamba, "convolution": read_convolution}[mixer]
    return read(a.recurrence, reader, at + a.names.recurrent, a.hidden)


def _attention(a: Architecture, reader: TensorReader, at: str, layer: Layer) -> _Attention:
    if a.latent is not None:
        return read_latent(a.latent, a.heads, reader, f"{at}self_attn.", a.hidden)
    names, sizes, shares = a.names, a.sizes(layer), layer.source is not None
    wide = a.heads * sizes.head_dim
    qkv, out = tuple(at + name for name in names.qkv_of(layer)), at + names.out
    rows = (1 + a.gated_attention) * wide + (0 if shares else sizes.numbers)
    weights, bias = reader.parts(qkv, rows, a.hidden), _attention_bias(a, reader, qkv, rows)
    if bias is not None:
        parts = bias[:, None].split([matrix.shape[0] for matrix in weights])
        bias = torch.cat([floats(part, reader.dtype) for part in in_runtime_order(a, parts, reader.dtype)]).flatten()
    return SelfAttentionWeights(
        qkv=LinearWeights(in_runtime_order(a, weights, reader.dtype), bias),
        q_norm=_head_norm(a, reader, at + names.q_norm, a.heads, layer),
        k_norm=None if shares else _head_norm(a, reader, at + names.k_norm, sizes.kv_heads, layer),
        v_norm=NormWeight(torch.ones(sizes.head_dim)) if a.unit_values and not shares else None,
        out=LinearWeights((reader.matrix(out, a.hidden, wide),), _attention_bias(a, reader, (out,), a.hidden)),
        sinks=reader.floats(f"{at}self_attn.sinks", (a.heads,)) if a.sinks else None,
        relative=_relative(a, reader, at),
    )


def _cross(a: Architecture, reader: TensorReader, at: str, layer: Layer) -> CrossAttentionWeights[LinearWeights]:
    queries, keys, values, out, name = (at + name for name in a.names.cross)
    wide, norm, first = a.heads * a.head_dim, _norm(a, reader, name), layer.norms.mixer
    return CrossAttentionWeights(
        norm=norm if first else None,
        queries=reader.linear((queries,), wide, a.hidden),
        keys_values=reader.linear((keys, values), 2 * wide, a.hidden),
        out=reader.linear((out,), a.hidden, wide),
        after=None if first else norm,
    )


def _relative(a: Architecture, reader: TensorReader, at: str) -> Tensor | None:
    """Returns a layer's biases by distance, or those of the first layer, [heads, distances]."""
    if a.relative is None:
        return None
    first = reader.base + a.names.layer.format(0)
    name = next((n for n in (at, first) if f"{n}{a.names.relative}.weight" in reader.weights), first)
    table = reader.floats(f"{name}{a.names.relative}.weight", (a.relative.count, a.heads))
    return table.T[:, a.relative.by_distance()].contiguous()


def in_runtime_order(a: Architecture, parts: tuple[Matrix, ...], dtype: torch.dtype) -> tuple[Matrix, ...]:
    """Returns the rows of queries, keys and values as ``SelfAttentionWeights.qkv`` has them.

    Args:
        parts: the matrices as they are stored.
        dtype: dtype of rows that have to be dequantized.
    """
    if a.gated_attention:
        parts = _gates_last(a, parts)
    return (rows_of(parts[0], group_order(a.heads, a.kv_heads, a.head_dim), dtype),) if a.names.by_group else parts


def _attention_bias(a: Architecture, reader: TensorReader, names: tuple[str, ...], rows: int) -> Tensor | None:
    bias = reader.bias(names, rows)
    return bias if bias is None or a.attention_input == 1.0 else bias / a.attention_input


def _gates_last(a: Architecture, parts: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    """Moves attention's gates from behind the queries of each head to behind the values."""
    queries, *others = parts
    gates = [(first + a.head_dim, first + 2 * a.head_dim) for first in range(0, queries.shape[0], 2 * a.head_dim)]
    return *slices(queries, [(first - a.head_dim, first) for first, _ in gates]), *others, *slices(queries, gates)


def _head_norm(a: Architecture, reader: TensorReader, name: str, heads: int, layer: Layer) -> NormWeight | None:
    """Returns the norm of queries or keys: one for all heads, one for each, or one of all of them together."""
    if a.head_norms is None or (a.unit_heads and layer.rope < 0):
        return None
    head_dim = a.sizes(layer).head_dim
    if a.weightless or a.unit_heads:
        return NormWeight(torch.ones(head_dim))
    listed = [f"{name}.norms.{head}" for head in range(heads)]
    if f"{listed[0]}.weight" in reader.weights:  # StableLM has a module for each head
        return NormWeight(torch.cat([reader.norm(head, head_dim) for head in listed]))
    shared = reader.get(f"{name}.weight").numel() == head_dim and a.head_norms != "all"
    return _norm(a, reader, name, head_dim if shared else heads * head_dim)


def _mlp(a: Architecture, reader: TensorReader, at: str, layer: Layer) -> _Mlp | _Experts | None:
    if layer.mlp is None:
        return None
    if layer.experts is not None:
        return read_experts(reader, at.removesuffix("."), layer.experts, a.hidden)
    return _dense(a, reader, at, layer)


def _beside(
    a: Architecture, reader: TensorReader, at: str, layer: Layer, names: Beside
) -> BesideWeights[LinearWeights]:
    return BesideWeights(
        norm=_norm(a, reader, at + a.names.mlp_norm),
        mlp=_dense(a, reader, at, replace(layer, mlp="gated")),
        after=_norm(a, reader, at + names.after),
        after_experts=_norm(a, reader, at + names.after_experts),
    )


def _dense(a: Architecture, reader: TensorReader, at: str, layer: Layer) -> _Mlp:
    inner = layer.inner or a.intermediate
    up = reader.halves(tuple(at + name for name in a.names.up))
    return DenseMlpWeights(
        up=reader.linear(up, inner * (2 if layer.mlp == "gated" else 1), a.hidden),
        down=reader.linear((at + a.names.down,), a.hidden, inner),
    )


def _layer_input(reader: TensorReader, at: str, s: LayerInputs, hidden: int) -> LayerInputWeights[LinearWeights]:
    return LayerInputWeights(
        gate=LinearWeights((reader.matrix(at + s.gate, s.width, hidden),)),
        up=LinearWeights((reader.matrix(at + s.up, hidden, s.width),)),
        norm=NormWeight(reader.norm(at + s.norm, hidden)),
    )


def _norm(a: Architecture, reader: TensorReader, name: str, size: int | None = None) -> NormWeight:
    """Returns a norm, with its bias if the checkpoint has one."""
    size = size or a.hidden
    if a.weightless:
        return NormWeight(torch.ones(size))
    bias = reader.floats(f"{name}.bias", (size,)) if f"{name}.bias" in reader.weights else None
    return NormWeight(reader.norm(name, size), bias)


def read_ends(source: Source, shared: Matrix | None = None) -> Ends:
    """Reads embedding, last norm and head. Raises ModelLoadError if a tensor is missing or has the wrong shape.

    shared: embedding of a stack that has no other one and no head; None reads both.
    """
    a, reader = source.architecture, source.reader
    names, base = a.names, reader.base
    embedding, head = (shared, shared) if shared is not None else _embedding(source, reader)
    return Ends(
        embedding=embedding,
        norm=_norm(a, reader, base + names.last_norm) if names.last_norm else None,
        head=head,
        head_bias=None if shared is not None else _head_bias(a, reader),
        positions=_positions(a, reader),
        embedding_norm=_norm(a, reader, base + names.embedding_norm) if names.embedding_norm else None,
        layer_inputs=None if a.layer_inputs is None else _layer_input_ends(a, reader, a.layer_inputs),
    )


def _embedding(source: Source, reader: TensorReader) -> tuple[Matrix, Matrix]:
    a = source.architecture
    name = reader.base + a.names.embedding
    stored: Matrix = reader.grouped(name) or reader.get(f"{name}.weight")
    reader.check((stored,), (name,), a.vocab, a.hidden)
    embedding = stored
    if isinstance(stored, Tensor):
        embedding = converted(f"{name}.weight", stored, source.dtype, copy=True)
    head, head_name = embedding, reader.head
    if not a.tied and any(f"{head_name}.{part}" in source.weights for part in ("weight", "_weight_qdata")):
        head = replace(reader, transposed=False).matrix(head_name, a.vocab, a.hidden)
    elif source.quantize is not None and isinstance(stored, Tensor):
        head = source.quantize(stored)
    return embedding, head


def _head_bias(a: Architecture, reader: TensorReader) -> Tensor | None:
    """Returns the bias of the head; None if it has none, or one of zeros (BART)."""
    if "final_logits_bias" not in reader.weights:
        return reader.bias((reader.head,), a.vocab)
    bias = reader.floats("final_logits_bias", (1, a.vocab)).flatten()
    return bias if bool(bias.any()) else None


def _layer_input_ends(a: Architecture, reader: TensorReader, s: LayerInputs) -> LayerInputEnds:
    name, width = f"{reader.base}{s.table}.weight", a.layers * s.width
    if (groups := reader.groups(name)) is not None and groups.shape == (a.vocab, width):
        table = groups.dequantize(reader.dtype)  # in parts
    else:
        table = converted(name, reader.shaped(name, (a.vocab, width)), reader.dtype, copy=True)
    return LayerInputEnds(
        table=table,
        projection=LinearWeights((reader.matrix(reader.base + s.projection, width, a.hidden),)),
        norm=NormWeight(reader.norm(reader.base + s.projection_norm, s.width)),
    )


def _positions(a: Architecture, reader: TensorReader) -> Tensor | None:
    """Returns the table of learned positions from the first position on."""
    if a.names.positions is None or a.learned_positions is None:
        return None
    name, first = f"{reader.base}{a.names.positions}.weight", a.learned_positions
    stored = reader.get(name)
    if stored.ndim != 2 or stored.shape[1] != a.hidden or stored.shape[0] < first + a.max_length:
        raise ModelLoadError(
            f"{name} has the shape {tuple(stored.shape)}, but config.json says at least "
            f"({first + a.max_length}, {a.hidden})"
        )
    return stored[first:].to(torch.float32, copy=True)

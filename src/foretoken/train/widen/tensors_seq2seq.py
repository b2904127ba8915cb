"""The tensors of a wider T5 that computes the same function. See ``widen.tensors`` for the method.

Encoder and decoder are rotated by the same Q, because they share the embedding. The cross-attention's keys and values
read the encoder's last norm, the output matrix reads the decoder's. Attention is not scaled by 1/sqrt(d), so it does
not depend on a width.

Position biases are one table per stack, in its first layer, with a column per head for all layers. Heads that cancel
must have equal columns. So the wide heads form groups, one per real head, that share its column, and additional heads
cancel within a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from foretoken.train.seq2seq import T5Shape
from foretoken.train.shards import ShardReader
from foretoken.train.widen.tensors import Copies, Widener, copies

Tensors = Iterator[tuple[str, torch.Tensor]]


def head_groups(heads: int, wide_heads: int, real: bool) -> tuple[Copies, tuple[int, ...]]:
    """Returns the source of each wide head, and its column of the position biases.

    Args:
        heads: Number of real heads.
        wide_heads: Number of wide heads.
        real: False for a layer of fillers.

    Raises:
        ValueError: A group of one head would have to cancel.
    """
    sources: list[int] = []
    factors: list[float] = []
    columns: list[int] = []
    filler = 0
    for j in range(heads):
        size = wide_heads // heads + (j < wide_heads % heads)
        group = copies(1 if real else 0, size, filler)
        sources += [j if s >= 0 else s for s in group.sources]
        factors += group.factors
        columns += [j] * size
        filler = max(filler, group.fillers)
    return Copies(tuple(sources), tuple(factors)), tuple(columns)


def tensors(
    reader: ShardReader, widener: Widener, config: dict[str, Any], shape: T5Shape, positions: dict[str, dict[int, int]]
) -> Tensors:
    """Yields all tensors of the wide model. positions: by stack, the real layer at each position."""
    embedding = reader.get("shared.weight")
    yield "shared.weight", widener.embedding(embedding)
    for stack, layers in (("encoder", shape.num_layers), ("decoder", shape.num_decoder_layers)):
        for at in range(layers):
            real = positions[stack].get(at)
            source = None if real is None else f"{stack}.block.{real}.layer."
            for name, tensor in _block(reader, widener, config, shape, source, stack == "decoder"):
                yield f"{stack}.block.{at}.layer.{name}", tensor
            if at == 0:
                name = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
                _, columns = head_groups(config["num_heads"], shape.num_heads, True)
                yield name, reader.get(name)[:, list(columns)]
        yield f"{stack}.final_layer_norm.weight", torch.ones(widener.wide)
    head = reader.get("lm_head.weight") if "lm_head.weight" in reader.names else embedding
    scale = config["d_model"] ** -0.5 if config["tie_word_embeddings"] else 1.0
    yield "lm_head.weight", widener.reads(head.double() * scale, reader.get("decoder.final_layer_norm.weight"))


def _block(
    reader: ShardReader, widener: Widener, config: dict[str, Any], shape: T5Shape, source: str | None, decoder: bool
) -> Tensors:
    """Yields the tensors of one wide block. source: prefix of the real block, None for a block of fillers."""
    unit = _Unit(reader, widener, source)
    heads, _ = head_groups(config["num_heads"], shape.num_heads, source is not None)
    neurons = copies(config["d_ff"] if source is not None else 0, shape.d_ff)
    yield from unit.attention("0.SelfAttention", "0.layer_norm.weight", None, heads, shape.d_kv)
    yield "0.layer_norm.weight", torch.ones(widener.wide)
    if decoder:
        encoder_norm = "encoder.final_layer_norm.weight"
        yield from unit.attention("1.EncDecAttention", "1.layer_norm.weight", encoder_norm, heads, shape.d_kv)
        yield "1.layer_norm.weight", torch.ones(widener.wide)
    last = 2 if decoder else 1
    for name in ("wi_0", "wi_1") if config["feed_forward_proj"].startswith("gated") else ("wi",):
        whole = f"{last}.DenseReluDense.{name}.weight"
        yield whole, unit.reads(whole, f"{last}.layer_norm.weight", neurons, 1)
    yield f"{last}.DenseReluDense.wo.weight", unit.writes(f"{last}.DenseReluDense.wo.weight", neurons, 1)
    yield f"{last}.layer_norm.weight", torch.ones(widener.wide)


class _Unit:
    """Widens the matrices of one block. Names are relative to ``source``. ``size`` is the rows or columns per unit."""

    def __init__(self, reader: ShardReader, widener: Widener, source: str | None) -> None:
        self.reader, self.widener, self.source = reader, widener, source

    def attention(self, name: str, norm: str, encoder_norm: str | None, heads: Copies, size: int) -> Tensors:
        """Yields q, k, v and o. Keys and values read the norm named ``encoder_norm``, if given."""
        yield f"{name}.q.weight", self.reads(f"{name}.q.weight", norm, heads, size)
        for kind in ("k", "v"):
            yield f"{name}.{kind}.weight", self.reads(f"{name}.{kind}.weight", norm, heads, size, encoder_norm)
        yield f"{name}.o.weight", self.writes(f"{name}.o.weight", heads, size)

    def reads(self, name: str, norm: str, which: Copies, size: int, encoder_norm: str | None = None) -> torch.Tensor:
        """Returns a matrix that reads the stream after a norm."""
        real = self._none(size)
        if self.source is not None:
            gain = self.reader.get(encoder_norm or self.source + norm)
            real = self.widener.reads(self.reader.get(self.source + name), gain).unflatten(0, (-1, size))
        filler = self.widener.filler_reads(which.fillers * size).unflatten(0, (-1, size))
        return which.gather(real.float(), filler).flatten(0, 1)

    def writes(self, name: str, which: Copies, size: int) -> torch.Tensor:
        """Returns a matrix that writes to the stream."""
        real = self._none(size)
        if self.source is not None:
            real = self.widener.writes(self.reader.get(self.source + name)).T.unflatten(0, (-1, size))
        filler = self.widener.filler_writes(which.fillers * size).unflatten(0, (-1, size))
        units = which.gather(real.float(), filler) * torch.tensor(which.factors).view(-1, 1, 1)
        return units.flatten(0, 1).T

    def _none(self, size: int) -> torch.Tensor:
        return torch.empty(0, size, self.widener.wide, dtype=torch.float64)

"""The tensors of a wider hybrid mixture of experts that computes the same function. See ``widen.stream``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.train.hybrid.shape import HybridShape
from foretoken.train.shards import ShardReader
from foretoken.train.widen.stream import WideStream
from foretoken.train.widen.tensors import Copies, copies, layer_positions, query_heads

Tensors = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class HybridWidener:
    """Widens the layers of a hybrid.

    Args:
        reader: The source's tensors.
        config: The source's config.json.
        shape: The wide size.
        stream: The wide stream.
        generator: Source of filler units.
        write_scale: Standard deviation of what filler units write.
        dtype: Of the experts, which are made one by one.
    """

    reader: ShardReader
    config: dict[str, Any]
    shape: HybridShape
    stream: WideStream
    generator: torch.Generator
    write_scale: float
    dtype: torch.dtype

    def tensors(self, mtp: bool) -> Tensors:
        """Yields all tensors. mtp: whether the source has an MTP layer."""
        vocab, get = self.config["vocab_size"], self.reader.get
        group = torch.randint(self.stream.groups, (vocab,), generator=self.generator)
        embedding = get("model.embed_tokens.weight")
        yield "model.embed_tokens.weight", self.stream.embedding(embedding, group)
        places = positions(self.config["num_hidden_layers"], self.shape.num_hidden_layers)
        real = {at: number for number, at in enumerate(places)}
        for at, kind in enumerate(self.shape.layer_types):
            source = f"model.layers.{real[at]}." if at in real else None
            for name, tensor in self._layer(source, kind):
                yield f"model.layers.{at}.{name}", tensor
        yield "model.norm.weight", self.stream.norm(get("model.norm.weight"), last=True)
        head = get("lm_head.weight") if "lm_head.weight" in self.reader.names else embedding
        yield "lm_head.weight", self.stream.reads(head)
        if mtp:
            yield from self._mtp(embedding)

    def _mtp(self, embedding: Tensor) -> Tensors:
        stream, get = self.stream, self.reader.get
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield f"mtp.{name}.weight", stream.norm(get(f"mtp.{name}.weight"))
        of_embedding, of_hidden = (stream.writes(stream.reads(part)) for part in get("mtp.fc.weight").chunk(2, dim=1))
        if stream.added:  # the layer's own stream has them at about their size, which a norm hardly notices
            typical = embedding.double().square().mean().sqrt().item() * stream.scale / math.sqrt(stream.ratio)
            of_embedding[-stream.added :, -stream.added :] = typical * torch.eye(stream.added)
        yield "mtp.fc.weight", torch.cat([of_embedding, of_hidden], dim=1)
        for name, tensor in self._layer("mtp.layers.0.", "full_attention"):
            yield f"mtp.layers.0.{name}", tensor
        yield "mtp.norm.weight", stream.norm(get("mtp.norm.weight"), last=True)

    def _layer(self, source: str | None, kind: str) -> Tensors:
        """Yields the tensors of one layer. source: prefix of the real layer, None for a layer of fillers."""
        for name in ("input_layernorm", "post_attention_layernorm"):
            weight = torch.zeros(self.stream.narrow) if source is None else self.reader.get(f"{source}{name}.weight")
            yield f"{name}.weight", self.stream.norm(weight)
        yield from self._delta(source) if kind == "linear_attention" else self._attention(source)
        yield from self._experts(source)
        shared = copies(
            self._real(source, "shared_expert_intermediate_size"), self.shape.shared_expert_intermediate_size
        )
        for name in ("gate_proj", "up_proj"):
            name = f"mlp.shared_expert.{name}.weight"
            yield name, self._reads(self._get(source, name), shared, 1)
        name = "mlp.shared_expert.down_proj.weight"
        yield name, self._writes(self._get(source, name), shared, 1)
        name = "mlp.shared_expert_gate.weight"
        yield name, self._reads(self._get(source, name), Copies((0 if source else -1,), (1.0,)), 1)

    def _attention(self, source: str | None) -> Tensors:
        size, shape = self.config["head_dim"], self.shape
        heads, groups = self._real(source, "num_attention_heads"), self._real(source, "num_key_value_heads")
        queries = query_heads(heads, groups, shape.num_attention_heads, shape.num_key_value_heads)
        keys = _padded(groups, shape.num_key_value_heads)
        for part, which, rows in (("q", queries, 2 * size), ("k", keys, size), ("v", keys, size)):
            name = f"self_attn.{part}_proj.weight"
            yield name, self._reads(self._get(source, name), which, rows)
        name = "self_attn.o_proj.weight"
        yield name, self._writes(self._get(source, name), queries, size)
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            yield name, torch.zeros(size) if source is None else self.reader.get(source + name)

    def _delta(self, source: str | None) -> Tensors:
        keys_dim, values_dim, shape = (
            self.config["linear_key_head_dim"],
            self.config["linear_value_head_dim"],
            self.shape,
        )
        key_heads, heads = self._real(source, "linear_num_key_heads"), self._real(source, "linear_num_value_heads")
        keys = _padded(key_heads, shape.linear_num_key_heads)
        values = query_heads(heads, key_heads, shape.linear_num_value_heads, shape.linear_num_key_heads)
        parts = ((keys, keys_dim), (keys, keys_dim), (values, values_dim))
        channels = [key_heads * keys_dim, key_heads * keys_dim, heads * values_dim]
        joined, taps = (self._get(source, f"linear_attn.{n}.weight") for n in ("in_proj_qkv", "conv1d"))
        rows = [None] * 3 if joined is None else joined.split(channels)
        yield (
            "linear_attn.in_proj_qkv.weight",
            torch.cat([self._reads(part, *which) for part, which in zip(rows, parts, strict=True)]),
        )
        rows = [None] * 3 if taps is None else taps[:, 0].split(channels)
        width = self.config["linear_conv_kernel_dim"]
        yield (
            "linear_attn.conv1d.weight",
            torch.cat([self._gathered(part, *which, width) for part, which in zip(rows, parts, strict=True)])[:, None],
        )
        for part, rows_of_head in (("z", values_dim), ("b", 1), ("a", 1)):
            name = f"linear_attn.in_proj_{part}.weight"
            yield name, self._reads(self._get(source, name), values, rows_of_head)
        for part in ("dt_bias", "A_log"):
            given = self._get(source, f"linear_attn.{part}")
            yield f"linear_attn.{part}", self._gathered(None if given is None else given[:, None], values, 1, 1)[:, 0]
        name = "linear_attn.norm.weight"
        yield name, torch.ones(values_dim) if source is None else self.reader.get(source + name)
        name = "linear_attn.out_proj.weight"
        yield name, self._writes(self._get(source, name), values, values_dim)

    def _experts(self, source: str | None) -> Tensors:
        shape, stream = self.shape, self.stream
        count, units = (
            shape.num_experts,
            copies(self._real(source, "moe_intermediate_size"), shape.moe_intermediate_size),
        )
        router, joined, down = (
            self._get(source, f"mlp.{name}") for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
        )
        if router is None:
            yield "mlp.gate.weight", self._random(count, stream.wide) / math.sqrt(stream.wide)
        else:
            rows = stream.reads(router).repeat(stream.groups, 1)
            if stream.added:
                group = torch.arange(count) // len(router)
                rows[torch.arange(count), stream.wide - stream.added + group] = -stream.penalty
            yield "mlp.gate.weight", rows
        ups, downs = [], []
        for number in range(count):
            real = None if joined is None else joined[number % len(joined)]
            halves = [None, None] if real is None else real.chunk(2)
            ups.append(torch.cat([self._reads(half, units, 1) for half in halves]).to(self.dtype))
            own = None if down is None else down[number % len(down)]
            downs.append(self._writes(own, units, 1).to(self.dtype))
        yield "mlp.experts.gate_up_proj", torch.stack(ups)
        yield "mlp.experts.down_proj", torch.stack(downs)

    def _real(self, source: str | None, name: str) -> int:
        """Returns the source's number of units, none in a layer of fillers."""
        return int(self.config[name]) if source is not None else 0

    def _get(self, source: str | None, name: str) -> Tensor | None:
        return None if source is None else self.reader.get(source + name)

    def _reads(self, weight: Tensor | None, which: Copies, size: int) -> Tensor:
        """Returns the rows of wide units, ``size`` of each, that read the stream behind a norm."""
        real = None if weight is None else self.stream.reads(weight)
        return self._gathered(real, which, size, self.stream.wide, 1 / math.sqrt(self.stream.wide))

    def _writes(self, weight: Tensor | None, which: Copies, size: int) -> Tensor:
        """Returns the columns of wide units, ``size`` of each, that write to the stream."""
        real = None if weight is None else self.stream.writes(weight).T
        units = self._gathered(real, which, size, self.stream.wide, self.write_scale)
        units = units.unflatten(0, (-1, size)) * torch.tensor(which.factors).view(-1, 1, 1)
        out = units.flatten(0, 1).T
        if self.stream.added:
            out[-self.stream.added :] = 0.0
        return out

    def _gathered(self, real: Tensor | None, which: Copies, size: int, width: int, deviation: float = 1.0) -> Tensor:
        """Returns rows [units * size, width] in the order of the wide units; fillers are random."""
        given = torch.empty(0, size, width) if real is None else real.float().unflatten(0, (-1, size))
        filler = self._random(which.fillers * size, width).unflatten(0, (-1, size)) * deviation
        return which.gather(given, filler).flatten(0, 1)

    def _random(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self.generator)


def _padded(heads: int, wide: int) -> Copies:
    """Returns the sources of heads of keys: the real ones first, then fillers."""
    return Copies(tuple(j if j < heads else heads - 1 - j for j in range(wide)), ())


def positions(layers: int, wide_layers: int) -> list[int]:
    """Returns the positions of the real layers. Blocks of four, three of which are recurrent, stay together."""
    blocks = layer_positions(-(-layers // 4), -(-wide_layers // 4))
    return [4 * blocks[layer // 4] + layer % 4 for layer in range(layers)]

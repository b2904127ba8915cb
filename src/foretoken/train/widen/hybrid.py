"""Widening of hybrid mixtures of experts: usual sizes, checks, tensors, and the residual stream.

The stream differs from the rotated stream of a Llama (``widen.units``) in three respects.

Norms. The MTP layer normalizes the output of the last norm once more, so a norm's weight cannot move into the matrices
that read it. Each dimension of the narrow stream therefore maps to separate wide dimensions: the rows of Q have
disjoint supports, and a norm's weight is repeated along them.

Experts. They are copied in groups, and the router must choose within one group what it chose before. The stream gets
one more dimension per group, a mark: 0 in the group of the row's token, c in all others. Embeddings write it and no
layer changes it. The routers subtract a large multiple of it, so that experts of other groups lose, and the scores
within the group stay equal to the bit. The experts that are read so depend on the tokens, as in a large model.

Scale. The marks have the same sum of squares in every row, (groups - 1) c^2. With the stream scaled by s, a norm
divides by sqrt((s^2 |x|^2 + (groups - 1) c^2) / h' + eps), which is s sqrt(h/h') sqrt(|x|^2 / h + eps) if
(groups - 1) c^2 = (s^2 - h'/h) h eps. So eps stays, also that of the norms of heads.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.reader import TensorReader
from foretoken.train.hybrid import HybridModel
from foretoken.train.shapes import HybridShape
from foretoken.train.widen.units import (
    CheckpointPlan,
    Copies,
    Tensors,
    UnitWidener,
    check_embedding,
    check_growth,
    check_unquantized,
    check_wide_groups,
    copies,
    filler_scale,
    key_heads,
    layer_positions,
    query_heads,
)

_MAX_RMS = 100.0  # of a row of the narrow stream; up to it, other groups lose by more than this many nats


@dataclass(frozen=True)
class MarkedStream:
    """The wide residual stream."""

    owner: Tensor  # the narrow dimension of each wide one, int64 [h' - added]
    values: Tensor  # its factor, float64 [h' - added]
    narrow: int  # h
    groups: int  # groups of experts; several groups add one dimension each
    eps: float  # of the norms

    @staticmethod
    def random(narrow: int, wide: int, groups: int, eps: float, generator: torch.Generator) -> "MarkedStream":
        carried = wide - (groups if groups > 1 else 0)
        owner = torch.randperm(carried, generator=generator) % narrow
        values = torch.randn(carried, dtype=torch.float64, generator=generator)
        squares = torch.zeros(narrow, dtype=torch.float64).index_add_(0, owner, values**2)
        return MarkedStream(owner, values / squares.sqrt()[owner], narrow, groups, eps)

    @property
    def added(self) -> int:
        """Number of added dimensions, which are the last ones."""
        return self.groups if self.groups > 1 else 0

    @property
    def wide(self) -> int:
        return len(self.owner) + self.added

    @property
    def ratio(self) -> float:
        return self.wide / self.narrow

    @property
    def scale(self) -> float:
        """s: a power of two if dimensions are added."""
        minimum = math.sqrt(self.ratio)
        return 2.0 ** math.ceil(math.log2(1.05 * minimum)) if self.added else minimum

    @property
    def mark(self) -> float:
        return math.sqrt((self.scale**2 - self.ratio) * self.narrow * self.eps / (self.groups - 1))

    @property
    def penalty(self) -> float:
        """The multiple of the marks that the routers subtract."""
        normed_mark = self.mark * math.sqrt(self.ratio) / (self.scale * _MAX_RMS)
        return 2.0 ** math.ceil(math.log2(_MAX_RMS / normed_mark))

    def spread(self, weight: Tensor) -> Tensor:
        """Returns [n, h] as [n, h'] whose product with x Q is that of ``weight`` with x."""
        carried = weight.double()[..., self.owner] * self.values
        return F.pad(carried, (0, self.added))

    def embedding(self, weight: Tensor, group: Tensor) -> Tensor:
        """Returns embeddings [V, h'] of tokens whose experts' groups are ``group`` [V]."""
        out = self.scale * self.spread(weight)
        if self.added:
            out[:, -self.added :] = self.mark
            out[torch.arange(len(out)), out.shape[1] - self.added + group] = 0.0
        return out

    def reads(self, weight: Tensor, norm: Tensor | None = None) -> Tensor:
        """Widens a matrix [n, h] after a norm, whose weight stays in the norm."""
        return self.spread(weight) / math.sqrt(self.ratio)

    def writes(self, weight: Tensor) -> Tensor:
        """Widens a matrix [h, n] that writes to the stream."""
        return self.scale * self.spread(weight.T).T

    def norm(self, weight: Tensor, last: bool = False) -> Tensor:
        """Repeats a norm's weight [h]. ``last``: another norm reads its output, so that the marks become 0."""
        return torch.cat([weight.double()[self.owner], torch.full((self.added,), -1.0 if last else 0.0)])


# Hidden size, layers, experts, units of an expert and of the shared one. Heads follow from their size.
PRESETS = {
    "0.5b-a0.1b": (1024, 8, 64, 256, 256),
    "3b-a0.5b": (2048, 16, 64, 384, 512),
}
USUAL = "3b-a0.5b"
SHAPE = HybridShape
_FIXED = ("head_dim", "linear_head_dim", "num_experts_per_tok", "max_position_embeddings")  # sizes of the source


def like(name: str, head_dim: int) -> HybridShape:
    """Returns the shape of a usual hybrid.

    Args:
        name: A key of ``PRESETS``: all parameters, and those that a row reads.
        head_dim: Width of a head.
    """
    hidden, layers, experts, units, shared = PRESETS[name]
    heads = hidden // head_dim
    return HybridShape(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads // 2,
        num_key_value_heads=max(1, heads // 8),
        head_dim=head_dim,
        linear_num_key_heads=heads // 2,
        linear_num_value_heads=heads,
        linear_head_dim=head_dim,
        num_experts=experts,
        moe_intermediate_size=units,
        shared_expert_intermediate_size=shared,
    )


def checked(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a hybrid. Raises InvalidRequest for one that cannot be widened."""
    check_unquantized(config)
    if config["linear_key_head_dim"] != config["linear_value_head_dim"]:
        raise InvalidRequest("cannot widen a hybrid whose linear keys and values have other sizes")
    if HybridShape.of(config).layer_types != config["layer_types"]:
        raise InvalidRequest("cannot widen a hybrid unless every fourth layer, and no other, has full attention")
    return config


def fitted(shape: HybridShape, config: dict[str, Any]) -> HybridShape:
    """Returns ``shape`` with the source's sizes of heads, positions, and experts of a token."""
    narrow = HybridShape.of(config)
    return replace(shape, **{name: getattr(narrow, name) for name in _FIXED})


def plan(reader: TensorReader, config: dict[str, Any], shape: HybridShape, seed: int) -> CheckpointPlan:
    """Returns the checkpoint of a hybrid of ``shape`` that computes the same as the source."""
    _check(config, shape)
    check_embedding(reader, "model.embed_tokens.weight", config["vocab_size"], config["hidden_size"])
    generator = torch.Generator().manual_seed(seed)
    groups = shape.num_experts // config["num_experts"]
    stream = MarkedStream.random(config["hidden_size"], shape.hidden_size, groups, config["rms_norm_eps"], generator)
    scale = stream.scale * filler_scale(shape.num_hidden_layers)
    dtype, mtp = reader.get("model.embed_tokens.weight").dtype, "mtp.fc.weight" in reader.weights
    widener = HybridWidener(reader, stream, generator, scale, config, shape, dtype)
    return CheckpointPlan(
        parameters=expected_parameters(config, shape, mtp),
        dtype=dtype,
        config=wide_config(config, shape),
        layers=positions(config["num_hidden_layers"], shape.num_hidden_layers),
        tensors=widener.tensors(mtp),
    )


def wide_config(config: dict[str, Any], shape: HybridShape) -> dict[str, Any]:
    """Returns the source's config with the new sizes. Tokens, rotary settings and the eps of norms stay."""
    sizes = {name: size for name, size in asdict(shape).items() if name in config}
    return config | sizes | {"layer_types": shape.layer_types, "tie_word_embeddings": False}


def expected_parameters(config: dict[str, Any], shape: HybridShape, mtp: bool) -> int:
    with torch.device("meta"):
        model = HybridModel(wide_config(config, shape))
    counted = sum(p.numel() for name, p in model.named_parameters() if mtp or not name.startswith("mtp."))
    return counted + int(config["vocab_size"]) * shape.hidden_size  # the vocabulary head


def _check(config: dict[str, Any], shape: HybridShape) -> None:
    narrow = HybridShape.of(config)
    check_growth(shape, vars(narrow))
    for name in _FIXED:
        if getattr(shape, name) != getattr(narrow, name):
            raise InvalidRequest(f"{name} {getattr(shape, name)} is not the source's {getattr(narrow, name)}; it stays")
    for wide, size, unit in (
        (shape.num_experts, narrow.num_experts, "experts"),
        (shape.num_hidden_layers, 4, "layers, since every fourth has attention"),
    ):
        if wide % size:
            raise InvalidRequest(f"{wide} is not a multiple of {size} {unit}")
    groups = shape.num_experts // narrow.num_experts
    if groups > 1 and shape.hidden_size < narrow.hidden_size + groups:
        raise InvalidRequest(
            f"hidden_size {shape.hidden_size} leaves no dimensions for the marks that choose the experts"
        )
    deeper = shape.num_hidden_layers > narrow.num_hidden_layers
    for heads, keys in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        wide_heads, narrow_heads = ((getattr(model, heads), getattr(model, keys)) for model in (shape, narrow))
        check_wide_groups(wide_heads, narrow_heads, deeper)


@dataclass(frozen=True)
class HybridWidener(UnitWidener):
    """Widens the layers of a hybrid."""

    stream: MarkedStream
    config: dict[str, Any]  # the source's config.json
    shape: HybridShape  # the wide size
    dtype: torch.dtype  # of the experts, which are made one by one

    def tensors(self, mtp: bool) -> Tensors:
        """Yields all tensors. mtp: whether the source has an MTP layer."""
        vocab, get = self.config["vocab_size"], self.reader.get
        group = torch.randint(self.stream.groups, (vocab,), generator=self.generator)
        embedding = get("model.embed_tokens.weight")
        yield "model.embed_tokens.weight", self.stream.embedding(embedding, group)
        layers = positions(self.config["num_hidden_layers"], self.shape.num_hidden_layers)
        real = {at: number for number, at in enumerate(layers)}
        for at, kind in enumerate(self.shape.layer_types):
            source = f"model.layers.{real[at]}." if at in real else None
            for name, tensor in self._layer(source, kind):
                yield f"model.layers.{at}.{name}", tensor
        yield "model.norm.weight", self.stream.norm(get("model.norm.weight"), last=True)
        head = get("lm_head.weight") if "lm_head.weight" in self.reader.weights else embedding
        yield "lm_head.weight", self.stream.reads(head)
        if mtp:
            yield from self._mtp(embedding)

    def _mtp(self, embedding: Tensor) -> Tensors:
        stream, get = self.stream, self.reader.get
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield f"mtp.{name}.weight", stream.norm(get(f"mtp.{name}.weight"))
        embedding_fc, hidden_fc = (stream.writes(stream.reads(half)) for half in get("mtp.fc.weight").chunk(2, dim=1))
        if stream.added:  # the layer's stream has the marks at about their size, which a norm hardly notices
            typical = embedding.double().square().mean().sqrt().item() * stream.scale / math.sqrt(stream.ratio)
            embedding_fc[-stream.added :, -stream.added :] = typical * torch.eye(stream.added)
        yield "mtp.fc.weight", torch.cat([embedding_fc, hidden_fc], dim=1)
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
        units = self.shape.shared_expert_intermediate_size
        shared = copies(self._real(source, "shared_expert_intermediate_size"), units)
        gate, up, down = ((f"mlp.shared_expert.{name}_proj.weight", shared, 1) for name in ("gate", "up", "down"))
        yield from self.block(source, [gate, up], down)
        name = "mlp.shared_expert_gate.weight"
        yield name, self.reads(self.get(source, name), Copies((0 if source else -1,)), 1)

    def _attention(self, source: str | None) -> Tensors:
        size, shape = self.config["head_dim"], self.shape
        heads, groups = self._real(source, "num_attention_heads"), self._real(source, "num_key_value_heads")
        queries = query_heads(heads, groups, shape.num_attention_heads, shape.num_key_value_heads)
        keys = key_heads(groups, shape.num_key_value_heads)
        inputs = [("q", queries, 2 * size), ("k", keys, size), ("v", keys, size)]
        matrices = [(f"self_attn.{part}_proj.weight", units, rows) for part, units, rows in inputs]
        yield from self.block(source, matrices, ("self_attn.o_proj.weight", queries, size))
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            yield name, torch.zeros(size) if source is None else self.reader.get(source + name)

    def _delta(self, source: str | None) -> Tensors:
        keys_dim, values_dim = self.config["linear_key_head_dim"], self.config["linear_value_head_dim"]
        shape, width = self.shape, self.config["linear_conv_kernel_dim"]
        groups, heads = self._real(source, "linear_num_key_heads"), self._real(source, "linear_num_value_heads")
        keys = key_heads(groups, shape.linear_num_key_heads)
        values = query_heads(heads, groups, shape.linear_num_value_heads, shape.linear_num_key_heads)
        blocks = ((keys, keys_dim), (keys, keys_dim), (values, values_dim))
        channels = [groups * keys_dim, groups * keys_dim, heads * values_dim]
        joined, taps = (self.get(source, f"linear_attn.{n}.weight") for n in ("in_proj_qkv", "conv1d"))
        rows = [None] * 3 if joined is None else joined.split(channels)
        wide = torch.cat([self.reads(row, *block) for row, block in zip(rows, blocks, strict=True)])
        yield "linear_attn.in_proj_qkv.weight", wide
        rows = [None] * 3 if taps is None else taps[:, 0].split(channels)
        wide = torch.cat([self.gathered(row, *block, width) for row, block in zip(rows, blocks, strict=True)])
        yield "linear_attn.conv1d.weight", wide[:, None]
        for part, rows_of_head in (("z", values_dim), ("b", 1), ("a", 1)):
            name = f"linear_attn.in_proj_{part}.weight"
            yield name, self.reads(self.get(source, name), values, rows_of_head)
        for part in ("dt_bias", "A_log"):
            given = self.get(source, f"linear_attn.{part}")
            yield f"linear_attn.{part}", self.gathered(None if given is None else given[:, None], values, 1, 1)[:, 0]
        name = "linear_attn.norm.weight"
        yield name, torch.ones(values_dim) if source is None else self.reader.get(source + name)
        name = "linear_attn.out_proj.weight"
        yield name, self.writes(self.get(source, name), values, values_dim)

    def _experts(self, source: str | None) -> Tensors:
        shape, stream = self.shape, self.stream
        count = shape.num_experts
        units = copies(self._real(source, "moe_intermediate_size"), shape.moe_intermediate_size)
        router, joined, down = (
            self.get(source, f"mlp.{name}") for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
        )
        if router is None:
            yield "mlp.gate.weight", self.random(count, stream.wide) / math.sqrt(stream.wide)
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
            ups.append(torch.cat([self.reads(half, units, 1) for half in halves]).to(self.dtype))
            expert = None if down is None else down[number % len(down)]
            downs.append(self.writes(expert, units, 1).to(self.dtype))
        yield "mlp.experts.gate_up_proj", torch.stack(ups)
        yield "mlp.experts.down_proj", torch.stack(downs)

    def _real(self, source: str | None, name: str) -> int:
        """Returns the source's number of units, none in a layer of fillers."""
        return int(self.config[name]) if source is not None else 0

    def writes(self, weight: Tensor | None, units: Copies, size: int) -> Tensor:
        out = super().writes(weight, units, size)
        if self.stream.added:
            out[-self.stream.added :] = 0.0
        return out


def positions(layers: int, wide_layers: int) -> list[int]:
    """Returns the positions of the real layers. Blocks of four, three of which are recurrent, stay together."""
    blocks = layer_positions(-(-layers // 4), -(-wide_layers // 4))
    return [4 * blocks[layer // 4] + layer % 4 for layer in range(layers)]

"""The architecture that a config.json describes, with the defaults of its family made explicit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.models.families import fields
from foretoken.models.families.config import NAMED_ACTIVATIONS, Activation, head_dim_of, read, rotary, stack
from foretoken.models.families.family import FULL, SLIDING, HeadNorms, TensorNames
from foretoken.models.families.latent import LatentAttention
from foretoken.models.families.layers import BranchFactors, HeadSizes, Layer, LayerInputs
from foretoken.models.families.recurrence import Recurrence
from foretoken.models.families.rope import computes_rope, rope_settings
from foretoken.models.families.table import FAMILIES


@dataclass(frozen=True, slots=True)
class Alibi:
    """Attention biases by distance (2108.12409): factor * slope * (position of the key - position of the row)."""

    slopes: tuple[float, ...]  # one for each head
    factor: float = 1.0  # factor of all biases
    rounded: bool = False  # whether slope * position is rounded to bfloat16 (Falcon)

    def table(self, positions: int) -> Tensor:
        """Returns the biases of positions before differences are taken, float32 [heads, positions]."""
        at = torch.arange(positions).float()
        if self.rounded:
            return (torch.tensor(self.slopes).bfloat16().float()[:, None] * at).bfloat16().float() * self.factor
        return torch.tensor(self.slopes)[:, None] * at * self.factor


@dataclass(frozen=True, slots=True)
class RelativeBuckets:
    """T5's relative positions (1910.10683): the attention bias of a pair is that of the bucket of its distance."""

    count: int  # number of buckets
    farthest: int  # distance beyond which all distances share a bucket
    both_ways: bool  # whether rows see keys after them (encoder); in a decoder such distances count as 0

    def by_distance(self) -> Tensor:
        """Returns the bucket of every distance key - query from -farthest to farthest, int64 [2 farthest + 1].

        Half of the buckets of a direction hold one distance each; the others grow logarithmically with the distance.
        """
        count, distance = self.count, torch.arange(-self.farthest, self.farthest + 1)
        ahead = torch.zeros_like(distance)
        if self.both_ways:
            count //= 2
            ahead = (distance > 0).long() * count
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = count // 2
        # the same float32 operations as in transformers, because rounding decides the edges of buckets
        far = torch.log(distance.float() / exact) / math.log(self.farthest / exact) * (count - exact)
        return ahead + torch.where(distance < exact, distance, (exact + far.long()).clamp(max=count - 1))


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries are multiplied by 1 + factor * log(1 + floor((position + ahead) / length)).

    unrotated: whether only layers without rotation do so.
    """

    factor: float
    length: int
    ahead: int = 0
    unrotated: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Architecture:
    """A decoder: a stack of layers (``Layer``), and what all of them share."""

    family: str  # ``model_type`` of config.json
    hidden: int  # width of the residual stream
    heads: int  # number of query heads
    kv_heads: int  # number of heads of keys and values, unless a layer has ``sizes``
    head_dim: int  # width of a head, unless a layer has ``sizes``
    intermediate: int  # width of an MLP, unless a layer has ``inner``
    stack: tuple[Layer, ...]  # the layers
    vocab: int  # rows of the embedding
    eps: float  # is added to the variance in norms
    activation: Activation  # activation of MLPs
    scale: float  # scores = scale * (queries . keys)
    max_length: int  # maximum length of a sequence in tokens
    attention_softcap: float = 0.0  # scores = cap * tanh(scores / cap); 0 for none
    final_softcap: float = 0.0  # the same for logits
    embedding_scale: float = 1.0  # embeddings are multiplied by it, rounded to the model's dtype
    norm_offset: float = 0.0  # is added to stored norm weights: Gemma stores weight - 1
    # rotary frequencies, float32 [rotated elements of a head / 2] each; ``Layer.rope`` is an index
    frequencies: tuple[Tensor, ...] = ()
    tied: bool = False  # whether the embedding is the vocabulary head
    centered: bool = False  # whether norms subtract the mean (layer norm); otherwise RMS norms
    # norms of queries and keys: of each head before or after its rotation, of all heads as one row before it, or None
    head_norms: HeadNorms | None = None
    factors: BranchFactors = field(default_factory=BranchFactors)  # factors of additions to the residual stream
    # factor of attention's input; scores and ``factors`` include it, so biases are divided by it
    attention_input: float = 1.0
    gate_factor: float = 1.0  # factor of an MLP's gate before its activation
    logit_scale: float = 1.0  # factor of the logits, before their cap
    clip: float = 0.0  # queries, keys and values are clipped to [-clip, clip]; 0 for no bound
    paired: bool = False  # whether elements 2i and 2i + 1 of a head are rotated together; otherwise i and i + half
    rotary_scales: tuple[float, ...] = ()  # factor of cosines and sines, by index in ``frequencies``; empty for 1
    alibi: Alibi | None = None  # attention biases by distance; None for none
    query_growth: QueryGrowth | None = None  # factor of queries by position; None for none
    # row of the first position in the table of learned positions; None without a table
    learned_positions: int | None = None
    names: TensorNames = field(default_factory=TensorNames)  # names of the checkpoint's tensors
    weightless: bool = False  # whether the checkpoint has no weights of norms, which are then 1
    unit_heads: bool = False  # whether norms of heads have no weights, and are only in layers with rotation (Llama 4)
    # whether attention's output is multiplied by the sigmoid of a gate before its last matrix
    gated_attention: bool = False
    recurrence: Recurrence | None = None  # sizes of the recurrent layers; None if there are none
    sinks: bool = False  # whether each head's softmax counts one more key, without a value (gpt-oss)
    # whether norms after mixers and MLPs norm the residual stream (BART); otherwise the addition to it
    norm_sums: bool = False
    relative: RelativeBuckets | None = None  # T5's relative positions; None for none
    # sizes of latent attention, in which ``head_dim`` is the width of the only key; None for other attention
    latent: LatentAttention | None = None
    unit_values: bool = False  # whether each head of values is normed, without weights (Gemma 4)
    layer_inputs: LayerInputs | None = None  # inputs of single layers beside the residual stream; None for none
    multiplied: bool = False  # whether factors of the family are in the stored weights (Falcon-H1 in GGUF files)

    def sizes(self, layer: Layer) -> HeadSizes:
        return layer.sizes or HeadSizes(self.kv_heads, self.head_dim)

    @property
    def kv_numbers(self) -> int:
        """Elements of one token in the KV cache of all layers. Layers that read another layer's have none."""
        return sum(
            self.head_dim if self.latent is not None else self.sizes(layer).numbers
            for layer in self.stack
            if layer.attention and layer.source is None
        )

    @property
    def kv_scales(self) -> int:
        """Scales of one token in an int8 KV cache of all layers: one for a head's keys and one for its values."""
        return sum(2 * self.sizes(layer).kv_heads for layer in self.stack if layer.attention and layer.source is None)

    def cache_at(self, number: int) -> int:
        """Returns the offset in the KV cache of layer ``number``, in elements per token."""
        return self._before(number).kv_numbers

    def scales_at(self, number: int) -> int:
        """Returns the offset among the scales of an int8 KV cache of layer ``number``, in scales per token."""
        return self._before(number).kv_scales

    def _before(self, number: int) -> Architecture:
        """Returns the layers before the one whose keys and values layer ``number`` reads."""
        source = self.stack[number].source
        return self.first(number if source is None else source)

    @property
    def recurrent_layers(self) -> int:
        return sum(layer.recurrent is not None for layer in self.stack)

    @property
    def layers(self) -> int:
        return len(self.stack)

    @property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.stack)

    @property
    def windows(self) -> tuple[int, ...]:
        """Length of the attention window by layer, as in ``Layer.window``."""
        return tuple(layer.window for layer in self.stack)

    @property
    def views(self) -> tuple[tuple[int, bool], ...]:
        return tuple(layer.view for layer in self.stack)

    @property
    def rope(self) -> tuple[int, ...]:
        """Index in ``frequencies`` by layer; -1 for no rotation."""
        return tuple(layer.rope for layer in self.stack)

    def query_factors(self, positions: Tensor) -> Tensor:
        """Returns the factors of queries at these positions, float32; see ``query_growth``."""
        if self.query_growth is None:
            return torch.ones(len(positions))
        g = self.query_growth
        return 1 + g.factor * torch.log(1 + torch.floor((positions.float() + g.ahead) / g.length))

    def first(self, layers: int) -> Architecture:
        return replace(self, stack=self.stack[:layers])

    def windowed(self, window: int | None) -> Architecture:
        """Returns the architecture with attention windows of at most ``window`` tokens; None changes none.

        Raises InvalidRequest for latent attention.
        """
        if window is None:
            return self
        if self.latent is not None:
            raise InvalidRequest("draft_window needs attention with keys of its own, and this drafter's is latent")
        widths = (layer.window if 0 < layer.window < window or layer.window < 0 else window for layer in self.stack)
        stack = zip(self.stack, widths, strict=True)
        return replace(self, stack=tuple(replace(layer, window=width) for layer, width in stack))

    @staticmethod
    def of(config: Mapping[str, Any], max_length: int | None = None) -> Architecture:
        """Returns the architecture of a config.json that ``supports`` accepts.

        max_length: maximum length of a sequence in tokens; the checkpoint's own limit is never exceeded.
        """
        family, c, stated = read(config)
        heads, positions, head_dim = c["num_attention_heads"], c["max_position_embeddings"], fields.head_dim(c)
        length = min(max_length or positions, positions)
        rotates = stated.get("rotary", family.rotary)
        frequencies, scales = rotary(c, stated, length) if rotates else ((), ())
        names = replace(family.names, **stated.get("names", {}))
        described: dict[str, Any] = {
            "family": c["model_type"],
            "hidden": c["hidden_size"],
            "heads": heads,
            "kv_heads": c.get("num_key_value_heads") or heads,
            "head_dim": head_dim,
            "intermediate": c["intermediate_size"],
            "stack": stack(c, family, stated, rotates),
            "vocab": c["vocab_size"],
            "eps": c["rms_norm_eps"],
            "activation": NAMED_ACTIVATIONS[c.get("hidden_act") or "silu"],
            "scale": head_dim**-0.5,
            "frequencies": frequencies,
            "max_length": length,
            "tied": bool(c.get("tie_word_embeddings")),
            "rotary_scales": scales,
            "learned_positions": family.position_offset if names.positions else None,
        }
        of_family = ("norm_offset", "centered", "head_norms", "paired", "weightless")
        described |= {name: getattr(family, name) for name in of_family}
        fields_of_all = {field.name for field in dataclasses.fields(Architecture)} - {"names", "alibi"}
        described |= {name: value for name, value in stated.items() if name in fields_of_all}
        if stated.get("query_growth") is not None:
            described["query_growth"] = QueryGrowth(*stated["query_growth"])
        return Architecture(**described, names=names, alibi=Alibi(*stated["alibi"]) if "alibi" in stated else None)


def supports(config: Mapping[str, Any]) -> bool:
    """Returns whether the native decoder computes this architecture exactly, however its weights are stored."""
    return unsupported(config) is None


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Returns the first feature of a config.json that the native decoder does not compute; None if it computes all."""
    if config.get("model_type") not in FAMILIES:
        return f"model_type {config.get('model_type')!r}"
    family, c, stated = read(config)
    if (activation := c.get("hidden_act") or "silu") not in NAMED_ACTIVATIONS:
        return f"activation {activation!r}"
    if other := sorted(set(c["layer_types"]) - {FULL, SLIDING, *family.layers}):
        return f"layers of the type {other[0]!r}"
    for kind in (FULL, SLIDING) if family.rotary else ():
        if not computes_rope(settings := rope_settings(c, kind), head_dim_of(c, stated, kind)):
            return f"rotary positions of the type {settings['rope_type']!r} (part {settings['partial_rotary_factor']})"
    return family.refuses(c)

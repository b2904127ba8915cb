"""The architecture that a config.json describes, with the defaults of its family made explicit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import parse
from foretoken.models.families import facts
from foretoken.models.families.expert_families import experts_of
from foretoken.models.families.family import CHUNKED, FULL, SLIDING, Family, HeadNorms, TensorNames
from foretoken.models.families.latent import LatentAttention
from foretoken.models.families.layer_inputs import LayerInputs
from foretoken.models.families.layers import WITH_ATTENTION, BranchFactors, HeadSizes, Layer
from foretoken.models.families.recurrence import LINEAR, Recurrence
from foretoken.models.families.rope import computes_rope, inverse_frequencies, rope_settings, rotary_scale
from foretoken.models.families.schema import CausalConfig
from foretoken.models.families.table import FAMILIES

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]

NAMED_ACTIVATIONS: dict[str, Activation] = {  # by their names in config.json
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_OLDER_KINDS = {"mamba": LINEAR, "attention": FULL}  # names of kinds of layers in older files


@dataclass(frozen=True, slots=True)
class Alibi:
    """Attention biases by distance (2108.12409): factor * slope * (position of the key - position of the row).

    Attributes:
        slopes: of each head.
        factor: of all biases.
        rounded: whether slope * position is rounded to bfloat16 (Falcon).
    """

    slopes: tuple[float, ...]
    factor: float = 1.0
    rounded: bool = False

    def table(self, positions: int) -> Tensor:
        """Returns the biases of positions before differences are taken, float32 [heads, positions]."""
        at = torch.arange(positions).float()
        if self.rounded:
            return (torch.tensor(self.slopes).bfloat16().float()[:, None] * at).bfloat16().float() * self.factor
        return torch.tensor(self.slopes)[:, None] * at * self.factor


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries are multiplied by 1 + factor * log(1 + floor((position + ahead) / length)).

    Attributes:
        unrotated: whether that holds only in layers without rotation.
    """

    factor: float
    length: int
    ahead: int = 0
    unrotated: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Architecture:
    """A decoder: a stack of layers (``Layer``), and what all of them share.

    Attributes:
        family: ``model_type`` of config.json.
        hidden: width of the residual stream.
        heads: number of query heads.
        kv_heads: number of heads of keys and values, where a layer does not say.
        head_dim: width of a head, where a layer does not say.
        intermediate: width of an MLP, where a layer does not say.
        stack: the layers.
        vocab: rows of the embedding.
        eps: is added to the variance in norms.
        activation: of MLPs.
        scale: scores = scale * (queries . keys).
        attention_softcap: scores = cap * tanh(scores / cap); 0 for none.
        final_softcap: the same for logits.
        embedding_scale: embeddings are multiplied by it, rounded to the model's dtype.
        norm_offset: is added to stored norm weights: Gemma stores weight - 1.
        frequencies: rotary frequencies, float32 [rotated numbers of a head / 2] each; ``Layer.rope`` is an index.
        max_length: maximum length of a sequence in tokens.
        tied: whether the embedding is the vocabulary head.
        centered: whether norms subtract the mean (layer norm); otherwise RMS norms.
        head_norms: where queries and keys are normed, if at all: each head before or after its rotation, or all heads
            as one row before it.
        factors: of what mixers and MLPs add to the residual stream.
        attention_input: factor of attention's input. Scores and ``factors`` include it, so biases are divided by it.
        gate_factor: factor of an MLP's gate before its activation.
        logit_scale: factor of the logits, before their cap.
        clip: queries, keys and values are clipped to [-clip, clip]; 0 for no bound.
        paired: whether numbers 2i and 2i + 1 of a head are rotated together; otherwise i and i + half.
        rotary_scales: factor of cosines and sines, by index in ``frequencies``; empty for 1.
        alibi: attention biases by distance; None for none.
        query_growth: by what queries are multiplied; None for nothing.
        learned_positions: row of the first position in the table of learned positions; None without a table.
        names: names of the checkpoint's tensors.
        weightless: whether the checkpoint has no weights of norms, which are then 1.
        unit_heads: whether norms of heads have no weights, and are only in layers with rotation (Llama 4).
        gated_attention: whether attention's output is multiplied by the sigmoid of a gate before its last matrix.
        recurrence: sizes of the recurrent layers; None if there are none.
        latent: sizes of latent attention, in which ``head_dim`` is the width of the one key of all heads; None if
            attention is not latent.
        sinks: whether each head's softmax counts one more key, without a value (gpt-oss).
        norm_sums: whether norms after mixers and MLPs are those of the residual stream (BART); otherwise of what is
            added to it.
        farthest: distance from which on all of T5's relative positions are one; 0 without such positions.
        unit_values: whether each head of values is normed, without weights (Gemma 4).
        layer_inputs: inputs of single layers beside the residual stream; None for none.
    """

    family: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    stack: tuple[Layer, ...]
    vocab: int
    eps: float
    activation: Activation
    scale: float
    attention_softcap: float
    final_softcap: float
    embedding_scale: float
    norm_offset: float
    frequencies: tuple[Tensor, ...]
    max_length: int
    tied: bool
    centered: bool = False
    head_norms: HeadNorms | None = None
    factors: BranchFactors = field(default_factory=BranchFactors)
    attention_input: float = 1.0
    gate_factor: float = 1.0
    logit_scale: float = 1.0
    clip: float = 0.0
    paired: bool = False
    rotary_scales: tuple[float, ...] = ()
    alibi: Alibi | None = None
    query_growth: QueryGrowth | None = None
    learned_positions: int | None = None
    names: TensorNames = field(default_factory=TensorNames)
    weightless: bool = False
    unit_heads: bool = False
    gated_attention: bool = False
    recurrence: Recurrence | None = None
    sinks: bool = False
    norm_sums: bool = False
    farthest: int = 0
    latent: LatentAttention | None = None
    unit_values: bool = False
    layer_inputs: LayerInputs | None = None

    def sizes(self, layer: Layer) -> HeadSizes:
        """Returns the sizes of a layer's attention."""
        return layer.sizes or HeadSizes(self.kv_heads, self.head_dim)

    @property
    def kv_numbers(self) -> int:
        """Numbers of one token in the KV cache of all layers. Layers that read those of another one have none."""
        return sum(
            self.head_dim if self.latent is not None else self.sizes(layer).numbers
            for layer in self.stack
            if layer.attention and layer.source is None
        )

    @property
    def kv_scales(self) -> int:
        """Scales of one token in an int8 KV cache of all layers: one for the keys and one for the values of a head."""
        return sum(2 * self.sizes(layer).kv_heads for layer in self.stack if layer.attention and layer.source is None)

    def cache_at(self, number: int) -> int:
        """Returns the numbers of one token in the KV cache before those that layer ``number`` reads."""
        return self._before(number).kv_numbers

    def scales_at(self, number: int) -> int:
        """Returns the scales of one token in an int8 KV cache before those that layer ``number`` reads."""
        return self._before(number).kv_scales

    def _before(self, number: int) -> Architecture:
        """Returns the layers before those keys and values that layer ``number`` reads."""
        source = self.stack[number].source
        return self.first(number if source is None else source)

    @property
    def recurrent_layers(self) -> int:
        """Number of layers with a recurrent mixer, which have a state."""
        return sum(layer.recurrent is not None for layer in self.stack)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.stack)

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(layer.experts is not None for layer in self.stack)

    @property
    def windows(self) -> tuple[int, ...]:
        """Length of the attention window by layer, as in ``Layer.window``."""
        return tuple(layer.window for layer in self.stack)

    @property
    def views(self) -> tuple[tuple[int, bool], ...]:
        """``Layer.view`` by layer."""
        return tuple(layer.view for layer in self.stack)

    @property
    def rope(self) -> tuple[int, ...]:
        """Index in ``frequencies`` by layer; -1 for no rotation."""
        return tuple(layer.rope for layer in self.stack)

    def query_factors(self, positions: Tensor) -> Tensor:
        """Returns by what queries at these positions are multiplied, float32; see ``query_growth``."""
        if self.query_growth is None:
            return torch.ones(len(positions))
        g = self.query_growth
        return 1 + g.factor * torch.log(1 + torch.floor((positions.float() + g.ahead) / g.length))

    def first(self, layers: int) -> Architecture:
        """Returns the architecture of the first ``layers`` layers."""
        return replace(self, stack=self.stack[:layers])

    @staticmethod
    def of(config: Mapping[str, Any], max_length: int | None = None) -> Architecture:
        """Returns the architecture of a config.json that ``supports`` accepts.

        Args:
            config: config.json as a dict.
            max_length: maximum length of a sequence in tokens; the checkpoint's own limit is never exceeded.

        Raises:
            ModelLoadError: a field is missing or wrong.
        """
        family, c, stated = _read(config)
        heads, positions, head_dim = c["num_attention_heads"], c["max_position_embeddings"], facts.head_dim(c)
        length = min(max_length or positions, positions)
        rotary = stated.get("rotary", family.rotary)
        frequencies, scales = _rotary(c, stated, length) if rotary else ((), ())
        names = replace(family.names, **stated.get("names", {}))
        described: dict[str, Any] = {
            "family": c["model_type"],
            "hidden": c["hidden_size"],
            "heads": heads,
            "kv_heads": c.get("num_key_value_heads") or heads,
            "head_dim": head_dim,
            "intermediate": c["intermediate_size"],
            "stack": _stack(c, family, stated, rotary),
            "vocab": c["vocab_size"],
            "eps": c["rms_norm_eps"],
            "activation": NAMED_ACTIVATIONS[c.get("hidden_act") or "silu"],
            "scale": head_dim**-0.5,
            "attention_softcap": 0.0,
            "final_softcap": 0.0,
            "embedding_scale": 1.0,
            "norm_offset": family.norm_offset,
            "frequencies": frequencies,
            "max_length": length,
            "tied": bool(c.get("tie_word_embeddings")),
            "centered": family.centered,
            "head_norms": family.head_norms,
            "paired": family.paired,
            "rotary_scales": scales,
            "learned_positions": family.position_offset if names.positions else None,
            "weightless": family.weightless,
        }
        known = {field.name for field in fields(Architecture)} - {"names", "alibi"}
        described |= {name: value for name, value in stated.items() if name in known}
        if stated.get("query_growth") is not None:
            described["query_growth"] = QueryGrowth(*stated["query_growth"])
        return Architecture(**described, names=names, alibi=Alibi(*stated["alibi"]) if "alibi" in stated else None)


def supports(config: Mapping[str, Any]) -> bool:
    """Returns whether the native decoder computes this architecture exactly, however its weights are stored.

    Raises:
        ModelLoadError: a field of a known architecture is missing or wrong.
    """
    return unsupported(config) is None


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Returns what of a config.json the native decoder does not compute; None if it computes all of it.

    Raises:
        ModelLoadError: a field of a known architecture is missing or wrong.
    """
    if config.get("model_type") not in FAMILIES:
        return f"model_type {config.get('model_type')!r}"
    family, c, stated = _read(config)
    if (activation := c.get("hidden_act") or "silu") not in NAMED_ACTIVATIONS:
        return f"activation {activation!r}"
    if other := sorted(set(c["layer_types"]) - {FULL, SLIDING, *family.layers}):
        return f"layers of the type {other[0]!r}"
    for kind in (FULL, SLIDING) if family.rotary else ():
        if not computes_rope(settings := rope_settings(c, kind), _head_dim(c, stated, kind)):
            return f"rotary positions of the type {settings['rope_type']!r} (part {settings['partial_rotary_factor']})"
    return family.refuses(c)


def _read(config: Mapping[str, Any]) -> tuple[Family, dict[str, Any], dict[str, Any]]:
    """Returns the family, ``config`` by Llama's names with the family's defaults, and what only the family says.

    Raises:
        ModelLoadError: a field is missing or wrong.
    """
    family = FAMILIES[config["model_type"]]
    own = {name: config[alias] for name, alias in family.aliases.items() if alias in config}
    replaced = {name: value for name, value in family.defaults.items() if name in family.aliases}
    c = {**family.defaults, **config, **replaced, **own}
    if c.get("intermediate_size") is None and isinstance(c.get("hidden_size"), int) and "mlp_ratio" in family.defaults:
        c["intermediate_size"] = family.defaults["mlp_ratio"] * c["hidden_size"]
    c |= family.derives(c)
    names = {name: alias for name, alias in family.aliases.items() if name not in config}
    parse(CausalConfig, c, "config.json", names)
    c["layer_types"] = [_OLDER_KINDS.get(kind, kind) for kind in c.get("layer_types") or family.kinds(c)]
    stated = family.facts(c)
    c |= {name: stated[name] for name in ("hidden_act", "partial_rotary_factor") if name in stated}
    return family, c, stated


def _stack(c: Mapping[str, Any], family: Family, stated: Mapping[str, Any], rotary: bool) -> tuple[Layer, ...]:
    """Returns the layers."""
    window = (c.get("sliding_window") or 0) if c.get("use_sliding_window") else 0
    ropes = stated.get("rope", [0] * c["num_hidden_layers"])
    chunk = c.get("attention_chunk_size") or 0
    norms, layers, missing = stated.get("norms", family.norms), [], [None] * c["num_hidden_layers"]
    stated_by_layer = ("sizes", "source", "tied_values", "inner")
    own = zip(*(stated.get(name, missing) for name in stated_by_layer), strict=True)
    for name, rope, (sizes, source, tied, inner) in zip(c["layer_types"], ropes, own, strict=True):
        kind = family.layers.get(name, WITH_ATTENTION)
        layer = Layer(
            attention=kind.attention,
            recurrent=kind.recurrent,
            mlp=("gated" if family.gated else "ungated") if kind.mlp else None,
            norms=norms.of(kind.mixes, kind.mlp),
            parallel=stated.get("parallel", family.parallel),
            window=window if name == SLIDING else -chunk if name == CHUNKED else 0,
            rope=rope if rotary else -1,
            sizes=sizes,
            source=source,
            tied_values=bool(tied),
            inner=inner,
        )
        layers.append(layer)
    return tuple(
        layer if experts is None else replace(layer, mlp="experts", experts=experts)
        for layer, experts in zip(layers, experts_of(c), strict=True)
    )


def _head_dim(c: Mapping[str, Any], stated: Mapping[str, Any], kind: str) -> int:
    """Returns the width of a head in layers of a kind."""
    own = zip(c["layer_types"], stated.get("sizes") or (), strict=False)
    return next((sizes.head_dim for name, sizes in own if name == kind), facts.head_dim(c))


def _rotary(
    c: Mapping[str, Any], stated: Mapping[str, Any], length: int
) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    """Returns frequencies, and factors of cosines and sines: of all layers, and of sliding ones that have their own."""
    frequencies, scales = [], []
    for kind in (FULL, SLIDING) if 1 in stated.get("rope", ()) else (FULL,):
        head_dim, settings = _head_dim(c, stated, kind), rope_settings(c, kind)
        wanted = int(head_dim * settings["partial_rotary_factor"]) // 2
        for name in ("short_factor", "long_factor") if settings["rope_type"] == "longrope" else ():
            if len(settings[name]) != wanted:
                raise ModelLoadError(f"config.json has {len(settings[name])} numbers in {name}; expected {wanted}")
        plain = inverse_frequencies(settings, head_dim, length)
        frequencies.append(-plain if stated.get("backwards") else plain)
        scales.append(rotary_scale(settings))
    return tuple(frequencies), tuple(scales)

"""The architecture that a config.json describes, with the defaults of its family made explicit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from foretoken.core.schema import parse
from foretoken.models.families.layers import PRE, SANDWICH, Layer
from foretoken.models.families.rope import computes_rope, inverse_frequencies, rope_settings
from foretoken.models.families.schema import DEFAULTS, CausalConfig

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]
HeadNorms = Literal["before", "after", "all"]

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, eq=False, slots=True)
class Architecture:
    """A decoder: a stack of layers (``Layer``), and what all of them share.

    Attributes:
        family: ``model_type`` of config.json.
        hidden: width of the residual stream.
        heads: number of query heads.
        kv_heads: number of heads of keys and values.
        head_dim: width of a head.
        intermediate: width of an MLP.
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
        residual_scale: factor of what mixers and MLPs add to the residual stream.
        logit_scale: factor of the logits, before their cap.
        clip: queries, keys and values are clipped to [-clip, clip]; 0 for no bound.
        paired: whether numbers 2i and 2i + 1 of a head are rotated together; otherwise i and i + half.
        rotary_scales: factor of cosines and sines, by index in ``frequencies``; empty for 1.
        slopes: ALiBi's slope of each head; empty for none.
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
    head_norms: HeadNorms = "before"
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    clip: float = 0.0
    paired: bool = False
    rotary_scales: tuple[float, ...] = ()
    slopes: tuple[float, ...] = ()

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.stack)

    @property
    def windows(self) -> tuple[int, ...]:
        """Length of the attention window by layer; 0 for no window."""
        return tuple(layer.window for layer in self.stack)

    @property
    def rope(self) -> tuple[int, ...]:
        """Index in ``frequencies`` by layer; -1 for no rotation."""
        return tuple(layer.rope for layer in self.stack)

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
        c = _filled(config)
        heads, positions = c["num_attention_heads"], c["max_position_embeddings"]
        head_dim = c.get("head_dim") or c["hidden_size"] // heads
        gemma = c["model_type"].startswith("gemma")
        rope, tables = _rope(c, head_dim)
        return Architecture(
            family=c["model_type"],
            hidden=c["hidden_size"],
            heads=heads,
            kv_heads=c.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            intermediate=c["intermediate_size"],
            stack=_stack(c, rope),
            vocab=c["vocab_size"],
            eps=c["rms_norm_eps"],
            activation=_ACTIVATIONS[_activation(c)],
            scale=(c.get("query_pre_attn_scalar") or head_dim) ** -0.5,
            attention_softcap=c.get("attn_logit_softcapping") or 0.0,
            final_softcap=c.get("final_logit_softcapping") or 0.0,
            embedding_scale=c["hidden_size"] ** 0.5 if gemma else 1.0,
            norm_offset=1.0 if gemma else 0.0,
            frequencies=tables,
            max_length=min(max_length or positions, positions),
            tied=bool(c.get("tie_word_embeddings")),
        )


def supports(config: Mapping[str, Any]) -> bool:
    """Returns whether the native decoder computes this architecture exactly, however its weights are stored.

    Raises:
        ModelLoadError: a field of a known architecture is missing or wrong.
    """
    if config.get("model_type") not in DEFAULTS:
        return False
    c = _filled(config)
    return (
        _activation(c) in _ACTIVATIONS
        and set(c.get("layer_types") or ()) <= _LAYER_TYPES
        and all(computes_rope(rope_settings(c, kind)) for kind in _LAYER_TYPES)
        and not c.get("mlp_bias")
        and not c.get("use_bidirectional_attention")
    )


def _filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``config`` with its family's defaults filled in. Raises ModelLoadError for a wrong field."""
    filled = {**DEFAULTS[config["model_type"]], **config}
    parse(CausalConfig, filled, "config.json")
    return filled


def _activation(c: Mapping[str, Any]) -> str:
    name = c.get("hidden_activation") if c["model_type"] in ("gemma2", "gemma3_text") else c.get("hidden_act")
    if c["model_type"] == "gemma" and name in (None, "gelu"):
        return "gelu_pytorch_tanh"  # files of Gemma 1 say "gelu" for its tanh approximation
    return str(name or "silu")


def _layer_types(c: Mapping[str, Any]) -> list[str]:
    """Returns the kind of each layer, also for families whose config.json does not list the kinds."""
    if c.get("layer_types"):
        return list(c["layer_types"])
    layers, family = range(c["num_hidden_layers"]), c["model_type"]
    if family in ("gemma2", "gemma3_text"):
        every = 2 if family == "gemma2" else c.get("sliding_window_pattern", 6)
        full = [bool((i + 1) % every == 0) for i in layers]
    elif family in ("qwen2", "qwen3"):
        full = [i < c.get("max_window_layers", 28) for i in layers]
    elif family == "smollm3":
        full = [bool(rotates) for rotates in _rotating(c)]
    else:
        full = [family not in ("mistral", "phi3") for _ in layers]
    return ["full_attention" if whole else "sliding_attention" for whole in full]


def _stack(c: Mapping[str, Any], rope: tuple[int, ...]) -> tuple[Layer, ...]:
    norms = SANDWICH if c["model_type"] in ("gemma2", "gemma3_text") else PRE
    return tuple(Layer(norms=norms, window=w, rope=r) for w, r in zip(_windows(c), rope, strict=True))


def _windows(c: Mapping[str, Any]) -> tuple[int, ...]:
    window = (c.get("sliding_window") or 0) if c.get("use_sliding_window") else 0
    return tuple(window if kind == "sliding_attention" else 0 for kind in _layer_types(c))


def _rotating(c: Mapping[str, Any]) -> list[int]:
    """Returns 1 for each layer with rotary positions and 0 for each without (SmolLM3)."""
    every = c["no_rope_layer_interval"]
    return c.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(c["num_hidden_layers"])]


def _rope(c: Mapping[str, Any], head_dim: int) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """Returns each layer's index of its table, and the tables. Gemma 3 has a second one for its sliding layers."""
    tables = [inverse_frequencies(rope_settings(c), head_dim)]
    if c["model_type"] == "gemma3_text":
        tables.append(inverse_frequencies(rope_settings(c, "sliding_attention"), head_dim))
        rope = [int(kind == "sliding_attention") for kind in _layer_types(c)]
    elif c["model_type"] == "smollm3":
        rope = [0 if rotates else -1 for rotates in _rotating(c)]
    else:
        rope = [0] * c["num_hidden_layers"]
    return tuple(rope), tuple(tables)

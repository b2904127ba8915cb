"""The architecture that a config.json describes, with the defaults of its family made explicit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from foretoken.core.schema import parse
from foretoken.models.families.rope import computes_rope, inverse_frequencies, rope_settings
from foretoken.models.families.schema import DEFAULTS, CausalConfig

Activation = Literal["silu", "gelu_tanh"]

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, eq=False, slots=True)
class Architecture:
    """A decoder of the Llama family or one of its relatives.

    hidden = x + post_attention_norm(attention(norm(x))); x = hidden + post_mlp_norm(mlp(mlp_norm(hidden))). Only
    Gemma 2 and 3 have the two post norms. mlp = down(activation(gate) * up).
    """

    family: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int
    vocab: int
    eps: float
    activation: Activation
    scale: float  # scores = scale * (queries . keys)
    attention_softcap: float  # scores = cap * tanh(scores / cap); 0 for none
    final_softcap: float  # the same for logits
    embedding_scale: float  # embeddings are multiplied by it, rounded to the model's dtype
    norm_offset: float  # is added to stored norm weights: Gemma stores weight - 1
    windows: tuple[int, ...]  # by layer: length of the attention window, the row itself included; 0 for no window
    rope: tuple[int, ...]  # by layer: index in ``frequencies``; -1 for no rotation (SmolLM3)
    frequencies: tuple[Tensor, ...]  # each float32 [head_dim / 2]
    max_length: int
    tied: bool

    def first(self, layers: int) -> Architecture:
        """Returns the architecture of the first ``layers`` layers."""
        return replace(self, layers=layers, windows=self.windows[:layers], rope=self.rope[:layers])

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
            layers=c["num_hidden_layers"],
            vocab=c["vocab_size"],
            eps=c["rms_norm_eps"],
            activation=_ACTIVATIONS[_activation(c)],
            scale=(c.get("query_pre_attn_scalar") or head_dim) ** -0.5,
            attention_softcap=c.get("attn_logit_softcapping") or 0.0,
            final_softcap=c.get("final_logit_softcapping") or 0.0,
            embedding_scale=c["hidden_size"] ** 0.5 if gemma else 1.0,
            norm_offset=1.0 if gemma else 0.0,
            windows=_windows(c),
            rope=rope,
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

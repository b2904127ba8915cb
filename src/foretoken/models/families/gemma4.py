"""Config.json files of Gemma 4: heads by layer, shared keys and values, and inputs of single layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretoken.core.errors import ModelLoadError
from foretoken.models.families.family import FULL, SLIDING, Config
from foretoken.models.families.fields import every, head_dim, sliding_frequencies
from foretoken.models.families.layers import HeadSizes, LayerInputs

ROPES: dict[str, Any] = {  # of files without rotary settings
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def kinds(c: Config) -> list[str]:
    """Returns full attention in each sixth layer and in the last."""
    return [*every(6)({**c, "sliding_window_pattern": None})[:-1], FULL]


def derives(c: Config) -> dict[str, Any]:
    """Returns the listed kinds of layers, of which the last is always full, and the numbers of experts."""
    listed, experts = c.get("layer_types"), c.get("num_experts") if c.get("enable_moe_block") else 0
    fields = {"num_experts": experts, "num_experts_per_tok": c.get("top_k_experts")}
    return fields | ({"layer_types": [*listed[:-1], FULL]} if isinstance(listed, list) and listed else {})


def fields(c: Config) -> dict[str, Any]:
    """Returns sizes and sources by layer. Layers that read other layers' keys and values may have wider MLPs."""
    sources = _sources(c)
    wide = 2 * c["intermediate_size"] if c.get("use_double_wide_mlp") else None
    width = c.get("hidden_size_per_layer_input") or 0
    return sliding_frequencies(c) | {
        "embedding_scale": c["hidden_size"] ** 0.5,
        "scale": 1.0,
        "final_softcap": c.get("final_logit_softcapping") or 0.0,
        "unit_values": True,
        "sizes": _sizes(c),
        "source": sources,
        "tied_values": [bool(c.get("attention_k_eq_v")) and kind == FULL for kind in c["layer_types"]],
        "inner": [None if source is None else wide for source in sources],
        "layer_inputs": LayerInputs(width) if width else None,
    }


def refuses(c: Config) -> str | None:
    """Refuses attention in both directions, and embeddings of layers for a part of the vocabulary."""
    if c.get("use_bidirectional_attention") == "all":
        return "use_bidirectional_attention: all"
    if c.get("hidden_size_per_layer_input") and c["vocab_size_per_layer_input"] != c["vocab_size"]:
        return "vocab_size_per_layer_input other than vocab_size"
    return None


def _sizes(c: Config) -> list[HeadSizes]:
    """Returns the sizes of each layer's attention; newer files list them, older ones name those of full layers."""
    kv_heads, width, heads = c.get("num_key_value_heads"), head_dim(c), c["num_attention_heads"]
    listed = c.get("per_layer_config")
    if listed is None:
        full_sizes = {"head_dim": c["global_head_dim"]}
        if c.get("num_global_key_value_heads") and c.get("attention_k_eq_v", True):
            full_sizes["num_key_value_heads"] = c["num_global_key_value_heads"]
        listed = {number: full_sizes for number, kind in enumerate(c["layer_types"]) if kind == FULL}
    by_layer = {int(number): full_sizes for number, full_sizes in listed.items()}
    sizes = []
    for number in range(c["num_hidden_layers"]):
        full_sizes = by_layer.get(number, {})
        sizes.append(
            HeadSizes(full_sizes.get("num_key_value_heads") or kv_heads or heads, full_sizes.get("head_dim") or width)
        )
        if heads % sizes[-1].kv_heads or sizes[-1].head_dim % 2:
            raise ModelLoadError(
                f"config.json has {heads} query heads and {sizes[-1].kv_heads} heads of keys of {sizes[-1].head_dim} "
                f"elements in layer {number}; expected a multiple, and an even number"
            )
    return sizes


def _sources(c: Config) -> list[int | None]:
    """Returns for each layer the last one of its kind before the layers that share; None if it does not share."""
    kinds, unshared = c["layer_types"], c["num_hidden_layers"] - (c.get("num_kv_shared_layers") or 0)
    last: Mapping[str, int] = {kind: number for number, kind in enumerate(kinds[: max(unshared, 0)])}
    if unshared < 1 or any(kind not in last for kind in kinds):
        raise ModelLoadError(
            f"config.json has num_kv_shared_layers = {c['num_kv_shared_layers']}, before which not every kind of layer "
            "has keys and values of its own"
        )
    return [None if number < unshared else last[kind] for number, kind in enumerate(kinds)]

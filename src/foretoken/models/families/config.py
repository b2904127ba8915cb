"""Reads config.json by Llama's names, with the defaults of its family made explicit."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import parse
from foretoken.models.families import fields
from foretoken.models.families.experts import experts_of
from foretoken.models.families.family import CHUNKED, FULL, SLIDING, Family
from foretoken.models.families.layers import WITH_ATTENTION, Layer
from foretoken.models.families.recurrence import LINEAR
from foretoken.models.families.rope import inverse_frequencies, rope_settings, rotary_scale
from foretoken.models.families.schema import CausalConfig
from foretoken.models.families.table import FAMILIES

# Model type of the language model if ``text_config`` does not name it. Models are not listed if their language model
# reads text unlike its family: by cross-attention, in both directions, or with other weights.
LANGUAGE_MODELS = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "exaone4_5": "exaone4",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm4v": "glm4v_text",
    "glm_ocr": "glm_ocr_text",
    "got_ocr2": "qwen2",
    "idefics3": "llama",
    "internvl": "qwen2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "smolvlm": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
_UNSCALED = ("aya_vision", "cohere2_vision")  # their logits have no factor in transformers
_FLAT = ("qwen2_vl", "qwen2_5_vl")  # older files have the language model's fields beside ``vision_config``


def text_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the config.json of a multimodal checkpoint's language model; None for any other checkpoint."""
    kind = config.get("model_type")
    if kind not in LANGUAGE_MODELS:
        return None
    nested = config.get("text_config")
    if nested is None and kind in _FLAT:
        nested = {key: value for key, value in config.items() if key not in ("model_type", "vision_config")}
    if not isinstance(nested, Mapping):
        return None
    outer = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if config.get(key) is not None}
    if kind in _UNSCALED:
        outer["logit_scale"] = 1.0
    return {"model_type": LANGUAGE_MODELS[kind], **nested, **outer}


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


def read(config: Mapping[str, Any]) -> tuple[Family, dict[str, Any], dict[str, Any]]:
    """Returns the family, ``config`` by Llama's names with the family's defaults, and the family's own fields."""
    family = FAMILIES[config["model_type"]]
    aliased = {name: config[alias] for name, alias in family.aliases.items() if alias in config}
    replaced = {name: value for name, value in family.defaults.items() if name in family.aliases}
    c = {**family.defaults, **config, **replaced, **aliased}
    if c.get("intermediate_size") is None and isinstance(c.get("hidden_size"), int) and "mlp_ratio" in family.defaults:
        c["intermediate_size"] = family.defaults["mlp_ratio"] * c["hidden_size"]
    c |= family.derives(c)
    names = {name: alias for name, alias in family.aliases.items() if name not in config}
    parse(CausalConfig, c, "config.json", names)
    c["layer_types"] = [_OLDER_KINDS.get(kind, kind) for kind in c.get("layer_types") or family.kinds(c)]
    stated = family.fields(c)
    c |= {name: stated[name] for name in ("hidden_act", "partial_rotary_factor") if name in stated}
    return family, c, stated


def stack(c: Mapping[str, Any], family: Family, stated: Mapping[str, Any], rotates: bool) -> tuple[Layer, ...]:
    window = (c.get("sliding_window") or 0) if c.get("use_sliding_window") else 0
    ropes = stated.get("rope", [0] * c["num_hidden_layers"])
    chunk = c.get("attention_chunk_size") or 0
    norms, layers, missing = stated.get("norms", family.norms), [], [None] * c["num_hidden_layers"]
    stated_by_layer = ("sizes", "source", "tied_values", "inner")
    details = zip(*(stated.get(name, missing) for name in stated_by_layer), strict=True)
    for name, rope, (sizes, source, tied, inner) in zip(c["layer_types"], ropes, details, strict=True):
        kind = family.layers.get(name, WITH_ATTENTION)
        layer = Layer(
            attention=kind.attention,
            recurrent=kind.recurrent,
            mlp=("gated" if family.gated else "ungated") if kind.mlp else None,
            norms=norms.of(kind.mixes, kind.mlp),
            parallel=stated.get("parallel", family.parallel),
            window=window if name == SLIDING else -chunk if name == CHUNKED else 0,
            rope=rope if rotates else -1,
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


def head_dim_of(c: Mapping[str, Any], stated: Mapping[str, Any], kind: str) -> int:
    sizes_of = zip(c["layer_types"], stated.get("sizes") or (), strict=False)
    return next((sizes.head_dim for name, sizes in sizes_of if name == kind), fields.head_dim(c))


def rotary(
    c: Mapping[str, Any], stated: Mapping[str, Any], length: int
) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    """Returns rotary frequencies, and factors of cosines and sines: of all layers, and of sliding ones if different."""
    frequencies, scales = [], []
    for kind in (FULL, SLIDING) if 1 in stated.get("rope", ()) else (FULL,):
        head_dim, settings = head_dim_of(c, stated, kind), rope_settings(c, kind)
        expected = int(head_dim * settings["partial_rotary_factor"]) // 2
        for name in ("short_factor", "long_factor") if settings["rope_type"] == "longrope" else ():
            if len(settings[name]) != expected:
                raise ModelLoadError(f"config.json has {len(settings[name])} numbers in {name}; expected {expected}")
        plain = inverse_frequencies(settings, head_dim, length)
        frequencies.append(-plain if stated.get("backwards") else plain)
        scales.append(rotary_scale(settings))
    return tuple(frequencies), tuple(scales)

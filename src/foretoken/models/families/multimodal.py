"""Multimodal checkpoints whose language model alone, without images or sound, is one of the families of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

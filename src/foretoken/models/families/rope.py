"""Rotary frequencies of a config.json, plain and scaled."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

KINDS = ("default", "linear", "llama3", "factors", "yarn", "dynamic", "longrope", "proportional")
_SAME = ("mrope", "default")  # with text alone, the positions of multimodal rope are those of plain rope


def rope_settings(config: Mapping[str, Any], layer_type: str = "full_attention") -> dict[str, Any]:
    """Returns the rotary settings of one kind of layer as a flat dict with ``rope_type`` and ``rope_theta``.

    Older files have the base beside ``rope_scaling``, newer ones have all settings in ``rope_parameters``. Gemma 3 and
    OLMo 3 have a set for each kind of layer or, in older files, plain frequencies in the sliding layers.
    """
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = config.get("rope_theta")
    if "full_attention" in settings or "sliding_attention" in settings:
        settings = settings.get(layer_type) or {}
    elif layer_type == "sliding_attention":
        settings, base = {}, config.get("rope_local_base_freq") or base
    kind = settings.get("rope_type") or settings.get("type") or "default"
    partial = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    positions = config.get("max_position_embeddings")
    original = settings.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return {
        **settings,
        "rope_type": {"su": "longrope"}.get(kind, "default" if kind in _SAME else kind),
        "rope_theta": settings.get("rope_theta") or base or 10000.0,
        "partial_rotary_factor": partial,
        "max_position_embeddings": positions,
        "original_max_position_embeddings": original or positions,
    }


def computes_rope(settings: Mapping[str, Any], head_dim: int) -> bool:
    """Returns whether ``inverse_frequencies`` supports these settings for heads of this width."""
    dim = int(head_dim * settings["partial_rotary_factor"])
    if settings["rope_type"] == "yarn" and settings["rope_theta"] <= 1.0:
        return False
    return settings["rope_type"] in KINDS and 2 <= dim <= head_dim and dim % 2 == 0


def inverse_frequencies(settings: Mapping[str, Any], head_dim: int, max_length: int = 0) -> Tensor:
    """Returns the frequencies, float32 [rotated elements of a head / 2].

    Supported are plain ones (RoFormer, 2104.09864), ``linear``, ``llama3`` (wavelength bands), ``yarn``
    (2309.00071), ``longrope`` (2402.13753), ``dynamic``, and ``factors``: one for each frequency, which is divided by
    it (GGUF files of Llama 3). ``proportional`` ones (Gemma 4) are the first of those of a whole head, and zeros: pairs
    that are not turned. Dynamic NTK scaling changes them only beyond ``max_position_embeddings``, which no
    sequence is, unless it has a fixed ``alpha`` (Hunyuan).

    Args:
        settings: from ``rope_settings``.
        head_dim: width of a head.
        max_length: maximum length of a sequence; LongRoPE takes its long factors if it exceeds the original length.
    """
    kind, share = settings["rope_type"], settings.get("partial_rotary_factor", 1.0)
    dim = head_dim if kind == "proportional" else int(head_dim * share)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    theta = settings["rope_theta"]
    if kind == "dynamic" and settings.get("alpha"):
        theta *= settings["alpha"] ** (dim / max(dim - 2, 1))
    frequencies = 1.0 / (theta**exponents)
    if kind in ("default", "dynamic"):
        return frequencies
    if kind == "proportional":
        turned = torch.arange(dim // 2) < int(share * head_dim // 2)
        return torch.where(turned, frequencies / (settings.get("factor") or 1.0), 0.0)
    if kind == "linear":
        return frequencies / settings["factor"]
    if kind == "factors":
        return frequencies / torch.tensor(settings["factors"])
    if kind == "llama3":
        return _llama3(frequencies, settings)
    if kind == "yarn":
        return _yarn(frequencies, settings, dim)
    if kind == "longrope":
        long = max_length > settings["original_max_position_embeddings"]
        return frequencies / torch.tensor(settings["long_factor" if long else "short_factor"])
    raise ValueError(f"rope scaling {kind!r} is not computed here; known: {', '.join(KINDS)}")


def rotary_scale(settings: Mapping[str, Any]) -> float:
    """Returns the factor of cosines and sines: 1, or that of ``yarn`` and ``longrope``."""
    kind, stated, factor = settings["rope_type"], settings.get("attention_factor"), _factor(settings)
    if kind not in ("yarn", "longrope") or stated is not None:
        return float(stated) if stated is not None and kind in ("yarn", "longrope") else 1.0
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(max(settings["original_max_position_embeddings"], 2)))
    every, all_dims = settings.get("mscale"), settings.get("mscale_all_dim")
    if every and all_dims:
        return (0.1 * every * math.log(factor) + 1.0) / (0.1 * all_dims * math.log(factor) + 1.0)
    return 0.1 * math.log(factor) + 1.0


def _factor(settings: Mapping[str, Any]) -> float:
    """Returns the length of the context over the original one."""
    factor, positions = settings.get("factor"), settings.get("max_position_embeddings")
    if factor is not None or not positions:
        return float(factor or 1.0)
    return float(positions / settings["original_max_position_embeddings"])


def _llama3(frequencies: Tensor, settings: Mapping[str, Any]) -> Tensor:
    original = settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    if low == high:  # no band between them, as in Llama 4 Scout
        return torch.where(wavelengths > original / low, frequencies / settings["factor"], frequencies)
    blend = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / settings["factor"] + blend * frequencies


def _yarn(frequencies: Tensor, settings: Mapping[str, Any], dim: int) -> Tensor:
    """Blends plain frequencies with interpolated ones, by the number of turns within the original length."""
    original, theta = settings["original_max_position_embeddings"], settings["rope_theta"]

    def index_of(turns: float) -> float:
        """Returns the index of the frequency with this number of turns."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(settings.get("beta_fast") or 32.0), index_of(settings.get("beta_slow") or 1.0)
    if settings.get("truncate", True) is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    return frequencies / _factor(settings) * ramp + frequencies * (1 - ramp)

"""The rotary settings of a GGUF file, as fields of config.json."""

from __future__ import annotations

from typing import Any

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import shortened
from foretoken.models.formats.gguf.metadata import Metadata

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_UNTURNED = 1e29  # Gemma 4's pairs that are not turned have frequencies divided by more than this


def positions(m: Metadata) -> dict[str, Any]:
    """Returns the base, the rotated fraction of a head, and the scaling if there is any.

    Raises ModelLoadError if the scaling is of a kind that is not computed, or incomplete.
    """
    rotated = m.get("rope.dimension_count", default=m.head_dim)
    scaling = _scaling(m, rotated)
    return {
        "rope_theta": m.number("rope.freq_base") or 10000.0,
        "partial_rotary_factor": rotated / m.head_dim,
        "rope_local_base_freq": m.number("rope.freq_base_swa"),
    } | ({"rope_scaling": scaling} if scaling else {})


def _scaling(m: Metadata, rotated: int) -> dict[str, Any] | None:
    """Returns the rotary scaling of the file; None if it has none."""
    kind = m.get("rope.scaling.type", (str,), "none")
    factors = m.floats(ROPE_FACTORS, rotated // 2)
    long, short = m.floats(LONG_FACTORS, rotated // 2), m.floats(SHORT_FACTORS, rotated // 2)
    if long is not None and short is not None:
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "original_max_position_embeddings": m.get("rope.scaling.original_context_length")
            or m.need("context_length"),
            "attention_factor": m.number("rope.scaling.attn_factor"),
        }
    if kind == "linear" and factors is None:
        return {"rope_type": "linear", "factor": m.number("rope.scaling.factor") or 1.0}
    if kind == "yarn" and factors is None:
        return _yarn(m)
    if kind != "none":
        raise ModelLoadError(f"{m.header.path} scales its positions by {shortened(kind)}, which is not computed here")
    return None if factors is None else {"rope_type": "factors", "factors": factors}


def _yarn(m: Metadata) -> dict[str, Any]:
    """Returns the settings of YaRN (2309.00071). llama.cpp rounds its bounds, except in gpt-oss."""
    keys = {
        "attention_factor": "yarn_attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    settings = {name: m.number(f"rope.scaling.{key}") for name, key in keys.items()}
    every = m.number("rope.scaling.yarn_log_multiplier")
    if every is not None and m.architecture == "deepseek2":
        every = round(every / 0.1, 6)  # the file stores a tenth of config.json's value
    if m.architecture == "mistral3" and (beta := m.number("attention.temperature_scale")):
        settings["llama_4_scaling_beta"] = beta  # of Ministral 3: queries grow with their position
    factors = {"mscale": every if m.architecture == "deepseek2" else 1.0, "mscale_all_dim": every} if every else {}
    return {
        "rope_type": "yarn",
        "factor": m.number("rope.scaling.factor") or 1.0,
        "original_max_position_embeddings": m.need("rope.scaling.original_context_length"),
        "truncate": m.architecture != "gpt-oss",
        **{name: value for name, value in settings.items() if value is not None},
        **factors,
    }


def rotated_fraction(m: Metadata, head_dim: int) -> float:
    """Returns the fraction of a head's pairs that Gemma 4 rotates in layers with full attention.

    The file has a factor for each pair of a head, which is enormous for pairs that are not rotated.
    """
    factors = m.floats(ROPE_FACTORS, head_dim // 2)
    if factors is None:
        return 1.0
    return sum(factor < _UNTURNED for factor in factors) / len(factors)

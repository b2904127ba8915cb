"""Multi-head latent attention (DeepSeek-V2, 2405.04434) and the families that have it, as data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from foretoken.core.errors import ModelLoadError
from foretoken.models.families.family import Family, TensorNames
from foretoken.models.families.layers import BranchFactors
from foretoken.models.families.rope import rope_settings


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of latent attention. All heads share one latent and one rotary key, and only these are cached.

    A head's query is [plain part, rotated part]. Its key is [a matrix times the latent, the rotary key], its
    value another matrix times the latent.

    Attributes:
        rank: width of the latent.
        rotated: width of the rotary key, and of a query's rotated part.
        plain: width of a query's other part.
        value: width of a head's value.
        query_rank: width of the queries' latent; 0 if queries are a product of the row.
        eps: is added to the variance in the norms of latents.
    """

    rank: int
    rotated: int
    plain: int
    value: int
    query_rank: int = 0
    eps: float = 1e-6  # transformers' and DeepSeek's; rms_norm_eps is not used here


def rotary_head(c: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the width of the rotary key, from which rotary frequencies follow."""
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
        if c.get(name) is None:
            raise ModelLoadError(f"config.json lacks {name!r}")
    return {"head_dim": c.get("qk_rope_head_dim"), "num_key_value_heads": None}


def latent(c: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek-V2 and its relatives: scores have the squared factor of yarn (2309.00071)."""
    plain, rotated, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
    value = c.get("v_head_dim") or c["hidden_size"] // c["num_attention_heads"]
    settings = rope_settings(c)
    every, factor = settings.get("mscale_all_dim"), settings.get("factor") or 1.0
    growth = 0.1 * every * math.log(factor) + 1.0 if every and factor > 1.0 else 1.0
    return {
        "latent": LatentAttention(rank, rotated, plain, value, c.get("q_lora_rank") or 0),
        "kv_heads": 1,
        "head_dim": rank + rotated,
        "scale": (plain + rotated) ** -0.5 * (growth**2 if settings["rope_type"] != "default" else 1.0),
        "paired": c.get("rope_interleave") is not False,
    }


def minicpm3(c: Mapping[str, Any]) -> dict[str, Any]:
    """MiniCPM3: elements half a head apart are rotated together, and factors of muP."""
    depth, base = c.get("scale_depth"), c.get("dim_model_base")
    factor = depth / math.sqrt(c["num_hidden_layers"]) if depth else 1.0
    return latent(c) | {
        "paired": False,
        "embedding_scale": c.get("scale_emb") or 1.0,
        "factors": BranchFactors(attention=factor, mlp=factor),
        "logit_scale": base / c["hidden_size"] if base else 1.0,
    }


def v2_refuses(c: Mapping[str, Any]) -> str | None:
    """Refuses weights divided by their sum and other choices of experts, which transformers does not compute either."""
    if c.get("topk_method") not in (None, "greedy", "group_limited_greedy"):
        return "topk_method"
    return "norm_topk_prob" if c.get("norm_topk_prob") else None


_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_LATENT = Family(names=TensorNames(qkv=("self_attn.q_proj",)), defaults=_DEFAULTS, derives=rotary_head, fields=latent)

# They are part of the table of families (``table.py``).
LATENT: dict[str, Family] = {
    "deepseek_v2": replace(_LATENT, refuses=v2_refuses),
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": replace(
        _LATENT,
        defaults=_DEFAULTS | {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5},
    ),
    "youtu": replace(_LATENT, defaults=_DEFAULTS | {"tie_word_embeddings": True}),
    "minicpm3": replace(
        _LATENT,
        defaults={
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "scale_emb": 12.0,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        fields=minicpm3,
    ),
}

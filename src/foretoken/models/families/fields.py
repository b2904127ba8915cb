"""Fields of the architecture that config.json files of single families state, beyond Llama's."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from foretoken.core.errors import ModelLoadError
from foretoken.models.families.family import CHUNKED, FULL, SLIDING, Config
from foretoken.models.families.layers import PRE, SANDWICH, BranchFactors, HeadSizes, LayerInputs

_MPT = {"attn_type": "multihead_attention", "alibi": True, "alibi_bias_max": 8}  # defaults of its attn_config


def head_dim(c: Config) -> int:
    return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


# `layer_types` of families whose config.json omits them


def sliding_if_set(c: Config) -> list[str]:
    """Returns sliding windows in all layers if there is a window."""
    return [SLIDING if c.get("sliding_window") else FULL] * c["num_hidden_layers"]


def every(count: int) -> Callable[[Config], list[str]]:
    """Returns a function for a pattern: full attention in each ``count``-th layer, or as the file's pattern says."""

    def kinds(c: Config) -> list[str]:
        pattern = c.get("sliding_window_pattern") or count
        layers = range(c["num_hidden_layers"])
        if isinstance(pattern, str):  # such as "LLLG"
            return [SLIDING if pattern[i % len(pattern)] == "L" else FULL for i in layers]
        return [FULL if (i + 1) % pattern == 0 else SLIDING for i in layers]

    return kinds


def full_first(c: Config) -> list[str]:
    """Returns full attention in the first of every four layers (CWM)."""
    return [SLIDING if i % 4 else FULL for i in range(c["num_hidden_layers"])]


def alternating(c: Config) -> list[str]:
    """Returns GPT-Neo's kinds, which it lists as ``attention_types``: [[["global", "local"], 12]]."""
    groups = c.get("attention_types") or [[["global", "local"], c["num_hidden_layers"] // 2]]
    listed = [kind for pattern, count in groups for _ in range(count) for kind in pattern]
    return [SLIDING if kind == "local" else FULL for kind in listed]


def qwen_kinds(c: Config) -> list[str]:
    """Returns sliding windows from ``max_window_layers`` on, if they are used."""
    first = c.get("max_window_layers", 28) if c.get("use_sliding_window") else c["num_hidden_layers"]
    return [FULL if i < first else SLIDING for i in range(c["num_hidden_layers"])]


def qwen2_moe_kinds(c: Config) -> list[str]:
    """Returns sliding windows in every other layer below ``max_window_layers``, if they are used."""
    last = c["max_window_layers"] if c.get("use_sliding_window") else 0
    return [FULL if i % 2 or i >= last else SLIDING for i in range(c["num_hidden_layers"])]


def smollm3_kinds(c: Config) -> list[str]:
    """Returns sliding windows in the layers without rotation, if they are used."""
    windows = bool(c.get("use_sliding_window"))
    return [FULL if rotates or not windows else SLIDING for rotates in _rotating(c)]


# fields of ``Architecture``


def gemma(c: Config) -> dict[str, Any]:
    """Gemma 1: "gelu" in its files is the tanh approximation."""
    activation = "gelu_pytorch_tanh" if c.get("hidden_act") in (None, "gelu") else c["hidden_act"]
    return {"embedding_scale": c["hidden_size"] ** 0.5, "hidden_act": activation}


def gemma2(c: Config) -> dict[str, Any]:
    return {
        "embedding_scale": c["hidden_size"] ** 0.5,
        "scale": (c.get("query_pre_attn_scalar") or head_dim(c)) ** -0.5,
    } | _caps(c)


def gemma3(c: Config) -> dict[str, Any]:
    """Gemma 3: rotary frequencies of sliding layers differ."""
    return gemma2(c) | sliding_frequencies(c)


def sliding_frequencies(c: Config) -> dict[str, Any]:
    """Separate rotary frequencies for sliding layers (Gemma 3, OLMo 3)."""
    return {"rope": [int(kind == SLIDING) for kind in c["layer_types"]]}


def smollm3(c: Config) -> dict[str, Any]:
    """SmolLM3: some layers have no rotation."""
    return {"rope": [0 if rotates else -1 for rotates in _rotating(c)]}


def only_sliding_rotate(c: Config) -> dict[str, Any]:
    """Layers with full attention have no rotation, if there are others (Cohere 2, EXAONE)."""
    all_full = not c.get("sliding_window") and c["model_type"].startswith("exaone")
    return {"rope": [0 if all_full or kind == SLIDING else -1 for kind in c["layer_types"]]}


def olmo(c: Config) -> dict[str, Any]:
    return {"clip": c.get("clip_qkv") or 0.0}


def glm4_moe(c: Config) -> dict[str, Any]:
    """GLM-4.5: only the larger model has norms of heads."""
    return {"head_norms": "before" if c.get("use_qk_norm") else None}


def gpt_oss(c: Config) -> dict[str, Any]:
    """gpt-oss: the softmax of each head has a sink."""
    return {"sinks": True}


def granite(c: Config) -> dict[str, Any]:
    """Granite: factors of muP; the logits are divided by theirs."""
    return _multipliers(c) | {"logit_scale": 1.0 / (c["logits_scaling"] or 1.0)}


def hyperclovax(c: Config) -> dict[str, Any]:
    """HyperCLOVA X: as Granite, but the factor of the logits multiplies."""
    norms = SANDWICH if c["use_post_norm"] else PRE
    return _multipliers(c) | {"logit_scale": c["logits_scaling"] or 1.0, "norms": norms}


def cohere(c: Config) -> dict[str, Any]:
    head_norms = "before" if c.get("use_qk_norm") else None
    return {"logit_scale": c["logit_scale"] or 1.0, "head_norms": head_norms}


def cohere2(c: Config) -> dict[str, Any]:
    return {"logit_scale": c["logit_scale"] or 1.0} | only_sliding_rotate(c)


def head_norms_if_set(c: Config) -> dict[str, Any]:
    """Norms of heads if ``qk_layernorm`` is set (Phi, Persimmon)."""
    return {"head_norms": "before" if c.get("qk_layernorm") else None}


def stablelm(c: Config) -> dict[str, Any]:
    """StableLM; a parallel layer has one norm."""
    return head_norms_if_set(c) | _shared_norm(c, bool(c.get("use_parallel_residual")))


def gpt_neox(c: Config) -> dict[str, Any]:
    """GPT-NeoX and Pythia; a parallel layer has two norms."""
    return {"parallel": bool(c["use_parallel_residual"])}


def ministral3(c: Config) -> dict[str, Any]:
    """Ministral 3: queries grow with their position."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return {"query_growth": (float(beta), int(length)) if beta and length else None}


def llama4_kinds(c: Config) -> list[str]:
    """Returns chunks in the layers with rotation (Llama 4)."""
    return [CHUNKED if rotates else FULL for rotates in _rotating(c)]


def llama4(c: Config) -> dict[str, Any]:
    """Llama 4: layers without rotation, in which queries grow with their position (2501.19399)."""
    growth = (float(c["attn_scale"]), int(c["floor_scale"]), 1, True)
    return {
        "rope": [0 if rotates else -1 for rotates in _rotating(c)],
        "intermediate": c["intermediate_size_mlp"],
        "head_norms": "after" if c["use_qk_norm"] else None,
        "unit_heads": True,
        "query_growth": growth if c["attn_temperature_tuning"] else None,
    }


def nanochat(c: Config) -> dict[str, Any]:
    """nanochat: rotates backwards."""
    return {"backwards": True} | _caps(c)


def gptj(c: Config) -> dict[str, Any]:
    return {"partial_rotary_factor": (c.get("rotary_dim") or head_dim(c)) / head_dim(c)}


def gpt2(c: Config) -> dict[str, Any]:
    """GPT-2 and GPTBigCode: scores may have no factor."""
    return {} if c["scale_attn_weights"] else {"scale": 1.0}


def gpt_bigcode(c: Config) -> dict[str, Any]:
    return gpt2(c) | {"kv_heads": 1 if c["multi_query"] else c["num_attention_heads"]}


def gpt_neo(c: Config) -> dict[str, Any]:
    """GPT-Neo: scores have no factor."""
    return {"scale": 1.0}


def biogpt(c: Config) -> dict[str, Any]:
    return {"embedding_scale": c["hidden_size"] ** 0.5 if c["scale_embedding"] else 1.0}


def falcon(c: Config) -> dict[str, Any]:
    """Falcon: three layouts of layers, and ALiBi in some."""
    heads, new = c["num_attention_heads"], bool(c["new_decoder_architecture"])
    kv_heads = c.get("num_kv_heads") or heads
    shared = c["parallel_attn"] if not new else c.get("num_ln_in_parallel_attn") == 1
    values = _shared_norm(c, bool(shared)) | {"parallel": new or bool(c["parallel_attn"])}
    if new and not shared:
        values["names"] = {"norm": "ln_attn", "mlp_norm": "ln_mlp"}
    if c.get("alibi"):
        values |= {"rotary": False, "alibi": (_slopes(heads), head_dim(c) ** -0.5, True)}
    return values | {"kv_heads": kv_heads if new else 1 if c["multi_query"] else heads}


def bloom(c: Config) -> dict[str, Any]:
    return {"alibi": (_slopes(c["num_attention_heads"]), 1.0, False)}


def mpt(c: Config) -> dict[str, Any]:
    """MPT: its slopes have another order than BLOOM's."""
    attention, heads = _mpt_attention(c), c["num_attention_heads"]
    count = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** -(i * attention["alibi_bias_max"] / count) for i in range(1, count + 1)]
    if count != heads:
        slopes = [*slopes[1::2], *slopes[::2]][:heads]
    values: dict[str, Any] = {"alibi": (tuple(slopes), 1.0, False), "clip": attention.get("clip_qkv") or 0.0}
    return values | ({"scale": attention["softmax_scale"]} if attention.get("softmax_scale") else {})


# refusals


def bidirectional(c: Config) -> str | None:
    return "use_bidirectional_attention" if c.get("use_bidirectional_attention") else None


def opt_refuses(c: Config) -> str | None:
    """Refuses OPT-350m, whose norms follow the addition and whose embeddings are narrower."""
    if not c["do_layer_norm_before"] or c["remove_final_layer_norm"]:
        return "norms after the addition (do_layer_norm_before)"
    return "word_embed_proj_dim" if c.get("word_embed_proj_dim") not in (None, c["hidden_size"]) else None


def ernie4_5_moe_refuses(c: Config) -> str | None:
    return "use_bias" if c.get("use_bias") else None


def gpt2_refuses(c: Config) -> str | None:
    """Refuses factors of scores by layer, and cross-attention."""
    names = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")
    return next((name for name in names if c.get(name)), None)


def bloom_refuses(c: Config) -> str | None:
    name = "apply_residual_connection_post_layernorm"
    return name if c.get(name) else None


def mpt_refuses(c: Config) -> str | None:
    """Refuses attention other than that of MPT-7B and its relatives."""
    attention = _mpt_attention(c)
    if attention["attn_type"] != "multihead_attention" or not attention["alibi"]:
        return "attn_config"
    return next((name for name in ("qk_ln", "prefix_lm") if attention.get(name)), None)


def _rotating(c: Config) -> list[int]:
    """Returns 1 for each layer with rotary positions and 0 for each without (SmolLM3)."""
    count = c.get("no_rope_layer_interval", 4)
    return c.get("no_rope_layers") or [int((i + 1) % count != 0) for i in range(c["num_hidden_layers"])]


def _mpt_attention(c: Config) -> dict[str, Any]:
    return _MPT | {name: value for name, value in (c.get("attn_config") or {}).items() if value is not None}


def _caps(c: Config) -> dict[str, Any]:
    return {
        "attention_softcap": c.get("attn_logit_softcapping") or 0.0,
        "final_softcap": c.get("final_logit_softcapping") or 0.0,
    }


def _multipliers(c: Config) -> dict[str, Any]:
    factor = c["residual_multiplier"] or 1.0
    return {
        "embedding_scale": c["embedding_multiplier"] or 1.0,
        "factors": BranchFactors(factor, factor, factor),
        "scale": c["attention_multiplier"] or head_dim(c) ** -0.5,
    }


def _shared_norm(c: Config, parallel: bool) -> dict[str, Any]:
    return {"parallel": True, "names": {"mlp_norm": "input_layernorm"}} if parallel else {"parallel": False}


def _slopes(heads: int) -> tuple[float, ...]:
    """Returns ALiBi's slopes (2108.12409): powers of 2^(-8 / n), and every other one of twice as many heads."""
    count = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * i / count) for i in range(1, count + 1)]
    more = [2.0 ** (-4 * i / count) for i in range(1, 2 * min(count, heads - count) + 1, 2)]
    return (*slopes, *more)


GEMMA4_ROPES: dict[str, Any] = {  # of files without rotary settings
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def gemma4_kinds(c: Config) -> list[str]:
    """Returns full attention in each sixth layer and in the last."""
    return [*every(6)({**c, "sliding_window_pattern": None})[:-1], FULL]


def gemma4_derives(c: Config) -> dict[str, Any]:
    """Returns the listed kinds of layers, of which the last is always full, and the numbers of experts."""
    listed, experts = c.get("layer_types"), c.get("num_experts") if c.get("enable_moe_block") else 0
    counts = {"num_experts": experts, "num_experts_per_tok": c.get("top_k_experts")}
    return counts | ({"layer_types": [*listed[:-1], FULL]} if isinstance(listed, list) and listed else {})


def gemma4(c: Config) -> dict[str, Any]:
    """Returns sizes and sources by layer. Layers that read other layers' keys and values may have wider MLPs."""
    sources = _gemma4_sources(c)
    wide = 2 * c["intermediate_size"] if c.get("use_double_wide_mlp") else None
    width = c.get("hidden_size_per_layer_input") or 0
    return sliding_frequencies(c) | {
        "embedding_scale": c["hidden_size"] ** 0.5,
        "scale": 1.0,
        "final_softcap": c.get("final_logit_softcapping") or 0.0,
        "unit_values": True,
        "sizes": _gemma4_sizes(c),
        "source": sources,
        "tied_values": [bool(c.get("attention_k_eq_v")) and kind == FULL for kind in c["layer_types"]],
        "inner": [None if source is None else wide for source in sources],
        "layer_inputs": LayerInputs(width) if width else None,
    }


def gemma4_refuses(c: Config) -> str | None:
    """Refuses attention in both directions, and embeddings of layers for a part of the vocabulary."""
    if c.get("use_bidirectional_attention") == "all":
        return "use_bidirectional_attention: all"
    if c.get("hidden_size_per_layer_input") and c["vocab_size_per_layer_input"] != c["vocab_size"]:
        return "vocab_size_per_layer_input other than vocab_size"
    return None


def _gemma4_sizes(c: Config) -> list[HeadSizes]:
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


def _gemma4_sources(c: Config) -> list[int | None]:
    """Returns for each layer the last one of its kind before the layers that share; None if it does not share."""
    kinds, unshared = c["layer_types"], c["num_hidden_layers"] - (c.get("num_kv_shared_layers") or 0)
    last: Mapping[str, int] = {kind: number for number, kind in enumerate(kinds[: max(unshared, 0)])}
    if unshared < 1 or any(kind not in last for kind in kinds):
        raise ModelLoadError(
            f"config.json has num_kv_shared_layers = {c['num_kv_shared_layers']}, before which not every kind of layer "
            "has keys and values of its own"
        )
    return [None if number < unshared else last[kind] for number, kind in enumerate(kinds)]

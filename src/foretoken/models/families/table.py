"""The families of decoders that our runtime computes: one row each. Defaults are those of transformers."""

from dataclasses import replace
from typing import Any

from foretoken.models.families import fields
from foretoken.models.families.classic import CLASSIC, LAYER_NORM_EPS, layer_normed
from foretoken.models.families.family import CHUNKED, Family
from foretoken.models.families.hybrids import HYBRID, LLAMA, MULTIPLIERS
from foretoken.models.families.latent import LATENT
from foretoken.models.families.layers import POST, PRE, SANDWICH, WITH_ATTENTION

_WINDOWS: dict[str, Any] = {"use_sliding_window": True}
_WINDOW = _WINDOWS | {"sliding_window": 4096}
_GEMMA: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True}
_GEMMA2 = _GEMMA | _WINDOW | {"query_pre_attn_scalar": 256}
_GEMMA_ACTIVATION = {"hidden_act": "hidden_activation"}
_SANDWICH_NAMES = replace(LLAMA, mlp_norm="pre_feedforward_layernorm")
_GEMMA2_FAMILY = Family(
    names=_SANDWICH_NAMES,
    aliases=_GEMMA_ACTIVATION,
    defaults=_GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    norms=SANDWICH,
    norm_offset=1.0,
    kinds=fields.every(2),
    fields=fields.gemma2,
)
_GEMMA4 = Family(
    names=replace(_SANDWICH_NAMES, scalar="layer_scalar"),
    aliases=_GEMMA_ACTIVATION,
    defaults=_GEMMA
    | _WINDOWS
    | {"sliding_window": 512, "num_key_value_heads": 4, "global_head_dim": 512, "rope_parameters": fields.GEMMA4_ROPES},
    norms=SANDWICH,
    head_norms="before",
    kinds=fields.gemma4_kinds,
    derives=fields.gemma4_derives,
    fields=fields.gemma4,
    refuses=fields.gemma4_refuses,
)
_COHERE_DEFAULTS = {"tie_word_embeddings": True, "logit_scale": 0.0625, "rms_norm_eps": 1e-5}
_COHERE = Family(
    names=replace(LLAMA, mlp_norm="input_layernorm"),
    aliases=LAYER_NORM_EPS,
    defaults=_COHERE_DEFAULTS | {"rope_theta": 5e5},
    centered=True,
    parallel=True,
    paired=True,
    fields=fields.cohere,
)
_GLM = {"head_dim": 128, "partial_rotary_factor": 0.5}
_FUSED_MLP = replace(LLAMA, up=("mlp.gate_up_proj",))
_UNGATED = replace(LLAMA, up=("mlp.up_proj",))
_FC = replace(LLAMA, up=("mlp.fc1",), down="mlp.fc2", out="self_attn.dense")
_GPT_OSS = {  # rotary settings
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

FAMILIES: dict[str, Family] = {
    **CLASSIC,
    **HYBRID,
    **LATENT,
    "llama": Family(),
    "mistral": Family(defaults=_WINDOW, kinds=fields.sliding_if_set),
    "phi3": Family(
        names=replace(_FUSED_MLP, qkv=("self_attn.qkv_proj",)), defaults=_WINDOWS, kinds=fields.sliding_if_set
    ),
    "qwen2": Family(kinds=fields.qwen_kinds),
    "qwen3": Family(defaults={"head_dim": 128}, kinds=fields.qwen_kinds, head_norms="before"),
    "qwen3_moe": Family(defaults={"sliding_window": 4096}, kinds=fields.sliding_if_set, head_norms="before"),
    "qwen2_moe": Family(defaults={"sliding_window": 4096}, kinds=fields.qwen2_moe_kinds),
    "mixtral": Family(defaults=_WINDOWS | {"rope_theta": 1e6, "rms_norm_eps": 1e-5}, kinds=fields.sliding_if_set),
    "olmoe": Family(defaults={"rms_norm_eps": 1e-5}, head_norms="all", fields=fields.olmo),
    "granitemoe": Family(defaults=MULTIPLIERS, fields=fields.granite),
    "granitemoeshared": Family(defaults=MULTIPLIERS, fields=fields.granite),
    "gpt_oss": Family(
        defaults=_WINDOWS | {"head_dim": 64, "sliding_window": 128, "rope_theta": 150000.0, "rope_scaling": _GPT_OSS},
        kinds=fields.every(2),
        fields=fields.gpt_oss,
    ),
    "glm4_moe": Family(
        defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}, head_norms="before", fields=fields.glm4_moe
    ),
    "llama4_text": Family(
        names=replace(LLAMA, up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj"),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        paired=True,
        layers={CHUNKED: WITH_ATTENTION},
        kinds=fields.llama4_kinds,
        fields=fields.llama4,
    ),
    "smollm3": Family(
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True}, kinds=fields.smollm3_kinds, fields=fields.smollm3
    ),
    "gemma": Family(defaults=_GEMMA, norm_offset=1.0, fields=fields.gemma),
    "gemma2": _GEMMA2_FAMILY,
    "gemma3_text": Family(
        names=_SANDWICH_NAMES,
        aliases=_GEMMA_ACTIVATION,
        defaults=_GEMMA2 | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        norms=SANDWICH,
        norm_offset=1.0,
        head_norms="before",
        kinds=fields.every(6),
        fields=fields.gemma3,
        refuses=fields.bidirectional,
    ),
    "gemma4_text": replace(
        _GEMMA4, defaults={**_GEMMA4.defaults, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
    ),
    "gemma4_unified_text": replace(_GEMMA4, defaults={**_GEMMA4.defaults, "sliding_window": 1024}),
    "vaultgemma": replace(_GEMMA2_FAMILY, norms=PRE),
    "ministral": Family(defaults=_WINDOW, kinds=fields.sliding_if_set),
    "ministral3": Family(defaults=_WINDOWS | {"head_dim": 128}, kinds=fields.sliding_if_set, fields=fields.ministral3),
    "olmo": Family(defaults={"rms_norm_eps": 1e-5}, centered=True, weightless=True, fields=fields.olmo),
    "olmo2": Family(norms=POST, head_norms="all"),
    "olmo3": Family(
        defaults=_WINDOW | {"rope_theta": 5e5},
        norms=POST,
        head_norms="all",
        kinds=fields.every(4),
        fields=fields.sliding_frequencies,
    ),
    "granite": Family(defaults=MULTIPLIERS, fields=fields.granite),
    "hyperclovax": Family(
        names=replace(LLAMA, after_mixer="post_norm1", after_mlp="post_norm2"),
        defaults=MULTIPLIERS | {"attention_multiplier": None, "use_post_norm": True},
        fields=fields.hyperclovax,
    ),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, defaults=_COHERE_DEFAULTS | _WINDOW, kinds=fields.every(4), fields=fields.cohere2),
    "glm": Family(names=_FUSED_MLP, defaults=_GLM, paired=True),
    "glm4": Family(
        names=replace(_FUSED_MLP, after_mixer="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
        defaults=_GLM,
        norms=SANDWICH,
        paired=True,
    ),
    "ernie4_5": Family(defaults={"head_dim": 128, "rope_theta": 5e5, "tie_word_embeddings": True}, paired=True),
    "ernie4_5_moe": Family(
        aliases={
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
            "n_shared_experts": "moe_num_shared_experts",
            "first_k_dense_replace": "moe_layer_start_index",
            "decoder_sparse_step": "moe_layer_interval",
        },
        defaults={"num_key_value_heads": 4, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        paired=True,
        refuses=fields.ernie4_5_moe_refuses,
    ),
    "exaone4": Family(
        defaults=_WINDOW, norms=POST, head_norms="before", kinds=fields.every(4), fields=fields.only_sliding_rotate
    ),
    "exaone_moe": Family(
        aliases={"n_shared_experts": "num_shared_experts"},
        defaults=_WINDOW | {"rms_norm_eps": 1e-5},
        head_norms="before",
        kinds=fields.every(4),
        fields=fields.only_sliding_rotate,
    ),
    "seed_oss": Family(defaults={"head_dim": 128}),
    "hunyuan_v1_dense": Family(
        names=replace(LLAMA, q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"), head_norms="after"
    ),
    "hy_v3": Family(
        aliases={"n_shared_experts": "num_shared_experts", "routed_scaling_factor": "router_scaling_factor"},
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0},
        head_norms="before",
    ),
    "cwm": Family(
        defaults=_WINDOWS
        | {
            "head_dim": 128,
            "sliding_window": 8192,
            "rope_theta": 1e6,
            "rope_parameters": {
                "rope_theta": 1e6,
                "rope_type": "llama3",
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
        },
        kinds=fields.full_first,
    ),
    "helium": Family(defaults={"head_dim": 128, "rope_theta": 1e5}, paired=True),
    "internlm3": Family(defaults={"head_dim": 128}),
    "iquestcoder": Family(defaults={"head_dim": 128}),
    "arcee": Family(names=_UNGATED, defaults={"hidden_act": "relu2"}, gated=False),
    "jais2": layer_normed(names=_UNGATED, aliases=LAYER_NORM_EPS, defaults={"hidden_act": "relu2"}),
    "nemotron": layer_normed(
        names=_UNGATED,
        aliases={"rms_norm_eps": "norm_eps"},
        defaults={"hidden_act": "relu2", "partial_rotary_factor": 0.5},
        norm_offset=1.0,
    ),
    "nanochat": Family(
        names=replace(LLAMA, up=("mlp.fc1",), down="mlp.fc2", embedding_norm="norm"),
        defaults={"hidden_act": "relu2", "final_logit_softcapping": 15.0},
        weightless=True,
        gated=False,
        head_norms="after",
        fields=fields.nanochat,
    ),
    "starcoder2": layer_normed(
        names=replace(LLAMA, up=("mlp.c_fc",), down="mlp.c_proj"),
        aliases={"rms_norm_eps": "norm_epsilon"},
        defaults=_WINDOWS | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        kinds=fields.sliding_if_set,
    ),
    "stablelm": Family(
        names=replace(LLAMA, q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm"),
        aliases=LAYER_NORM_EPS,
        defaults={"partial_rotary_factor": 0.25, "rms_norm_eps": 1e-5},
        centered=True,
        fields=fields.stablelm,
    ),
    "phi": layer_normed(
        names=replace(
            _FC,
            mlp_norm="input_layernorm",
            last_norm="final_layernorm",
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
        ),
        aliases=LAYER_NORM_EPS,
        defaults={"hidden_act": "gelu_new", "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
        parallel=True,
        fields=fields.head_norms_if_set,
    ),
}
# Language models of multimodal checkpoints, whose rotary positions are plain where there is text alone.
FAMILIES["qwen2_vl_text"] = FAMILIES["qwen2_5_vl_text"] = replace(
    FAMILIES["qwen2"], defaults={"rope_theta": 1e6, "max_window_layers": 80, "sliding_window": 4096}
)
FAMILIES["qwen3_vl_text"] = replace(FAMILIES["qwen3"], defaults={"head_dim": 128, "rope_theta": 5e5})
FAMILIES["glm4v_text"] = replace(FAMILIES["glm4"], defaults={})
FAMILIES["glm_ocr_text"] = FAMILIES["glm4v_text"]
FAMILIES["exaone4_5_text"] = FAMILIES["exaone4"]  # name in older files
FAMILIES["mimo"] = FAMILIES["qwen2"]  # with an MTP layer, which is read apart

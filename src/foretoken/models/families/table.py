"""The families of decoders that our runtime computes: one row each. Defaults are those of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foretoken.models.families import facts, recurrence
from foretoken.models.families.family import Family, TensorNames
from foretoken.models.families.layers import POST, SANDWICH

LLAMA = TensorNames()
_WINDOWS: dict[str, Any] = {"use_sliding_window": True}
_WINDOW = _WINDOWS | {"sliding_window": 4096}
_GEMMA: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True}
_GEMMA2 = _GEMMA | _WINDOW | {"query_pre_attn_scalar": 256}
_CAPPED = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA_ACTIVATION = {"hidden_act": "hidden_activation"}
_SANDWICH_NAMES = replace(LLAMA, mlp_norm="pre_feedforward_layernorm")
_MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_COHERE = {"tie_word_embeddings": True, "logit_scale": 0.0625, "rms_norm_eps": 1e-5}
_SHARED_NORM = replace(LLAMA, mlp_norm="input_layernorm")
_LAYER_NORM_EPS = {"rms_norm_eps": "layer_norm_eps"}
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
_RATIO = {"mlp_ratio": 4}  # where intermediate_size is missing
_GPT2 = TensorNames(
    base="transformer.",
    embedding="wte",
    positions="wpe",
    last_norm="ln_f",
    layer="h.{}.",
    norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
)
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
_GPT2_DEFAULTS = _RATIO | {"hidden_act": "gelu_new", "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
_FAIRSEQ = TensorNames(
    positions="embed_positions",
    last_norm="layer_norm",
    norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    out="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
)
_MEGATRON = TensorNames(
    base="gpt_neox.",
    embedding="embed_in",
    head="embed_out",
    last_norm="final_layer_norm",
    qkv=("attention.query_key_value",),
    by_group=True,
    out="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
_BLOOM = replace(
    _MEGATRON,
    base="transformer.",
    embedding="word_embeddings",
    head="lm_head",
    last_norm="ln_f",
    layer="h.{}.",
    qkv=("self_attention.query_key_value",),
    out="self_attention.dense",
)
_QWEN_HYBRID = Family(
    defaults={
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    norm_offset=1.0,
    head_norms="before",
    mixers={recurrence.LINEAR: "delta"},
    kinds=recurrence.qwen_kinds,
    facts=recurrence.qwen,
)

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(defaults=_WINDOW, kinds=facts.sliding_if_set),
    "phi3": Family(
        names=replace(_FUSED_MLP, qkv=("self_attn.qkv_proj",)), defaults=_WINDOWS, kinds=facts.sliding_if_set
    ),
    "qwen2": Family(kinds=facts.qwen_kinds),
    "qwen3": Family(defaults={"head_dim": 128}, kinds=facts.qwen_kinds, head_norms="before"),
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_5_moe_text": replace(_QWEN_HYBRID, defaults={**_QWEN_HYBRID.defaults, "intermediate_size": 512}),
    "bamba": Family(
        names=replace(
            LLAMA,
            last_norm="final_layernorm",
            mlp_norm="pre_ff_layernorm",
            up=("feed_forward.gate_proj", "feed_forward.up_proj"),
            down="feed_forward.down_proj",
            recurrent="mamba.",
        ),
        defaults={
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        mixers={recurrence.LINEAR: "mamba"},
        kinds=recurrence.bamba_kinds,
        facts=recurrence.bamba,
        refuses=recurrence.bounded_steps,
    ),
    "lfm2": Family(
        names=replace(
            LLAMA,
            last_norm="embedding_norm",
            norm="operator_norm",
            mlp_norm="ffn_norm",
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
            out="self_attn.out_proj",
            up=("feed_forward.w1", "feed_forward.w3"),
            down="feed_forward.w2",
            recurrent="conv.",
        ),
        aliases={"rms_norm_eps": "norm_eps"},
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "conv_L_cache": 3,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
        },
        head_norms="before",
        mixers={recurrence.CONVOLUTION: "convolution"},
        kinds=recurrence.lfm2_kinds,
        facts=recurrence.lfm2,
    ),
    "qwen3_moe": Family(defaults={"sliding_window": 4096}, kinds=facts.sliding_if_set, head_norms="before"),
    "qwen2_moe": Family(defaults={"sliding_window": 4096}, kinds=facts.qwen2_moe_kinds),
    "mixtral": Family(defaults=_WINDOWS | {"rope_theta": 1e6, "rms_norm_eps": 1e-5}, kinds=facts.sliding_if_set),
    "olmoe": Family(defaults={"rms_norm_eps": 1e-5}, head_norms="all", facts=facts.olmo),
    "granitemoe": Family(defaults=_MULTIPLIERS, facts=facts.granite),
    "gpt_oss": Family(
        defaults=_WINDOWS | {"head_dim": 64, "sliding_window": 128, "rope_theta": 150000.0, "rope_scaling": _GPT_OSS},
        kinds=facts.every(2),
        facts=facts.gpt_oss,
    ),
    "glm4_moe": Family(
        defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}, head_norms="before", facts=facts.glm4_moe
    ),
    "smollm3": Family(
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True}, kinds=facts.smollm3_kinds, facts=facts.smollm3
    ),
    "gemma": Family(defaults=_GEMMA, norm_offset=1.0, facts=facts.gemma),
    "gemma2": Family(
        names=_SANDWICH_NAMES,
        aliases=_GEMMA_ACTIVATION,
        defaults=_GEMMA2 | _CAPPED,
        norms=SANDWICH,
        norm_offset=1.0,
        kinds=facts.every(2),
        facts=facts.gemma2,
    ),
    "gemma3_text": Family(
        names=_SANDWICH_NAMES,
        aliases=_GEMMA_ACTIVATION,
        defaults=_GEMMA2 | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        norms=SANDWICH,
        norm_offset=1.0,
        head_norms="before",
        kinds=facts.every(6),
        facts=facts.gemma3,
        refuses=facts.bidirectional,
    ),
    "vaultgemma": Family(
        names=_SANDWICH_NAMES,
        aliases=_GEMMA_ACTIVATION,
        defaults=_GEMMA2 | _CAPPED,
        norm_offset=1.0,
        kinds=facts.every(2),
        facts=facts.gemma2,
    ),
    "ministral": Family(defaults=_WINDOW, kinds=facts.sliding_if_set),
    "ministral3": Family(defaults=_WINDOWS | {"head_dim": 128}, kinds=facts.sliding_if_set, facts=facts.ministral3),
    "olmo": Family(defaults={"rms_norm_eps": 1e-5}, centered=True, weightless=True, facts=facts.olmo),
    "olmo2": Family(norms=POST, head_norms="all"),
    "olmo3": Family(
        defaults=_WINDOW | {"rope_theta": 5e5},
        norms=POST,
        head_norms="all",
        kinds=facts.every(4),
        facts=facts.own_frequencies,
    ),
    "granite": Family(defaults=_MULTIPLIERS, facts=facts.granite),
    "hyperclovax": Family(
        names=replace(LLAMA, after_mixer="post_norm1", after_mlp="post_norm2"),
        defaults=_MULTIPLIERS | {"attention_multiplier": None, "use_post_norm": True},
        facts=facts.hyperclovax,
    ),
    "cohere": Family(
        names=_SHARED_NORM,
        aliases=_LAYER_NORM_EPS,
        defaults=_COHERE | {"rope_theta": 5e5},
        centered=True,
        parallel=True,
        paired=True,
        facts=facts.cohere,
    ),
    "cohere2": Family(
        names=_SHARED_NORM,
        aliases=_LAYER_NORM_EPS,
        defaults=_COHERE | _WINDOW,
        centered=True,
        parallel=True,
        paired=True,
        kinds=facts.every(4),
        facts=facts.cohere2,
    ),
    "glm": Family(names=_FUSED_MLP, defaults=_GLM, paired=True),
    "glm4": Family(
        names=replace(_FUSED_MLP, after_mixer="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
        defaults=_GLM,
        norms=SANDWICH,
        paired=True,
    ),
    "ernie4_5": Family(defaults={"head_dim": 128, "rope_theta": 5e5, "tie_word_embeddings": True}, paired=True),
    "exaone4": Family(
        defaults=_WINDOW,
        norms=POST,
        head_norms="before",
        kinds=facts.every(4),
        facts=facts.only_sliding_rotate,
    ),
    "seed_oss": Family(defaults={"head_dim": 128}),
    "hunyuan_v1_dense": Family(
        names=replace(LLAMA, q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"), head_norms="after"
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
        kinds=facts.full_first,
    ),
    "helium": Family(defaults={"head_dim": 128, "rope_theta": 1e5}, paired=True),
    "internlm3": Family(defaults={"head_dim": 128}),
    "iquestcoder": Family(defaults={"head_dim": 128}),
    "arcee": Family(names=_UNGATED, defaults={"hidden_act": "relu2"}, gated=False),
    "jais2": Family(
        names=_UNGATED,
        aliases=_LAYER_NORM_EPS,
        defaults={"hidden_act": "relu2"},
        centered=True,
        gated=False,
    ),
    "nemotron": Family(
        names=_UNGATED,
        aliases={"rms_norm_eps": "norm_eps"},
        defaults={"hidden_act": "relu2", "partial_rotary_factor": 0.5},
        centered=True,
        norm_offset=1.0,
        gated=False,
    ),
    "nanochat": Family(
        names=replace(LLAMA, up=("mlp.fc1",), down="mlp.fc2", embedding_norm="norm"),
        defaults={"hidden_act": "relu2", "final_logit_softcapping": 15.0},
        weightless=True,
        gated=False,
        head_norms="after",
        facts=facts.nanochat,
    ),
    "starcoder2": Family(
        names=replace(LLAMA, up=("mlp.c_fc",), down="mlp.c_proj"),
        aliases={"rms_norm_eps": "norm_epsilon"},
        defaults=_WINDOWS | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        centered=True,
        gated=False,
        kinds=facts.sliding_if_set,
    ),
    "stablelm": Family(
        names=replace(LLAMA, q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm"),
        aliases=_LAYER_NORM_EPS,
        defaults={"partial_rotary_factor": 0.25, "rms_norm_eps": 1e-5},
        centered=True,
        facts=facts.stablelm,
    ),
    "phi": Family(
        names=replace(
            _FC,
            mlp_norm="input_layernorm",
            last_norm="final_layernorm",
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
        ),
        aliases=_LAYER_NORM_EPS,
        defaults={"hidden_act": "gelu_new", "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
        centered=True,
        parallel=True,
        gated=False,
        facts=facts.head_norms_if_set,
    ),
    "persimmon": Family(
        names=replace(
            _MEGATRON,
            base="model.",
            embedding="embed_tokens",
            head="lm_head",
            last_norm="final_layernorm",
            qkv=("self_attn.query_key_value",),
            out="self_attn.dense",
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
        ),
        aliases=_LAYER_NORM_EPS,
        defaults={"hidden_act": "relu2", "partial_rotary_factor": 0.5, "qk_layernorm": True, "rms_norm_eps": 1e-5},
        centered=True,
        gated=False,
        facts=facts.head_norms_if_set,
    ),
    "gpt_neox": Family(
        names=_MEGATRON,
        aliases=_LAYER_NORM_EPS | {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        defaults={
            "hidden_act": "gelu",
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
            "rms_norm_eps": 1e-5,
        },
        centered=True,
        gated=False,
        facts=facts.gpt_neox,
    ),
    "gptj": Family(
        names=replace(
            _GPT2,
            positions=None,
            mlp_norm="ln_1",
            qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
            out="attn.out_proj",
            up=("mlp.fc_in",),
            down="mlp.fc_out",
        ),
        aliases=_GPT2_ALIASES,
        defaults=_GPT2_DEFAULTS | {"tie_word_embeddings": False, "rotary_dim": 64},
        centered=True,
        parallel=True,
        gated=False,
        paired=True,
        facts=facts.gptj,
    ),
    "gpt2": Family(
        names=replace(_GPT2, transposed=True),
        aliases=_GPT2_ALIASES,
        defaults=_GPT2_DEFAULTS | {"scale_attn_weights": True},
        centered=True,
        gated=False,
        rotary=False,
        facts=facts.gpt2,
        refuses=facts.gpt2_refuses,
    ),
    "gpt_bigcode": Family(
        names=replace(_GPT2, by_group=True),
        aliases=_GPT2_ALIASES,
        defaults=_GPT2_DEFAULTS | {"hidden_act": "gelu_pytorch_tanh", "scale_attn_weights": True, "multi_query": True},
        centered=True,
        gated=False,
        rotary=False,
        facts=facts.gpt_bigcode,
        refuses=facts.gpt2_refuses,
    ),
    "gpt_neo": Family(
        names=replace(
            _GPT2,
            qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
            out="attn.attention.out_proj",
        ),
        aliases={
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "sliding_window": "window_size",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        defaults=_GPT2_DEFAULTS | _WINDOWS | {"sliding_window": 256},
        centered=True,
        gated=False,
        rotary=False,
        kinds=facts.alternating,
        facts=facts.gpt_neo,
    ),
    "opt": Family(
        names=replace(_FAIRSEQ, base="model.decoder.", last_norm="final_layer_norm"),
        aliases={
            "intermediate_size": "ffn_dim",
            "hidden_act": "activation_function",
            "remove_final_layer_norm": "_remove_final_layer_norm",
        },
        defaults={
            "hidden_act": "relu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "do_layer_norm_before": True,
            "remove_final_layer_norm": False,
        },
        centered=True,
        gated=False,
        rotary=False,
        position_offset=2,
        refuses=facts.opt_refuses,
    ),
    "biogpt": Family(
        names=replace(_FAIRSEQ, base="biogpt.", head="output_projection"),
        defaults={
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,  # torch's own, whatever the file's layer_norm_eps is
            "tie_word_embeddings": True,
            "scale_embedding": True,
        },
        centered=True,
        gated=False,
        rotary=False,
        position_offset=2,
        facts=facts.biogpt,
    ),
    "falcon": Family(
        names=replace(_BLOOM, norm="input_layernorm"),
        aliases={
            "hidden_size": "n_embed",
            "intermediate_size": "ffn_hidden_size",
            "hidden_act": "activation",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        defaults=_RATIO
        | {
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "multi_query": True,
            "new_decoder_architecture": False,
            "parallel_attn": True,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        centered=True,
        gated=False,
        facts=facts.falcon,
    ),
    "bloom": Family(
        names=replace(_BLOOM, embedding_norm="word_embeddings_layernorm"),
        aliases={
            "hidden_size": "n_embed",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        defaults=_RATIO
        | {
            "hidden_act": "gelu_new",
            "max_position_embeddings": 1 << 20,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        centered=True,
        gated=False,
        rotary=False,
        facts=facts.bloom,
        refuses=facts.bloom_refuses,
    ),
    "mpt": Family(
        names=TensorNames(
            base="transformer.",
            embedding="wte",
            last_norm="norm_f",
            layer="blocks.{}.",
            norm="norm_1",
            mlp_norm="norm_2",
            qkv=("attn.Wqkv",),
            out="attn.out_proj",
            up=("ffn.up_proj",),
            down="ffn.down_proj",
        ),
        aliases={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        defaults=_RATIO | {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "attn_config": {}},
        centered=True,
        gated=False,
        rotary=False,
        facts=facts.mpt,
        refuses=facts.mpt_refuses,
    ),
}
FAMILIES["gpt-sw3"] = FAMILIES["gpt2"]
# Language models of multimodal checkpoints, whose rotary positions are plain where there is text alone.
FAMILIES["qwen2_vl_text"] = FAMILIES["qwen2_5_vl_text"] = replace(
    FAMILIES["qwen2"], defaults={"rope_theta": 1e6, "max_window_layers": 80, "sliding_window": 4096}
)
FAMILIES["qwen3_vl_text"] = replace(FAMILIES["qwen3"], defaults={"head_dim": 128, "rope_theta": 5e5})
FAMILIES["glm4v_text"] = replace(FAMILIES["glm4"], defaults={})

"""Families with recurrent layers: gated DeltaNet, Mamba-2 or short convolutions, between or beside attention.

They are part of the table of families (``table.py``). Defaults are those of transformers.
"""

from dataclasses import replace

from foretoken.models.families import recurrence
from foretoken.models.families.family import FULL, Family, TensorNames
from foretoken.models.families.layers import LayerKind

LLAMA = TensorNames()
MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_MAMBA = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}
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
    layers={recurrence.LINEAR: LayerKind(recurrent="delta")},
    kinds=recurrence.qwen_kinds,
    fields=recurrence.qwen,
)
_LFM2 = Family(
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
    layers={recurrence.CONVOLUTION: LayerKind(recurrent="convolution")},
    kinds=recurrence.lfm2_kinds,
    fields=recurrence.lfm2,
)

# Bamba's names, and Falcon-H1's.
_FEED_FORWARD = replace(
    LLAMA,
    last_norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    recurrent="mamba.",
)

HYBRID: dict[str, Family] = {
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_5_moe_text": replace(_QWEN_HYBRID, defaults={**_QWEN_HYBRID.defaults, "intermediate_size": 512}),
    "bamba": Family(
        names=_FEED_FORWARD,
        defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, **_MAMBA},
        layers={recurrence.LINEAR: LayerKind(recurrent="mamba")},
        kinds=recurrence.bamba_kinds,
        fields=recurrence.bamba,
        refuses=recurrence.bounded_steps,
    ),
    "granitemoehybrid": Family(
        names=replace(LLAMA, up=("shared_mlp.input_linear",), down="shared_mlp.output_linear", recurrent="mamba."),
        defaults=MULTIPLIERS | _MAMBA | {"shared_intermediate_size": 1024},
        layers={recurrence.LINEAR: LayerKind(recurrent="mamba")},
        kinds=recurrence.all_linear,
        fields=recurrence.granite,
        refuses=recurrence.bounded_steps,
    ),
    "falcon_h1": Family(
        names=_FEED_FORWARD,
        defaults=_MAMBA
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
        },
        layers={"hybrid": LayerKind(attention=True, recurrent="mamba")},
        kinds=recurrence.all_hybrid,
        fields=recurrence.falcon_h1,
        refuses=recurrence.falcon_refuses,
    ),
    "nemotron_h": Family(
        names=TensorNames(
            base="backbone.",
            embedding="embeddings",
            last_norm="norm_f",
            norm="norm",
            mlp_norm="norm",
            qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
            out="mixer.o_proj",
            up=("mixer.up_proj",),
            down="mixer.down_proj",
            recurrent="mixer.",
        ),
        aliases={
            "layer_types": "layers_block_type",
            "hidden_act": "mlp_hidden_act",
            "rms_norm_eps": "layer_norm_epsilon",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "ssm_state_size",
            "mamba_d_conv": "conv_kernel",
        },
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "mamba_n_heads": 128,
            "mamba_head_dim": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
        },
        gated=False,
        rotary=False,
        layers={
            recurrence.LINEAR: LayerKind(recurrent="mamba", mlp=False),
            FULL: LayerKind(attention=True, mlp=False),
            "mlp": LayerKind(),
            "moe": LayerKind(),
        },
        derives=recurrence.nemotron_derives,
        fields=recurrence.nemotron,
        refuses=recurrence.nemotron_refuses,
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "conv_L_cache": 3,
        },
        fields=recurrence.lfm2_moe,
    ),
}

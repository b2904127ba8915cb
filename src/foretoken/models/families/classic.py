"""Families from before Llama: layer norms, ungated MLPs, and learned positions, ALiBi or partial rotation.

They are part of the table of families (``table.py``). Defaults are those of transformers.
"""

from dataclasses import replace
from functools import partial

from foretoken.models.families import fields
from foretoken.models.families.family import Family, TensorNames

layer_normed = partial(Family, centered=True, gated=False)
"""Makes the row of a family with layer norms and ungated MLPs."""
_unrotated = partial(layer_normed, rotary=False)
LAYER_NORM_EPS = {"rms_norm_eps": "layer_norm_eps"}  # the name of that field in many families with layer norms
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

CLASSIC: dict[str, Family] = {
    "persimmon": layer_normed(
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
        aliases=LAYER_NORM_EPS,
        defaults={"hidden_act": "relu2", "partial_rotary_factor": 0.5, "qk_layernorm": True, "rms_norm_eps": 1e-5},
        fields=fields.head_norms_if_set,
    ),
    "gpt_neox": layer_normed(
        names=_MEGATRON,
        aliases=LAYER_NORM_EPS | {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        defaults={
            "hidden_act": "gelu",
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
            "rms_norm_eps": 1e-5,
        },
        fields=fields.gpt_neox,
    ),
    "gptj": layer_normed(
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
        parallel=True,
        paired=True,
        fields=fields.gptj,
    ),
    "gpt2": _unrotated(
        names=replace(_GPT2, transposed=True),
        aliases=_GPT2_ALIASES,
        defaults=_GPT2_DEFAULTS | {"scale_attn_weights": True},
        fields=fields.gpt2,
        refuses=fields.gpt2_refuses,
    ),
    "gpt_bigcode": _unrotated(
        names=replace(_GPT2, by_group=True),
        aliases=_GPT2_ALIASES,
        defaults=_GPT2_DEFAULTS | {"hidden_act": "gelu_pytorch_tanh", "scale_attn_weights": True, "multi_query": True},
        fields=fields.gpt_bigcode,
        refuses=fields.gpt2_refuses,
    ),
    "gpt_neo": _unrotated(
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
        defaults=_GPT2_DEFAULTS | {"use_sliding_window": True, "sliding_window": 256},
        kinds=fields.alternating,
        fields=fields.gpt_neo,
    ),
    "opt": _unrotated(
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
        position_offset=2,
        refuses=fields.opt_refuses,
    ),
    "biogpt": _unrotated(
        names=replace(_FAIRSEQ, base="biogpt.", head="output_projection"),
        defaults={
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,  # torch's own, whatever the file's layer_norm_eps is
            "tie_word_embeddings": True,
            "scale_embedding": True,
        },
        position_offset=2,
        fields=fields.biogpt,
    ),
    "falcon": layer_normed(
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
        fields=fields.falcon,
    ),
    "bloom": _unrotated(
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
        fields=fields.bloom,
        refuses=fields.bloom_refuses,
    ),
    "mpt": _unrotated(
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
        fields=fields.mpt,
        refuses=fields.mpt_refuses,
    ),
}
CLASSIC["gpt-sw3"] = CLASSIC["gpt2"]

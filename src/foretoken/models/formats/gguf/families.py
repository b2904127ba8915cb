"""The architectures of GGUF files that the runtime computes, one row each.

A row names the family, the functions for fields of config.json that only some architectures have, and changes of
llama.cpp's converter that do not follow from the family (``weights.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import shortened
from foretoken.models.families.table import FAMILIES as DECODERS
from foretoken.models.formats.gguf import fields
from foretoken.models.formats.gguf.fields import Fields, positions
from foretoken.models.formats.gguf.header import Header
from foretoken.models.formats.gguf.metadata import Metadata

_NEEDS_OTHER = {  # keys that change the computation: a file with one is refused unless its row reads it
    "expert_count",
    "expert_weights_scale",
    "expert_group_count",
    "moe_latent_size",
    "attention.temperature_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.output_scale",
    "attention.value_scale",
    "attention.shared_kv_layers",
    "attention.rope_pattern",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "embedding_length_per_layer_input",
    "router_logit_softcapping",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "deepstack_mapping",
    "swiglu_clamp_exp",
    "rope.scaling.alpha",
    "adapters.count",
}


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """An architecture of GGUF that the runtime computes."""

    model_type: str  # its name in config.json
    # functions for the fields of config.json that only some architectures have; later ones go first
    reads: tuple[Fields, ...] = ()
    interleaved: bool = False  # whether the rows of queries and keys are stored in pairs (x[i], x[i + head_dim / 2])
    tiled: bool = False  # whether heads of values of recurrent layers are stored in another order (``weights.py``)
    # names of a layer's tensors in the checkpoint that do not follow from the family (``tensor_names.py``), by their
    # names in the file
    renamed: Mapping[str, str] = field(default_factory=dict)


_MLP_NORM = {"post_attention_norm": "post_attention_layernorm"}  # architectures with this name of the MLP's norm
_GRANITE = {
    "ffn_gate": "shared_mlp.gate_proj",
    "ffn_up": "shared_mlp.up_proj",
    "ffn_gate_shexp": "shared_mlp.gate_proj",
    "ffn_up_shexp": "shared_mlp.up_proj",
}
_NORMED, _AS_THEY_ARE = fields.experts(True), fields.experts(False)
_LLAMA = GGUFFamily("llama", interleaved=True)
_MIXTRAL = GGUFFamily("mixtral", (_NORMED,), interleaved=True)
_DELTA = GGUFFamily("qwen3_5_text", (fields.delta,), tiled=True, renamed=_MLP_NORM)
_DELTA_EXPERTS = replace(_DELTA, model_type="qwen3_5_moe_text", reads=(fields.delta, _NORMED))
_NEMOTRON_H = GGUFFamily("nemotron_h", (fields.nemotron_h,), interleaved=True)
_FALCON = GGUFFamily("falcon", (fields.falcon,))
_FALCON_TWO_NORMS = replace(_FALCON, renamed={"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})

FAMILIES = {
    "llama": _LLAMA,
    "mistral": GGUFFamily("mistral", (fields.windows,), interleaved=True),
    "llama4": GGUFFamily("llama4_text", (fields.llama4,)),
    "mistral3": replace(_LLAMA, reads=(fields.ministral3,)),
    "smollm3": GGUFFamily("smollm3", interleaved=True),
    "internlm2": _LLAMA,
    "qwen2": GGUFFamily("qwen2"),
    "qwen2vl": GGUFFamily("qwen2"),
    "qwen3": GGUFFamily("qwen3"),
    "qwen3vl": GGUFFamily("qwen3"),
    "qwen2moe": GGUFFamily("qwen2_moe", (_AS_THEY_ARE,)),
    "qwen3moe": GGUFFamily("qwen3_moe", (_NORMED,)),
    "qwen3next": replace(_DELTA_EXPERTS, model_type="qwen3_next", tiled=False),
    "qwen35": _DELTA,
    "qwen35moe": _DELTA_EXPERTS,
    "olmo": GGUFFamily("olmo", (fields.clip,), interleaved=True),
    "olmo2": GGUFFamily("olmo2", (fields.olmo2,)),
    "olmoe": GGUFFamily("olmoe", (_AS_THEY_ARE, fields.clip)),
    "granite": GGUFFamily("granite", (fields.factors,), interleaved=True),
    "granitemoe": GGUFFamily("granitemoe", (fields.granitemoe,), interleaved=True, renamed=_GRANITE),
    "granitehybrid": GGUFFamily("granitemoehybrid", (fields.granitehybrid,), interleaved=True, renamed=_GRANITE),
    "gpt-oss": GGUFFamily("gpt_oss", (fields.windows, _NORMED), renamed=_MLP_NORM),
    "phi2": GGUFFamily("phi", (fields.normed_heads,)),
    "phi3": GGUFFamily("phi3", (fields.windows,)),
    "gemma": GGUFFamily("gemma"),
    "gemma2": GGUFFamily("gemma2", (fields.gemma2,)),
    "gemma3": GGUFFamily("gemma3_text", (fields.gemma3,)),
    "gemma4": GGUFFamily("gemma4_text", (fields.gemma4,)),
    "chatglm": GGUFFamily("glm"),
    "glm4": GGUFFamily("glm4"),
    "glm4moe": GGUFFamily("glm4_moe", (_AS_THEY_ARE, fields.normed_heads, fields.by_sigmoid), renamed=_MLP_NORM),
    "deepseek2": GGUFFamily("deepseek_v3", (fields.deepseek,)),
    "minicpm3": GGUFFamily("minicpm3", (fields.deepseek,)),
    "lfm2": GGUFFamily("lfm2", (fields.lfm2,)),
    "lfm2moe": GGUFFamily("lfm2_moe", (fields.lfm2, _NORMED, fields.by_sigmoid)),
    "falcon-h1": GGUFFamily("falcon_h1", (fields.falcon_h1,)),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "command-r": GGUFFamily("cohere", (fields.logit_scale, fields.normed_heads)),
    "cohere2": GGUFFamily("cohere2", (fields.windows, fields.logit_scale)),
    "exaone4": GGUFFamily("exaone4", (fields.windows,)),
    "seed_oss": GGUFFamily("seed_oss", renamed=_MLP_NORM),
    "ernie4_5": GGUFFamily("ernie4_5"),
    "ernie4_5-moe": GGUFFamily("ernie4_5_moe", (fields.ernie,)),
    "exaone-moe": GGUFFamily("exaone_moe", (fields.windows, _NORMED, fields.by_sigmoid)),
    "hy_v3": GGUFFamily("hy_v3", (_NORMED, fields.by_sigmoid)),
    "hunyuan-dense": GGUFFamily("hunyuan_v1_dense"),
    "arcee": GGUFFamily("arcee", interleaved=True),
    "jais2": GGUFFamily("jais2"),
    "nemotron": GGUFFamily("nemotron"),
    "starcoder2": GGUFFamily("starcoder2"),
    "stablelm": GGUFFamily("stablelm", (fields.residual, fields.normed_heads)),
    "starcoder": GGUFFamily("gpt_bigcode", (fields.bigcode,)),
    "gpt2": GGUFFamily("gpt2"),
    "gptneox": GGUFFamily("gpt_neox", (fields.residual,)),
    "bloom": GGUFFamily("bloom"),
    "mpt": GGUFFamily("mpt", (fields.mpt,)),
    "falcon": _FALCON,
}


def family_of(header: Header) -> tuple[str, GGUFFamily]:
    """Returns the name of a file's architecture and its description."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelLoadError(
            f"{header.path} has the architecture {shortened(name)}; supported are {', '.join(FAMILIES)}"
        )
    if name == "llama" and header.metadata.get("llama.expert_count"):
        return name, _MIXTRAL
    if name == "falcon" and "blk.0.attn_norm_2.weight" in header.tensors:
        return name, _FALCON_TWO_NORMS
    return name, FAMILIES[name]


def config_of(header: Header) -> dict[str, Any]:
    """Returns the config.json that the metadata describes."""
    name, family = family_of(header)
    m = Metadata(header, name)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{header.path} lacks the matrix token_embd.weight; is it complete?")
    config = {"model_type": family.model_type} | _common(m) | positions(m)
    for read in family.reads:
        config |= read(m)
    _check_keys(m)
    if "kv_lora_rank" not in config and m.get("attention.value_length", default=m.head_dim) != m.head_dim:
        raise ModelLoadError(f"{header.path} has keys and values of different lengths, which is not computed here")
    aliases = DECODERS[config["model_type"]].aliases
    return {aliases.get(key, key): value for key, value in config.items()}


def _common(m: Metadata) -> dict[str, Any]:
    """Returns the fields of config.json that all architectures have, by Llama's names."""
    tensors, kv_heads = m.header.tensors, m.by_layer("attention.head_count_kv")
    inner, epsilons = m.by_layer("feed_forward_length"), ["layer_norm_rms_epsilon", "layer_norm_epsilon"]
    if DECODERS[FAMILIES[m.architecture].model_type].centered:
        epsilons.reverse()
    return {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": m.need("embedding_length"),
        "intermediate_size": max(inner) if inner else m.need("expert_feed_forward_length"),
        "num_hidden_layers": m.layers,
        "num_attention_heads": max(m.need_by_layer("attention.head_count")),
        "num_key_value_heads": max(kv_heads, default=0) or None,
        "head_dim": m.head_dim,
        "max_position_embeddings": m.need("context_length"),
        "rms_norm_eps": m.first_number(*(f"attention.{name}" for name in epsilons)),
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def _check_keys(m: Metadata) -> None:
    """Raises ModelLoadError for a key that changes what is computed and was not read."""
    for key in sorted(_NEEDS_OTHER - m.used):
        if value := m.header.metadata.get(f"{m.architecture}.{key}"):
            raise ModelLoadError(
                f"{m.header.path} has {m.architecture}.{key} = {shortened(value)}, which is not computed here"
            )
    if m.header.metadata.get(f"{m.architecture}.attention.causal") is False:
        raise ModelLoadError(f"{m.header.path} is not a causal language model ({m.architecture}.attention.causal)")

"""Names of a checkpoint's tensors by their names in a GGUF file.

A file has one set of names for all architectures; a checkpoint has those of its family, which the table of families
knows (``TensorNames``, ``ExpertNames``). So names follow from the architecture, with a few exceptions by file.
"""

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from foretoken.models.families.architecture import Architecture
from foretoken.models.families.experts import Experts

_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.(.+)")
_SUFFIXES = (".weight", ".bias")
_IGNORED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}  # part of the configuration
_NEXT = {  # a layer of multi-token prediction, by DeepSeek-V3's names
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
}
_LATENT = {
    "attn_q_a": "q_a_proj",
    "attn_q_a_norm": "q_a_layernorm",
    "attn_q_b": "q_b_proj",
    "attn_kv_a_mqa": "kv_a_proj_with_mqa",
    "attn_kv_a_norm": "kv_a_layernorm",
    "attn_kv_b": "kv_b_proj",
    "attn_k_b": "k_b_proj",
    "attn_v_b": "v_b_proj",
}
_RECURRENT = {  # by names of gated DeltaNet and Mamba-2
    "attn_qkv": "in_proj_qkv",
    "attn_gate": "in_proj_z",
    "ssm_beta": "in_proj_b",
    "ssm_alpha": "in_proj_a",
    "ssm_ba": "in_proj_ba",
    "ssm_conv1d": "conv1d",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
    "shortconv.in_proj": "in_proj",
    "shortconv.conv": "conv",
    "shortconv.out_proj": "out_proj",
}
_BARE = {"ssm_a": "A", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}  # without a suffix in the checkpoint


@dataclass(frozen=True, slots=True)
class Names:
    """Names in a checkpoint by names in the file."""

    ends: Mapping[str, str]  # names of tensors outside of layers
    parts: Mapping[str, str]  # names of a layer's tensors, without suffix
    exact: Mapping[str, str]  # names of a layer's tensors that are not a part with ``.weight`` or ``.bias``
    prefix: str  # prefix of a layer's names in the checkpoint; {} stands for the layer's number

    @staticmethod
    def of(a: Architecture, renamed: Mapping[str, str], stored: Container[str] = ()) -> "Names":
        """Returns the names of an architecture.

        Args:
            renamed: parts whose names in this architecture's files differ.
            stored: names of the file's tensors.
        """
        parts, exact = dict(_parts(a)), dict(_exact(a))
        for experts in {layer.experts for layer in a.stack if layer.experts is not None}:
            joined = any(f"blk.{layer}.ffn_gate_up_exps.weight" in stored for layer in range(a.layers))
            parts |= dict(_expert_parts(experts))
            exact |= dict(_expert_exact(experts, joined))
        parts |= renamed
        return Names(dict(_ends(a)), parts, exact, f"{a.names.base}{a.names.layer}")

    def checkpoint(self, name: str) -> str | None:
        """Returns a tensor's name in the checkpoint; None for a tensor that is not a weight.

        Raises KeyError if the name is unknown.
        """
        if name in _IGNORED or name.endswith(".attn_rot_embd.weight"):
            return None
        block = _BLOCK.fullmatch(name)
        if block is None:
            return self.ends[name]
        layer, rest = block.groups()
        at = self.prefix.format(layer)
        if rest in self.exact:
            return at + self.exact[rest]
        suffix = next((suffix for suffix in _SUFFIXES if rest.endswith(suffix)), "")  # Falcon-H1's ffn_norm has none
        return f"{at}{self.parts[rest.removesuffix(suffix)]}{suffix or '.weight'}"

    def stored(self, name: str) -> str:
        """Returns the name in a file of a checkpoint's tensor.

        Raises KeyError if it is unknown, or a bias that llama.cpp does not read in all architectures.
        """
        ends = {checkpoint_name: at for at, checkpoint_name in self.ends.items()}
        if name in ends:
            return ends[name]
        match = re.fullmatch(re.escape(self.prefix).replace(r"\{\}", "([0-9]+)") + r"(.+)(\.weight|\.bias)", name)
        parts = {checkpoint_name: part for part, checkpoint_name in self.parts.items()}
        if match is None or match[2] not in parts or (match[3] == ".bias" and not parts[match[2]].startswith("attn_")):
            raise KeyError(name)
        return f"blk.{match[1]}.{parts[match[2]]}{match[3]}"


def _ends(a: Architecture) -> Iterator[tuple[str, str]]:
    n, base = a.names, a.names.base
    yield "token_embd.weight", f"{base}{n.embedding}.weight"
    yield "output.weight", f"{n.head}.weight"
    yield "output.bias", f"{n.head}.bias"
    for suffix in _SUFFIXES:
        yield f"output_norm{suffix}", f"{base}{n.last_norm}{suffix}"
        yield f"token_embd_norm{suffix}", f"{base}{n.embedding_norm or n.last_norm}{suffix}"  # the latter: LFM2
    if n.positions:
        yield "position_embd.weight", f"{base}{n.positions}.weight"
    if (inputs := a.layer_inputs) is not None:
        yield "per_layer_token_embd.weight", f"{base}{inputs.table}.weight"
        yield "per_layer_model_proj.weight", f"{base}{inputs.projection}.weight"
        yield "per_layer_proj_norm.weight", f"{base}{inputs.projection_norm}.weight"


def _parts(a: Architecture) -> Iterator[tuple[str, str]]:
    """Yields the parts of layers without experts, and without parts that all families share."""
    n, norms = a.names, {position for layer in a.stack for position in _places(layer.norms)}
    if a.recurrence is not None:
        yield from ((part, n.recurrent + name) for part, name in _RECURRENT.items())
        yield "ssm_in", n.recurrent + ("in_proj_qkvz" if n.recurrent == "linear_attn." else "in_proj")
    if a.latent is not None:
        yield from ((part, f"self_attn.{name}") for part, name in _LATENT.items())
        yield "attn_q", "self_attn.q_proj"
    elif len(n.qkv) > 1:
        yield from zip(("attn_q", "attn_k", "attn_v"), n.qkv, strict=True)
    else:
        yield "attn_qkv", n.qkv[0]
    yield "attn_output", n.out
    if a.head_norms is not None:
        yield from (("attn_q_norm", n.q_norm), ("attn_k_norm", n.k_norm))
    if "after_mlp" in norms:
        yield "post_ffw_norm", n.after_mlp
    if "after_mixer" in norms:
        yield "post_attention_norm", n.after_mixer
    if "mlp" in norms and n.mlp_norm != n.norm:
        yield "ffn_norm", n.mlp_norm
    if "mixer" in norms or "mlp" in norms:
        yield "attn_norm", n.norm
    yield from zip(("ffn_gate", "ffn_up")[-len(n.up) :], n.up, strict=True)
    yield "ffn_down", n.down
    if (inputs := a.layer_inputs) is not None:
        yield from (("inp_gate", inputs.gate), ("proj", inputs.up), ("post_norm", inputs.norm))
    yield from _NEXT.items()


def _places(norms: object) -> list[str]:
    return [position for position in ("mixer", "after_mixer", "mlp", "after_mlp") if getattr(norms, position)]


def _exact(a: Architecture) -> Iterator[tuple[str, str]]:
    """Yields the tensors of layers whose names have no suffix in the checkpoint."""
    if a.sinks:
        yield "attn_sinks.weight", "self_attn.sinks"
    if a.names.scalar is not None:
        yield "layer_output_scale.weight", a.names.scalar
    if a.recurrence is not None:
        yield from ((part, a.names.recurrent + name) for part, name in _BARE.items())


def _expert_parts(e: Experts) -> Iterator[tuple[str, str]]:
    n = e.names
    yield "ffn_gate_inp", n.router
    yield from ((f"{part}_exps", f"{n.experts}.{name}") for part, name in zip(_up(e), n.up, strict=True))
    yield "ffn_down_exps", f"{n.experts}.{n.down}"
    yield "ffn_gate_inp_shexp", f"{n.shared}_gate"
    if len(n.shared_up) == len(_up(e)):
        yield from ((f"{part}_shexp", f"{n.shared}.{name}") for part, name in zip(_up(e), n.shared_up, strict=True))
    yield "ffn_down_shexp", f"{n.shared}.{n.shared_down}"
    if (b := e.beside) is not None:
        yield from (("pre_ffw_norm_2", b.norm), ("post_ffw_norm_1", b.after), ("post_ffw_norm_2", b.after_experts))


def _expert_exact(e: Experts, joined: bool) -> Iterator[tuple[str, str]]:
    n = e.names
    if e.correction:
        yield from (("exp_probs_b.bias", n.correction), ("exp_probs_b", n.correction))
    if joined:
        yield "ffn_gate_up_exps.weight", f"{n.experts}.gate_up_proj"
        yield "ffn_down_exps.weight", f"{n.experts}.down_proj"
    if (b := e.beside) is not None:
        yield from (("ffn_gate_inp.scale", b.scale), ("ffn_down_exps.scale", b.expert_scales))


def _up(e: Experts) -> tuple[str, ...]:
    return ("ffn_gate", "ffn_up") if e.gated else ("ffn_up",)

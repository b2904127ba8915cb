"""Sizes of recurrent token mixers: gated DeltaNet (Qwen3.5), Mamba-2 (Bamba) and short convolutions (LFM2)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from foretoken.models.families import fields
from foretoken.models.families.layers import BranchFactors

LINEAR, CONVOLUTION = "linear_attention", "conv"  # kinds of layers
_NEMOTRON_PATTERN = {"M": LINEAR, "*": "full_attention", "-": "mlp", "E": "moe"}
GATE_UNIT = 32  # the gates of a row are padded to a multiple of this; csrc/mixer_recurrent.hpp has the same number


@dataclass(frozen=True, slots=True)
class MambaFactors:
    """Factors of a Mamba-2 mixer's input, and of the components of its first product."""

    input: float = 1.0
    gate: float = 1.0
    values: float = 1.0
    keys: float = 1.0
    queries: float = 1.0
    step: float = 1.0


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Sizes of a model's recurrent layers, which are all equal.

    A row's *inputs* to a layer are its gates, then the channels that enter the convolution.
    """

    window: int  # number of earlier rows that the convolution reads
    channels: int  # channels of the convolution
    out: int  # width of the mixer's output, before its last matrix
    paired: bool = False  # whether each channel is a product of two inputs
    gates: int = 0  # inputs beside the channels: two for each head of values
    key_heads: int = 0  # heads of queries and of keys; in Mamba-2 the groups of C and B
    value_heads: int = 0  # heads of values; each head of keys serves ``value_heads / key_heads`` of them in a row
    key_dim: int = 0  # width of a head of keys
    value_dim: int = 0  # width of a head of values
    normed: bool = True  # whether outputs are normed: each head's in DeltaNet, each group's in Mamba-2
    norm_first: bool = False  # whether outputs are normed before they are multiplied by their gate
    factors: MambaFactors = MambaFactors()  # factors of the mixer's inputs (Falcon-H1)

    @property
    def gate_factor(self) -> float:
        return self.factors.input * self.factors.gate

    @property
    def step_factor(self) -> float:
        """Factor of a head's step, before its bias is added."""
        return self.factors.input * self.factors.step

    @property
    def inputs(self) -> int:
        """Elements of a row that are kept for one layer."""
        return -(-self.gates // GATE_UNIT) * GATE_UNIT + (1 + self.paired) * self.channels

    @property
    def state(self) -> int:
        """Elements of one layer's state, without the rows of the convolution."""
        return self.value_heads * self.key_dim * self.value_dim


def delta(c: Mapping[str, Any]) -> Recurrence:
    """Returns the sizes of gated DeltaNet (2412.06464) in a Qwen3-Next or Qwen3.5."""
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    key_dim, value_dim = c["linear_key_head_dim"], c["linear_value_head_dim"]
    return Recurrence(
        window=c["linear_conv_kernel_dim"] - 1,
        channels=2 * keys * key_dim + values * value_dim,
        out=values * value_dim,
        gates=2 * values,
        key_heads=keys,
        value_heads=values,
        key_dim=key_dim,
        value_dim=value_dim,
        norm_first=True,
    )


def short_convolution(c: Mapping[str, Any]) -> Recurrence:
    return Recurrence(window=c["conv_L_cache"] - 1, channels=c["hidden_size"], out=c["hidden_size"], paired=True)


def mamba(c: Mapping[str, Any]) -> Recurrence:
    """Returns the sizes of Mamba-2 (2405.21060) in a Bamba. C and B are its queries and keys, x its values."""
    heads, groups, width = c["mamba_n_heads"], c["mamba_n_groups"], c["mamba_d_state"]
    out = c.get("mamba_d_ssm") or c["mamba_expand"] * c["hidden_size"]
    return Recurrence(
        window=c["mamba_d_conv"] - 1,
        channels=out + 2 * groups * width,
        out=out,
        gates=2 * heads,
        key_heads=groups,
        value_heads=heads,
        key_dim=width,
        value_dim=out // heads,
    )


def all_linear(c: Mapping[str, Any]) -> list[str]:
    """Returns a recurrent mixer for each layer (Granite 4)."""
    return [LINEAR] * c["num_hidden_layers"]


def all_hybrid(c: Mapping[str, Any]) -> list[str]:
    """Returns both mixers for each layer (Falcon-H1)."""
    return ["hybrid"] * c["num_hidden_layers"]


def bamba_kinds(c: Mapping[str, Any]) -> list[str]:
    """Returns the kinds of Bamba's layers, which lists those with attention."""
    full = c.get("attn_layer_indices") or ()
    return ["full_attention" if i in full else LINEAR for i in range(c["num_hidden_layers"])]


def bamba(c: Mapping[str, Any]) -> dict[str, Any]:
    return {"recurrence": mamba(c)} if LINEAR in c["layer_types"] else {}


def granite(c: Mapping[str, Any]) -> dict[str, Any]:
    """Granite 4: MLPs without experts have the names and the width of the shared expert."""
    stated = fields.granite(c) | {"intermediate": c["shared_intermediate_size"]}
    return stated | bamba(c) | {"rotary": c.get("position_embedding_type") == "rope"}


def falcon_h1(c: Mapping[str, Any]) -> dict[str, Any]:
    """Falcon-H1: attention and Mamba-2 in each layer, and factors of muP nearly everywhere."""
    gate, values, keys, queries, step = c.get("ssm_multipliers") or (1.0,) * 5
    gate_factor, down = c.get("mlp_multipliers") or (1.0, 1.0)
    into = c.get("attention_in_multiplier") or 1.0
    factors = MambaFactors(c.get("ssm_in_multiplier") or 1.0, gate, values, keys, queries, step)
    normed, first = bool(c["mamba_rms_norm"]), bool(c["mamba_norm_before_gate"])
    return {
        "recurrence": replace(mamba(c), normed=normed, norm_first=first, factors=factors),
        "factors": BranchFactors(
            attention=into * (c.get("attention_out_multiplier") or 1.0),
            recurrent=c.get("ssm_out_multiplier") or 1.0,
            mlp=down,
        ),
        "attention_input": into,
        "scale": fields.head_dim(c) ** -0.5 * into**2 * (c.get("key_multiplier") or 1.0),
        "gate_factor": gate_factor,
        "embedding_scale": c.get("embedding_multiplier") or 1.0,
        "logit_scale": c.get("lm_head_multiplier") or 1.0,
        "multiplied": bool(c.get("factors_in_weights")),
    }


def nemotron_derives(c: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the kinds of Nemotron-H's layers, which older files have as a pattern, and their number."""
    kinds, pattern = c.get("layer_types"), c.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        kinds = [_NEMOTRON_PATTERN.get(letter, letter) for letter in pattern]
    if kinds is None and pattern is None:
        kinds = [LINEAR, "moe", "full_attention", "mlp"]  # transformers' default
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)} if isinstance(kinds, list) else {}


def nemotron(c: Mapping[str, Any]) -> dict[str, Any]:
    return bamba({**c, "mamba_d_ssm": c["mamba_n_heads"] * c["mamba_head_dim"]})


def nemotron_refuses(c: Mapping[str, Any]) -> str | None:
    """Refuses experts that work on a projection of the row, other activations of Mamba-2, and bounds of its steps."""
    if c.get("moe_latent_size") is not None:
        return "moe_latent_size"
    return "mamba_hidden_act" if c.get("mamba_hidden_act") not in (None, "silu", "swish") else bounded_steps(c)


def falcon_refuses(c: Mapping[str, Any]) -> str | None:
    """Refuses activations of Mamba-2 other than SiLU, and bounds of its steps."""
    return "hidden_act" if c.get("hidden_act") not in (None, "silu", "swish") else bounded_steps(c)


def bounded_steps(c: Mapping[str, Any]) -> str | None:
    unbounded = {"__float__": "Infinity"}, math.inf  # as transformers writes it
    low, high = c.get("time_step_limit") or (0.0, math.inf)
    return None if low == 0.0 and high in unbounded else "bounds of the steps of Mamba-2"


def qwen_kinds(c: Mapping[str, Any]) -> list[str]:
    """Returns the kinds of Qwen3-Next's layers: full attention in each fourth one."""
    every = c.get("full_attention_interval") or 4
    return [LINEAR if (i + 1) % every else "full_attention" for i in range(c["num_hidden_layers"])]


def qwen(c: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5: attention has a gate for its output."""
    stated: dict[str, Any] = {"gated_attention": True}
    return stated | ({"recurrence": delta(c)} if LINEAR in c["layer_types"] else {})


def lfm2_kinds(c: Mapping[str, Any]) -> list[str]:
    """Returns the kinds of LFM2's layers; older files list those with attention."""
    full = c.get("full_attn_idxs")
    layers = range(c["num_hidden_layers"])
    return ["full_attention" if full is None or i in full else CONVOLUTION for i in layers]


def lfm2(c: Mapping[str, Any]) -> dict[str, Any]:
    """LFM2: the width of its MLPs may be derived from ``block_ff_dim``."""
    width = c.get("block_ff_dim") or c["intermediate_size"]
    if c["block_auto_adjust_ff_dim"]:
        width, unit = int(2 * width / 3), c["block_multiple_of"]
        if c.get("block_ffn_dim_multiplier") is not None:
            width = -(-int(c["block_ffn_dim_multiplier"] * width) // unit) * unit
    return {"intermediate": width} | lfm2_moe(c)


def lfm2_moe(c: Mapping[str, Any]) -> dict[str, Any]:
    stated: dict[str, Any] = {"tied": bool(c.get("tie_embedding", c.get("tie_word_embeddings")))}
    return stated | ({"recurrence": short_convolution(c)} if CONVOLUTION in c["layer_types"] else {})

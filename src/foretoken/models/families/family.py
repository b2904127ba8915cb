"""A row of the table of families: properties of every checkpoint of a model type."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from foretoken.models.families.layers import PRE, Layer, LayerKind, NormPlaces

Config = Mapping[str, Any]
HeadNorms = Literal["before", "after", "all"]
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of a checkpoint's tensors, without ``.weight`` and ``.bias``."""

    base: str = "model."  # prefix of all names but the head's; a checkpoint of the bare model has none
    embedding: str = "embed_tokens"
    positions: str | None = None  # table of learned positions; None for none
    embedding_norm: str | None = None
    last_norm: str | None = "norm"  # norm after the last layer; None for none
    head: str = "lm_head"
    layer: str = "layers.{}."  # prefix of a layer's names, which are relative to it
    norm: str = "input_layernorm"
    after_mixer: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    after_mlp: str = "post_feedforward_layernorm"
    # queries, keys and values, or one matrix of them all
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    # whether that matrix has, for each head of keys, its queries, its keys and its values; otherwise all queries, all
    # keys, all values
    by_group: bool = False
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # gate and up, one matrix of both, or up alone
    down: str = "mlp.down_proj"
    recurrent: str = "linear_attn."  # prefix of the names of a recurrent mixer
    scalar: str | None = None  # factor of the residual stream after a layer; None for none
    transposed: bool = False  # whether matrices are stored as [in, out] (GPT-2)
    # queries, keys, values, output and norm of attention over an encoder's states; empty for none
    cross: tuple[str, ...] = ()
    # T5's biases by bucket of distance; None for none; a layer without them has those of the first
    relative: str | None = None

    def qkv_of(self, layer: Layer) -> tuple[str, ...]:
        """Returns the names of the matrices of queries, keys and values that a layer multiplies its input with."""
        if layer.source is not None:
            return self.qkv[:1]
        return (*self.qkv[:2], self.qkv[1]) if layer.tied_values else self.qkv


def group_order(heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """Returns the index in the checkpoint of each row of queries, keys and values; see ``TensorNames.by_group``."""
    group = heads // kv_heads
    rows = torch.arange((heads + 2 * kv_heads) * head_dim).view(kv_heads, group + 2, head_dim)
    return torch.cat([part.flatten() for part in (rows[:, :group], rows[:, group], rows[:, group + 1])])


def no_fields(config: Config) -> dict[str, Any]:
    """Returns nothing: a family whose config.json has no fields beyond Llama's."""
    return {}


def supported(config: Config) -> str | None:
    """Returns None: every config.json of this family is computed."""
    return None


def all_full(config: Config) -> list[str]:
    return [FULL] * config["num_hidden_layers"]


@dataclass(frozen=True, slots=True)
class Family:
    """A model type."""

    names: TensorNames = field(default_factory=TensorNames)  # names of the tensors
    # this family's names of config.json's fields, by Llama's names
    aliases: Mapping[str, str] = field(default_factory=dict)
    # transformers' values of missing fields, by Llama's names
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norms: NormPlaces = PRE  # which norms a layer has
    centered: bool = False  # whether norms are layer norms
    norm_offset: float = 0.0  # is added to stored norm weights
    weightless: bool = False  # whether norms have no weights
    parallel: bool = False  # whether MLP and attention read the same input
    gated: bool = True  # whether MLPs are gated
    paired: bool = False  # whether rotary pairs are elements 2i and 2i + 1 of a head; otherwise i and i + half
    # whether queries and keys are normed before or after rotation, or as a whole; None for no norm
    head_norms: HeadNorms | None = None
    rotary: bool = True  # whether positions are rotary
    position_offset: int = 0  # row of the first position in the table of learned positions
    # kinds of layers by name, unless they are attention and an MLP
    layers: Mapping[str, LayerKind] = field(default_factory=dict)
    # returns the kind of each layer for a config.json that does not list them
    kinds: Callable[[Config], list[str]] = all_full
    # returns fields of config.json, by Llama's names, that follow from others
    derives: Callable[[Config], dict[str, Any]] = no_fields
    # returns values of config.json beyond Llama's: for fields of ``Architecture`` and of this class, and for each layer
    # ``rope``, the index of its rotary frequencies, and ``sizes``, ``source``, ``tied_values`` and ``inner`` of
    # ``Layer``
    fields: Callable[[Config], dict[str, Any]] = no_fields
    # returns the reason that a config.json is not computed here; None if it is computed
    refuses: Callable[[Config], str | None] = supported

"""Widening of hybrid mixtures of experts: usual sizes, checks, and the checkpoint to write."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import torch

from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.train.hybrid.model import HybridModel
from foretoken.train.hybrid.shape import HybridShape
from foretoken.train.shards import CheckpointPlan, ShardReader
from foretoken.train.widen.stream import WideStream
from foretoken.train.widen.tensors_hybrid import HybridWidener, positions

# Hidden size, layers, experts, units of an expert and of the shared one. Heads follow from their size.
PRESETS = {
    "0.5b-a0.1b": (1024, 8, 64, 256, 256),
    "3b-a0.5b": (2048, 16, 64, 384, 512),
}


def like(name: str, head_dim: int) -> HybridShape:
    """Returns the shape of a usual hybrid. name: a key of ``PRESETS``, which says all parameters and those of a row."""
    hidden, layers, experts, units, shared = PRESETS[name]
    heads = hidden // head_dim
    return HybridShape(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads // 2,
        num_key_value_heads=max(1, heads // 8),
        head_dim=head_dim,
        linear_num_key_heads=heads // 2,
        linear_num_value_heads=heads,
        linear_head_dim=head_dim,
        num_experts=experts,
        moe_intermediate_size=units,
        shared_expert_intermediate_size=shared,
    )


def checked(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a hybrid. Raises InvalidRequest for one that cannot be widened."""
    if config.get("quantization_config"):
        raise InvalidRequest("cannot widen a quantized model; pass its original checkpoint")
    if config["linear_key_head_dim"] != config["linear_value_head_dim"]:
        raise InvalidRequest("cannot widen a hybrid whose linear keys and values have other sizes")
    if HybridShape.of(config).layer_types != config["layer_types"]:
        raise InvalidRequest("cannot widen a hybrid unless every fourth layer, and no other, has full attention")
    return config


def fitted(config: dict[str, Any], shape: HybridShape) -> HybridShape:
    """Returns ``shape`` with the sizes that stay the source's: of heads, positions, and experts a row takes."""
    narrow = HybridShape.of(config)
    kept = ("head_dim", "linear_head_dim", "num_experts_per_tok", "max_position_embeddings")
    return replace(shape, **{name: getattr(narrow, name) for name in kept})


def plan(reader: ShardReader, config: dict[str, Any], shape: HybridShape, seed: int) -> CheckpointPlan:
    """Returns the checkpoint of a hybrid of ``shape`` that computes what the source computes.

    Raises:
        InvalidRequest: The source cannot be widened to ``shape``.
        ModelLoadError: The weights do not fit the config.
    """
    _check(config, shape)
    embedding = reader.shape("model.embed_tokens.weight")
    if embedding != (config["vocab_size"], config["hidden_size"]):
        raise ModelLoadError(
            f"model.embed_tokens.weight is {embedding}, but config.json says "
            f"{config['vocab_size']} x {config['hidden_size']}"
        )
    generator = torch.Generator().manual_seed(seed)
    groups = shape.num_experts // config["num_experts"]
    stream = WideStream.drawn(config["hidden_size"], shape.hidden_size, groups, config["rms_norm_eps"], generator)
    scale = 0.02 * stream.scale / math.sqrt(2 * shape.num_hidden_layers)
    dtype, mtp = reader.get("model.embed_tokens.weight").dtype, "mtp.fc.weight" in reader.names
    widener = HybridWidener(reader, config, shape, stream, generator, scale, dtype)
    return CheckpointPlan(
        parameters=expected_parameters(config, shape, mtp),
        dtype=dtype,
        config=wide_config(config, shape),
        layers=positions(config["num_hidden_layers"], shape.num_hidden_layers),
        tensors=widener.tensors(mtp),
    )


def wide_config(config: dict[str, Any], shape: HybridShape) -> dict[str, Any]:
    """Returns the source's config with the new sizes. Tokens, rotary settings and the eps of norms stay."""
    sizes = {name: size for name, size in asdict(shape).items() if name in config}
    return config | sizes | {"layer_types": shape.layer_types, "tie_word_embeddings": False}


def expected_parameters(config: dict[str, Any], shape: HybridShape, mtp: bool) -> int:
    """Returns the number of parameters of the wide model."""
    with torch.device("meta"):
        model = HybridModel(wide_config(config, shape))
    counted = sum(p.numel() for name, p in model.named_parameters() if mtp or not name.startswith("mtp."))
    return counted + int(config["vocab_size"]) * shape.hidden_size  # the vocabulary head


def _check(config: dict[str, Any], shape: HybridShape) -> None:
    narrow = HybridShape.of(config)
    for name, size in vars(narrow).items():
        if (wide := getattr(shape, name)) < size:
            raise InvalidRequest(f"{name} {wide} is less than the source's {size}; a model can only grow")
    for wide, size, what in (
        (shape.num_experts, narrow.num_experts, "experts"),
        (shape.num_hidden_layers, 4, "layers, since every fourth has attention"),
    ):
        if wide % size:
            raise InvalidRequest(f"{wide} is not a multiple of {size} {what}")
    groups = shape.num_experts // narrow.num_experts
    if groups > 1 and shape.hidden_size < narrow.hidden_size + groups:
        raise InvalidRequest(f"hidden_size {shape.hidden_size} leaves no room for the numbers that choose the experts")
    for heads, keys, own, own_keys in (
        (shape.num_attention_heads, shape.num_key_value_heads, narrow.num_attention_heads, narrow.num_key_value_heads),
        (
            shape.linear_num_value_heads,
            shape.linear_num_key_heads,
            narrow.linear_num_value_heads,
            narrow.linear_num_key_heads,
        ),
    ):
        if heads // keys < own // own_keys:
            raise InvalidRequest(f"{heads // keys} heads per key head are fewer than the source's {own // own_keys}")
        if heads // keys == 1 and (keys > own_keys or shape.num_hidden_layers > narrow.num_hidden_layers):
            raise InvalidRequest("a key head with one query head cannot be added so that it cancels; ask for fewer")

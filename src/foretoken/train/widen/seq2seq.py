"""Widening of T5: usual sizes, checks, and the checkpoint to write."""

from __future__ import annotations

import math
from typing import Any

import torch

from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.schema import parse
from foretoken.models.families.schema import T5Config
from foretoken.train.seq2seq import T5Shape
from foretoken.train.shards import CheckpointPlan, ShardReader
from foretoken.train.widen.tensors import Widener, layer_positions, rotation
from foretoken.train.widen.tensors_seq2seq import tensors

# d_model, d_ff, layers of each stack. Heads follow from the source's head size.
PRESETS = {
    "t5-base": (768, 2048, 12),
    "t5-large": (1024, 2816, 24),
}
_DEFAULTS = {
    "feed_forward_proj": "relu",
    "layer_norm_epsilon": 1e-6,
    "tie_word_embeddings": True,
    "d_kv": 64,
    "relative_attention_num_buckets": 32,
}


def like(name: str, head_dim: int) -> T5Shape:
    """Returns the shape of a usual T5. name: a key of ``PRESETS``."""
    hidden, neurons, layers = PRESETS[name]
    return T5Shape(hidden, neurons, layers, layers, hidden // head_dim, head_dim)


def checked(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a T5 with defaults filled in, and ``head_dim``. Raises InvalidRequest if quantized."""
    if config.get("quantization_config"):
        raise InvalidRequest("cannot widen a quantized model; pass its original checkpoint")
    config = _DEFAULTS | config
    parse(T5Config, config, "config.json")
    if config.get("num_decoder_layers") is None:
        config["num_decoder_layers"] = config["num_layers"]
    return config | {"head_dim": config["d_kv"]}


def plan(reader: ShardReader, config: dict[str, Any], shape: T5Shape, seed: int) -> CheckpointPlan:
    """Returns the checkpoint of a T5 of ``shape`` that computes what the source computes.

    Raises:
        InvalidRequest: The source cannot be widened to ``shape``.
        ModelLoadError: The weights do not fit the config.
    """
    _check(config, shape)
    if (actual := reader.shape("shared.weight")) != (config["vocab_size"], config["d_model"]):
        raise ModelLoadError(
            f"shared.weight is {actual}, but config.json says {config['vocab_size']} x {config['d_model']}"
        )
    layers = {
        "encoder": layer_positions(config["num_layers"], shape.num_layers),
        "decoder": layer_positions(config["num_decoder_layers"], shape.num_decoder_layers),
    }
    real = {stack: {at: i for i, at in enumerate(places)} for stack, places in layers.items()}
    generator = torch.Generator().manual_seed(seed + 1)
    scale = 0.02 / math.sqrt(2 * max(shape.num_layers, shape.num_decoder_layers))
    widener = Widener(rotation(config["d_model"], shape.d_model, seed), generator, scale)
    return CheckpointPlan(
        parameters=expected_parameters(config, shape),
        dtype=reader.get("shared.weight").dtype,
        config=wide_config(config, shape),
        layers=layers,
        tensors=tensors(reader, widener, config, shape, real),
    )


def wide_config(config: dict[str, Any], shape: T5Shape) -> dict[str, Any]:
    """Returns the source's config with the new sizes, untied as in T5 v1.1."""
    eps = config["layer_norm_epsilon"] * config["d_model"] / shape.d_model
    kept = {k: v for k, v in config.items() if k not in ("head_dim", "scale_decoder_outputs")}
    fixed = {"architectures": ["T5ForConditionalGeneration"], "tie_word_embeddings": False}
    return kept | vars(shape) | fixed | {"layer_norm_epsilon": eps}


def expected_parameters(config: dict[str, Any], shape: T5Shape) -> int:
    """Returns the number of parameters of the wide model."""
    hidden, heads = shape.d_model, shape.num_heads
    attention = 4 * hidden * heads * shape.d_kv
    neurons = (3 if config["feed_forward_proj"].startswith("gated") else 2) * hidden * shape.d_ff
    encoder = shape.num_layers * (attention + neurons + 2 * hidden)
    decoder = shape.num_decoder_layers * (2 * attention + neurons + 3 * hidden)
    ends = 2 * config["vocab_size"] * hidden + 2 * hidden + 2 * config["relative_attention_num_buckets"] * heads
    return encoder + decoder + ends


def _check(config: dict[str, Any], shape: T5Shape) -> None:
    if config["model_type"] != "t5":
        raise InvalidRequest(f"a {config['model_type']!r} model cannot grow to the size of a T5; choose another size")
    for name, value in vars(shape).items():
        if value < config[name]:
            raise InvalidRequest(f"{name} {value} is less than the source's {config[name]}; a model can only grow")
    if shape.d_kv != config["d_kv"]:
        raise InvalidRequest(f"d_kv {shape.d_kv} is not the source's {config['d_kv']}; the size of a head stays")
    deeper = (shape.num_layers, shape.num_decoder_layers) != (config["num_layers"], config["num_decoder_layers"])
    if deeper and shape.num_heads < 2 * config["num_heads"]:
        raise InvalidRequest(
            f"{shape.num_heads} heads are fewer than twice the source's {config['num_heads']}; "
            "the heads of further layers cancel in pairs that share a column of the position biases"
        )

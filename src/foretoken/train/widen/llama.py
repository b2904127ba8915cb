"""Widening of Llamas: usual sizes, checks, and the checkpoint to write. The mathematics is in ``widen.units``."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from foretoken.core.errors import InvalidRequest
from foretoken.core.schema import parse
from foretoken.models.families.schema import CausalConfig
from foretoken.models.families.table import FAMILIES
from foretoken.models.formats.reader import TensorReader
from foretoken.train.widen.units import (
    CheckpointPlan,
    RotatedStream,
    Tensors,
    UnitWidener,
    check_embedding,
    check_growth,
    check_wide_groups,
    copies,
    filler_scale,
    key_heads,
    layer_positions,
    query_heads,
    rotation,
)

# Hidden size, intermediate size, layers. Heads follow from the source's head size, four per key head.
PRESETS = {
    "0.7b": (2048, 5632, 16),
    "1b": (2048, 8192, 16),
    "3b": (3072, 8192, 28),
    "7b": (4096, 14336, 32),
}
USUAL = "0.7b"


@dataclass(frozen=True)
class WideShape:
    """Size of the wide model. The size of an attention head stays the source's."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int


SHAPE = WideShape


def like(name: str, head_dim: int) -> WideShape:
    """Returns the shape of a usual Llama. name: a key of ``PRESETS``."""
    hidden, intermediate, layers = PRESETS[name]
    heads = hidden // head_dim
    return WideShape(hidden, intermediate, layers, heads, max(1, heads // 4))


def fitted(shape: WideShape, config: dict[str, Any]) -> WideShape:
    """Returns a shape of about that size for a source, which may have more layers, heads or units.

    More layers than the usual model's are made narrower, so that the layers keep about the same number of parameters.
    """
    head_dim = config["head_dim"]
    layers, groups = max(shape.num_hidden_layers, config["num_hidden_layers"]), config["num_key_value_heads"]
    per = max(4, config["num_attention_heads"] // groups)  # query heads of each key head
    hidden = max(shape.hidden_size * math.sqrt(shape.num_hidden_layers / layers), config["hidden_size"])
    wide_groups = max(round(hidden / head_dim / per), groups, math.ceil(config["hidden_size"] / head_dim / per))
    hidden_size = wide_groups * per * head_dim
    units = round(hidden_size * shape.intermediate_size / shape.hidden_size / 64) * 64
    return WideShape(hidden_size, max(units, config["intermediate_size"]), layers, wide_groups * per, wide_groups)


def checked(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a plain Llama with defaults filled in. Raises InvalidRequest for other layers."""
    for key in ("attention_bias", "mlp_bias", "quantization_config", "sliding_window"):
        if config.get(key):
            raise InvalidRequest(f"cannot widen a model with {key}={config[key]!r}; only plain layers can be")
    parse(CausalConfig, {**FAMILIES[config["model_type"]].defaults, **config}, "config.json")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if config.get("head_dim") is None:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    return config


def plan(reader: TensorReader, config: dict[str, Any], shape: WideShape, seed: int) -> CheckpointPlan:
    """Returns the checkpoint of a Llama of ``shape`` that computes the same as the source."""
    check(config, shape)
    if odd := sorted(n for n in reader.weights if n.endswith(".bias") or "q_norm" in n or "k_norm" in n):
        raise InvalidRequest(f"cannot widen a model with {odd[0]}; only plain Llama layers are handled")
    check_embedding(reader, "model.embed_tokens.weight", config["vocab_size"], config["hidden_size"])
    return CheckpointPlan(
        parameters=expected_parameters(config, shape),
        dtype=reader.get("model.embed_tokens.weight").dtype,
        config=wide_config(config, shape),
        layers=layer_positions(config["num_hidden_layers"], shape.num_hidden_layers),
        tensors=_tensors(reader, config, shape, seed),
    )


def check(config: dict[str, Any], shape: WideShape) -> None:
    """Raises InvalidRequest if a source with this config cannot be widened to ``shape``."""
    check_growth(shape, config)
    heads, narrow = shape.num_attention_heads, (config["num_attention_heads"], config["num_key_value_heads"])
    deeper = shape.num_hidden_layers > config["num_hidden_layers"]
    check_wide_groups((heads, shape.num_key_value_heads), narrow, deeper)
    if shape.hidden_size % heads:
        raise InvalidRequest(
            f"hidden_size {shape.hidden_size} is not a multiple of {heads} heads; transformers needs it"
        )


def wide_config(config: dict[str, Any], shape: WideShape) -> dict[str, Any]:
    """Returns the source's config with the new sizes. Tokens, positions and rotary settings stay."""
    eps = config.get("rms_norm_eps", 1e-6) * config["hidden_size"] / shape.hidden_size
    kept = {k: v for k, v in config.items() if k not in ("sliding_window", "layer_types")}
    fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": config["head_dim"]}
    return kept | asdict(shape) | fixed | {"rms_norm_eps": eps, "tie_word_embeddings": False}


def expected_parameters(config: dict[str, Any], shape: WideShape) -> int:
    hidden, head = shape.hidden_size, config["head_dim"]
    attention = 2 * hidden * head * (shape.num_attention_heads + shape.num_key_value_heads)
    layer = attention + 3 * hidden * shape.intermediate_size + 2 * hidden
    return shape.num_hidden_layers * layer + 2 * config["vocab_size"] * hidden + hidden


def _tensors(reader: TensorReader, config: dict[str, Any], shape: WideShape, seed: int) -> Tensors:
    stream = RotatedStream(rotation(config["hidden_size"], shape.hidden_size, seed))
    generator = torch.Generator().manual_seed(seed + 1)
    widener = UnitWidener(reader, stream, generator, filler_scale(shape.num_hidden_layers))
    embedding = reader.get("model.embed_tokens.weight")
    yield "model.embed_tokens.weight", stream.embedding(embedding)
    real = {at: i for i, at in enumerate(layer_positions(config["num_hidden_layers"], shape.num_hidden_layers))}
    for at in range(shape.num_hidden_layers):
        source = f"model.layers.{real[at]}." if at in real else None
        for name, tensor in _layer(widener, config, shape, source):
            yield f"model.layers.{at}.{name}", tensor
    yield "model.norm.weight", torch.ones(stream.wide)
    head = reader.get("lm_head.weight") if "lm_head.weight" in reader.weights else embedding
    yield "lm_head.weight", stream.reads(head, reader.get("model.norm.weight"))


def _layer(widener: UnitWidener, config: dict[str, Any], shape: WideShape, source: str | None) -> Tensors:
    """Yields the tensors of one wide layer. source: prefix of the real layer, None for a layer of fillers."""
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    heads, groups, units = (config[name] if source is not None else 0 for name in sizes)
    queries = query_heads(heads, groups, shape.num_attention_heads, shape.num_key_value_heads)
    keys, neurons = key_heads(groups, shape.num_key_value_heads), copies(units, shape.intermediate_size)
    for norm, block, inputs, output, last_units, size in (
        ("input_layernorm", "self_attn", {"q": queries, "k": keys, "v": keys}, "o", queries, config["head_dim"]),
        ("post_attention_layernorm", "mlp", {"gate": neurons, "up": neurons}, "down", neurons, 1),
    ):
        yield f"{norm}.weight", torch.ones(widener.stream.wide)
        matrices = [(f"{block}.{name}_proj.weight", which, size) for name, which in inputs.items()]
        last = f"{block}.{output}_proj.weight", last_units, size
        yield from widener.block(source, matrices, last, widener.get(source, f"{norm}.weight"))

"""Widening of T5: usual sizes, checks, and the checkpoint to write. See ``widen.units`` for the method.

Encoder and decoder are rotated by the same Q, because they share the embedding. The cross-attention's keys and values
read the encoder's last norm, the output matrix reads the decoder's. Attention is not scaled by 1/sqrt(d), so it does
not depend on a width.

Position biases are one table per stack, in its first layer, with a column per head for all layers. Heads that cancel
must have equal columns. So the wide heads form groups, one per real head, that share its column, and additional heads
cancel within a group.
"""

from typing import Any

import torch

from foretoken.core.errors import InvalidRequest
from foretoken.core.schema import parse
from foretoken.models.families.schema import T5Config
from foretoken.models.formats.reader import TensorReader
from foretoken.train.shapes import T5Shape
from foretoken.train.widen.units import (
    CheckpointPlan,
    Copies,
    RotatedStream,
    Tensors,
    UnitWidener,
    check_embedding,
    check_growth,
    check_unquantized,
    copies,
    filler_scale,
    layer_positions,
    rotation,
)

# d_model, d_ff, layers of each stack. Heads follow from the source's head size.
PRESETS = {
    "t5-base": (768, 2048, 12),
    "t5-large": (1024, 2816, 24),
}
USUAL = "t5-large"
SHAPE = T5Shape
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


def fitted(shape: T5Shape, config: dict[str, Any]) -> T5Shape:
    """Returns ``shape``, which fits every source."""
    return shape


def checked(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a T5 with defaults filled in, and ``head_dim``. Raises InvalidRequest if quantized."""
    check_unquantized(config)
    config = _DEFAULTS | config
    parse(T5Config, config, "config.json")
    if config.get("num_decoder_layers") is None:
        config["num_decoder_layers"] = config["num_layers"]
    return config | {"head_dim": config["d_kv"]}


def plan(reader: TensorReader, config: dict[str, Any], shape: T5Shape, seed: int) -> CheckpointPlan:
    """Returns the checkpoint of a T5 of ``shape`` that computes the same as the source."""
    _check(config, shape)
    check_embedding(reader, "shared.weight", config["vocab_size"], config["d_model"])
    layers = {
        "encoder": layer_positions(config["num_layers"], shape.num_layers),
        "decoder": layer_positions(config["num_decoder_layers"], shape.num_decoder_layers),
    }
    generator = torch.Generator().manual_seed(seed + 1)
    stream = RotatedStream(rotation(config["d_model"], shape.d_model, seed))
    scale = filler_scale(max(shape.num_layers, shape.num_decoder_layers))
    widener = T5Widener(reader, stream, generator, scale)
    return CheckpointPlan(
        parameters=expected_parameters(config, shape),
        dtype=reader.get("shared.weight").dtype,
        config=wide_config(config, shape),
        layers=layers,
        tensors=widener.tensors(config, shape, layers),
    )


def wide_config(config: dict[str, Any], shape: T5Shape) -> dict[str, Any]:
    """Returns the source's config with the new sizes, untied as in T5 v1.1."""
    eps = config["layer_norm_epsilon"] * config["d_model"] / shape.d_model
    kept = {k: v for k, v in config.items() if k not in ("head_dim", "scale_decoder_outputs")}
    fixed = {"architectures": ["T5ForConditionalGeneration"], "tie_word_embeddings": False}
    return kept | vars(shape) | fixed | {"layer_norm_epsilon": eps}


def expected_parameters(config: dict[str, Any], shape: T5Shape) -> int:
    hidden, heads = shape.d_model, shape.num_heads
    attention = 4 * hidden * heads * shape.d_kv
    neurons = (3 if config["feed_forward_proj"].startswith("gated") else 2) * hidden * shape.d_ff
    encoder = shape.num_layers * (attention + neurons + 2 * hidden)
    decoder = shape.num_decoder_layers * (2 * attention + neurons + 3 * hidden)
    ends = 2 * config["vocab_size"] * hidden + 2 * hidden + 2 * config["relative_attention_num_buckets"] * heads
    return encoder + decoder + ends


def _check(config: dict[str, Any], shape: T5Shape) -> None:
    check_growth(shape, config)
    if shape.d_kv != config["d_kv"]:
        raise InvalidRequest(f"d_kv {shape.d_kv} is not the source's {config['d_kv']}; the size of a head stays")
    deeper = (shape.num_layers, shape.num_decoder_layers) != (config["num_layers"], config["num_decoder_layers"])
    if deeper and shape.num_heads < 2 * config["num_heads"]:
        raise InvalidRequest(
            f"{shape.num_heads} heads are fewer than twice the source's {config['num_heads']}; "
            "the heads of further layers cancel in pairs that share a column of the position biases"
        )


def head_groups(heads: int, wide_heads: int, real: bool) -> tuple[Copies, tuple[int, ...]]:
    """Returns the source of each wide head, and its column of the position biases.

    Raises ValueError if a group of one head would have to cancel.
    real: False for a layer of fillers.
    """
    sources: list[int] = []
    factors: list[float] = []
    columns: list[int] = []
    filler = 0
    for j in range(heads):
        size = wide_heads // heads + (j < wide_heads % heads)
        group = copies(1 if real else 0, size, filler)
        sources += [j if s >= 0 else s for s in group.sources]
        factors += group.factors
        columns += [j] * size
        filler = max(filler, group.fillers)
    return Copies(tuple(sources), tuple(factors)), tuple(columns)


class T5Widener(UnitWidener):
    """Widens the blocks of a T5."""

    stream: RotatedStream

    def tensors(self, config: dict[str, Any], shape: T5Shape, layers: dict[str, list[int]]) -> Tensors:
        """Yields all tensors of the wide model. layers: by stack, the positions of the real layers."""
        reader, embedding = self.reader, self.reader.get("shared.weight")
        yield "shared.weight", self.stream.embedding(embedding)
        for stack, count in (("encoder", shape.num_layers), ("decoder", shape.num_decoder_layers)):
            for at in range(count):
                real = layers[stack].index(at) if at in layers[stack] else None
                source = None if real is None else f"{stack}.block.{real}.layer."
                for name, tensor in self._block(config, shape, source, stack == "decoder"):
                    yield f"{stack}.block.{at}.layer.{name}", tensor
                if at == 0:
                    name = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
                    _, columns = head_groups(config["num_heads"], shape.num_heads, True)
                    yield name, reader.get(name)[:, list(columns)]
            yield f"{stack}.final_layer_norm.weight", torch.ones(self.stream.wide)
        head = reader.get("lm_head.weight") if "lm_head.weight" in reader.weights else embedding
        scale = config["d_model"] ** -0.5 if config["tie_word_embeddings"] else 1.0
        norm = reader.get("decoder.final_layer_norm.weight")
        yield "lm_head.weight", self.stream.reads(head.double() * scale, norm)

    def _block(self, config: dict[str, Any], shape: T5Shape, source: str | None, decoder: bool) -> Tensors:
        """Yields the tensors of one wide block. source: prefix of the real block, None for a block of fillers."""
        heads, _ = head_groups(config["num_heads"], shape.num_heads, source is not None)
        neurons = copies(config["d_ff"] if source is not None else 0, shape.d_ff)
        hidden = ("wi_0", "wi_1") if config["feed_forward_proj"].startswith("gated") else ("wi",)
        blocks: list[tuple[str, tuple[str, ...], str, Copies, int]] = [
            ("SelfAttention", ("q", "k", "v"), "o", heads, shape.d_kv)
        ]
        if decoder:
            blocks.append(("EncDecAttention", ("q", "k", "v"), "o", heads, shape.d_kv))
        blocks.append(("DenseReluDense", hidden, "wo", neurons, 1))
        encoder_norm = self.reader.get("encoder.final_layer_norm.weight")
        for number, (block, inputs, output, units, size) in enumerate(blocks):
            norm = self.get(source, f"{number}.layer_norm.weight")
            for part in inputs:
                gain = encoder_norm if block == "EncDecAttention" and part != "q" else norm
                name = f"{number}.{block}.{part}.weight"
                yield name, self.reads(self.get(source, name), units, size, gain)
            name = f"{number}.{block}.{output}.weight"
            yield name, self.writes(self.get(source, name), units, size)
            yield f"{number}.layer_norm.weight", torch.ones(self.stream.wide)

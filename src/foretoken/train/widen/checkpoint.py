"""``foretoken widen``: a checkpoint that computes what a small one does and costs what a large one costs.

The mathematics is in ``widen.tensors``.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foretoken import zoo
from foretoken.core.artifacts import MODEL, Destination
from foretoken.core.errors import InvalidRequest, ModelLoadError, TrainingError
from foretoken.core.schema import parse
from foretoken.models.families.schema import CausalConfig
from foretoken.models.families.table import FAMILIES
from foretoken.models.formats.checkpoint import load_config
from foretoken.quantize.cached import checkpoint_folder
from foretoken.train.files import PROVENANCE, write_json
from foretoken.train.hybrid.shape import MODEL_TYPE, HybridShape
from foretoken.train.progress import Reporter
from foretoken.train.seq2seq import T5Shape
from foretoken.train.shards import CheckpointPlan, ShardReader, ShardWriter, copy_companions, weights_sha256
from foretoken.train.widen import hybrid as widen_hybrid
from foretoken.train.widen import seq2seq as widen_seq2seq
from foretoken.train.widen.heads import scale_bundled, widen_head
from foretoken.train.widen.tensors import Copies, Widener, copies, layer_positions, query_heads, rotation

_FORMAT = 1  # version of cached checkpoints
Tensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class WideShape:
    """Size of the wide model. The size of an attention head stays the source's."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int


AnyShape = WideShape | T5Shape | HybridShape

# Hidden size, intermediate size, layers. Heads follow from the source's head size, four per key head.
PRESETS = {
    "0.7b": (2048, 5632, 16),
    "1b": (2048, 8192, 16),
    "3b": (3072, 8192, 28),
    "7b": (4096, 14336, 32),
}

USUAL = {"t5": "t5-large", MODEL_TYPE: "3b-a0.5b"}
"""The size that a family is widened to unless told, where it is not the first of ``PRESETS``."""


@dataclass(frozen=True)
class Scaled:
    """A written checkpoint, with the number of its parameters and the bytes of its weights."""

    path: Path
    parameters: int
    bytes: int


def like(name: str, head_dim: int = 64, family: str = "llama") -> AnyShape:
    """Returns the shape of a usual model of that size and family. Raises InvalidRequest for an unknown name."""
    others: dict[str, dict[str, Any]] = {"t5": widen_seq2seq.PRESETS, MODEL_TYPE: widen_hybrid.PRESETS}
    known = others.get(family, PRESETS)
    if name not in known:
        raise InvalidRequest(f"unknown size {name!r}; known: {', '.join(known)}")
    if family == MODEL_TYPE:
        return widen_hybrid.like(name, head_dim)
    if family == "t5":
        return widen_seq2seq.like(name, head_dim)
    hidden, intermediate, layers = PRESETS[name]
    heads = hidden // head_dim
    return WideShape(hidden, intermediate, layers, heads, max(1, heads // 4))


def fitted(name: str, config: dict[str, Any]) -> AnyShape:
    """Returns the shape of a usual model of that size for a source, which may have more layers, heads or units.

    More layers than the usual model's are made narrower, so that the layers keep about the same number of parameters.
    """
    head_dim, family = config["head_dim"], config["model_type"]
    shape = like(name, head_dim, family)
    if not isinstance(shape, WideShape):
        return shape
    layers, groups = max(shape.num_hidden_layers, config["num_hidden_layers"]), config["num_key_value_heads"]
    per = max(4, config["num_attention_heads"] // groups)  # query heads of each key head
    hidden = max(shape.hidden_size * math.sqrt(shape.num_hidden_layers / layers), config["hidden_size"])
    wide_groups = max(round(hidden / head_dim / per), groups, math.ceil(config["hidden_size"] / head_dim / per))
    hidden_size = wide_groups * per * head_dim
    units = round(hidden_size * shape.intermediate_size / shape.hidden_size / 64) * 64
    return WideShape(hidden_size, max(units, config["intermediate_size"]), layers, wide_groups * per, wide_groups)


def read_config(source: Path) -> dict[str, Any]:
    """Returns the source's config.

    Raises:
        ModelLoadError: It cannot be read.
        InvalidRequest: It is neither a plain Llama, nor a T5, nor a hybrid of Qwen3.5's layout.
    """
    config = load_config(source)
    if config.get("model_type") == MODEL_TYPE:
        return widen_hybrid.checked(config)
    if config.get("model_type") == "t5":
        return widen_seq2seq.checked(config)
    if config.get("model_type") not in ("llama", "mistral"):
        raise InvalidRequest(
            f"cannot widen a {config.get('model_type')!r} model; llama, mistral, t5 and "
            f"{MODEL_TYPE} checkpoints can be widened"
        )
    for key in ("attention_bias", "mlp_bias", "quantization_config", "sliding_window"):
        if config.get(key):
            raise InvalidRequest(f"cannot widen a model with {key}={config[key]!r}; only plain layers can be")
    parse(CausalConfig, {**FAMILIES[config["model_type"]].defaults, **config}, str(source / "config.json"))
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if config.get("head_dim") is None:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    return config


def widen_checkpoint(
    source: Path, out: Path, shape: AnyShape, seed: int = 0, heads: Sequence[Path] = (), force: bool = False
) -> Scaled:
    """Writes a wider Llama, T5 or hybrid that computes what the source does, up to rounding.

    Works in float64, one layer at a time, and writes the source's dtype with untied embeddings.

    Args:
        source: Folder or GGUF file of the source.
        out: Folder of the wide model.
        shape: Its size.
        seed: Seed of the rotation and of filler units.
        heads: Folders of heads for the source, which are widened into ``out/heads``.
        force: Whether to replace an earlier model at ``out``.

    Raises:
        InvalidRequest: The source cannot be widened to ``shape``, or ``out`` must not be written.
        ModelLoadError: The source cannot be read.
        TrainingError: The disk has too little space.
    """
    destination = Destination.checked(out, MODEL, (source, *heads), force)
    source = checkpoint_folder(source)
    config = read_config(source)
    if heads and config["model_type"] not in ("llama", "mistral"):
        raise InvalidRequest(f"heads are widened for a Llama, not for a {config['model_type']!r} model")
    if isinstance(shape, T5Shape):
        plan = widen_seq2seq.plan(ShardReader(source), config, shape, seed)
    elif isinstance(shape, HybridShape):
        shape = widen_hybrid.fitted(config, shape)
        plan = widen_hybrid.plan(ShardReader(source), config, shape, seed)
    else:
        plan = _plan(source, config, shape, seed)
    needed = plan.parameters * plan.dtype.itemsize
    existing = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if shutil.disk_usage(existing).free < needed:
        raise TrainingError(f"{out} needs {needed / 1e9:.1f} GB and the disk has less free; free some space")
    with destination.folder() as folder, Reporter("widening") as report:
        writer = ShardWriter(folder)
        for name, tensor in plan.tensors:
            writer.add(name, tensor.to(plan.dtype))
            report.update(writer.bytes / needed, f"{writer.bytes / 1e9:.2f} GB")
        writer.close()
        copy_companions(source, folder)
        write_json(folder / "config.json", plan.config)
        facts = {
            "widened_from": source.name,
            "source_sha256": weights_sha256(source),
            "seed": seed,
            "shape": asdict(shape),
            "layers": plan.layers,
            "parameters": writer.parameters,
        }
        write_json(folder / PROVENANCE, facts)
        for head in heads:
            widen_head(head, source, folder)
    return Scaled(destination.path, writer.parameters, writer.bytes)


def scaled(like_name: str = "0.7b", model: str = "target") -> Path:
    """Returns a bundled model (name or role) widened to a usual size. It is built once and cached.

    The target's heads are in its folder.

    Raises:
        InvalidRequest: A name is not known.
        TrainingError: The disk has too little space.
    """
    source = zoo.path(model)
    config = read_config(source)
    shape = fitted(like_name, config)
    key = hashlib.sha256(f"{_FORMAT} {shape} {weights_sha256(source)}".encode()).hexdigest()[:12]
    out = zoo.cache_folder() / "scaled" / f"{source.name}-{like_name}-{key}"
    if not (out / "config.json").exists():
        widen_checkpoint(source, out, shape)
    if source == zoo.path("target"):
        scale_bundled(out)
    return out


def wide_config(config: dict[str, Any], shape: WideShape) -> dict[str, Any]:
    """Returns the source's config with the new sizes. Tokens, positions and rotary settings stay."""
    eps = config.get("rms_norm_eps", 1e-6) * config["hidden_size"] / shape.hidden_size
    kept = {k: v for k, v in config.items() if k not in ("sliding_window", "layer_types")}
    fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": config["head_dim"]}
    return kept | asdict(shape) | fixed | {"rms_norm_eps": eps, "tie_word_embeddings": False}


def expected_parameters(config: dict[str, Any], shape: WideShape) -> int:
    """Returns the number of parameters of the wide model."""
    hidden, head = shape.hidden_size, config["head_dim"]
    attention = 2 * hidden * head * (shape.num_attention_heads + shape.num_key_value_heads)
    layer = attention + 3 * hidden * shape.intermediate_size + 2 * hidden
    return shape.num_hidden_layers * layer + 2 * config["vocab_size"] * hidden + hidden


def _plan(source: Path, config: dict[str, Any], shape: WideShape, seed: int) -> CheckpointPlan:
    if config["model_type"] == "t5":
        raise InvalidRequest(f"a T5 grows to one of {', '.join(widen_seq2seq.PRESETS)}; choose one with --size")
    _check(config, shape)
    reader = ShardReader(source)
    _check_weights(reader, config)
    return CheckpointPlan(
        parameters=expected_parameters(config, shape),
        dtype=reader.get("model.embed_tokens.weight").dtype,
        config=wide_config(config, shape),
        layers=layer_positions(config["num_hidden_layers"], shape.num_hidden_layers),
        tensors=_tensors(reader, config, shape, seed),
    )


def _check(config: dict[str, Any], shape: WideShape) -> None:
    for name, value in asdict(shape).items():
        if value < config[name]:
            raise InvalidRequest(f"{name} {value} is less than the source's {config[name]}; a model can only grow")
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    if heads % groups:
        raise InvalidRequest(f"{heads} heads do not divide among {groups} key heads; choose a multiple")
    per, wide_per = config["num_attention_heads"] // config["num_key_value_heads"], heads // groups
    if wide_per < per:
        raise InvalidRequest(
            f"{wide_per} query heads per key head are fewer than the source's {per}; "
            f"choose at most {heads // per} key heads"
        )
    more = groups > config["num_key_value_heads"] or shape.num_hidden_layers > config["num_hidden_layers"]
    if wide_per == 1 and more:
        raise InvalidRequest("a key head with one query head cannot be added so that it cancels; ask for fewer")
    if shape.hidden_size % heads:
        raise InvalidRequest(
            f"hidden_size {shape.hidden_size} is not a multiple of {heads} heads; transformers needs it"
        )


def _check_weights(reader: ShardReader, config: dict[str, Any]) -> None:
    odd = sorted(n for n in reader.names if n.endswith(".bias") or "q_norm" in n or "k_norm" in n)
    if odd:
        raise InvalidRequest(f"cannot widen a model with {odd[0]}; only plain Llama layers are handled")
    shape = reader.shape("model.embed_tokens.weight")
    if shape != (config["vocab_size"], config["hidden_size"]):
        raise ModelLoadError(
            f"model.embed_tokens.weight is {shape}, but config.json says "
            f"{config['vocab_size']} x {config['hidden_size']}"
        )


def _tensors(reader: ShardReader, config: dict[str, Any], shape: WideShape, seed: int) -> Tensors:
    narrow, wide = config["hidden_size"], shape.hidden_size
    generator = torch.Generator().manual_seed(seed + 1)
    widener = Widener(rotation(narrow, wide, seed), generator, 0.02 / math.sqrt(2 * shape.num_hidden_layers))
    embedding = reader.get("model.embed_tokens.weight")
    yield "model.embed_tokens.weight", widener.embedding(embedding)
    real = {at: i for i, at in enumerate(layer_positions(config["num_hidden_layers"], shape.num_hidden_layers))}
    for at in range(shape.num_hidden_layers):
        source = f"model.layers.{real[at]}." if at in real else None
        for name, tensor in _layer(reader, widener, config, shape, source):
            yield f"model.layers.{at}.{name}", tensor
    yield "model.norm.weight", torch.ones(wide)
    head = reader.get("lm_head.weight") if "lm_head.weight" in reader.names else embedding
    yield "lm_head.weight", widener.reads(head, reader.get("model.norm.weight"))


def _layer(
    reader: ShardReader, widener: Widener, config: dict[str, Any], shape: WideShape, source: str | None
) -> Tensors:
    """Yields the tensors of one wide layer. source: prefix of the real layer, None for a layer of fillers."""
    head, heads, groups = config["head_dim"], 0, 0
    if source is not None:
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    wide_groups = shape.num_key_value_heads
    queries = query_heads(heads, groups, shape.num_attention_heads, wide_groups)
    keys = Copies(tuple(j if j < groups else groups - 1 - j for j in range(wide_groups)), ())
    neurons = copies(config["intermediate_size"] if source is not None else 0, shape.intermediate_size)

    def reads(name: str, norm: str, which: Copies, size: int) -> torch.Tensor:
        real = torch.empty(0, size, widener.wide, dtype=torch.float64)
        if source is not None:
            weight, gain = reader.get(f"{source}{name}.weight"), reader.get(f"{source}{norm}.weight")
            real = widener.reads(weight, gain).unflatten(0, (-1, size))
        filler = widener.filler_reads(which.fillers * size).unflatten(0, (-1, size))
        return which.gather(real.float(), filler).flatten(0, 1)

    def writes(name: str, which: Copies, size: int) -> torch.Tensor:
        real = torch.empty(0, size, widener.wide, dtype=torch.float64)
        if source is not None:
            real = widener.writes(reader.get(f"{source}{name}.weight")).T.unflatten(0, (-1, size))
        filler = widener.filler_writes(which.fillers * size).unflatten(0, (-1, size))
        units = which.gather(real.float(), filler) * torch.tensor(which.factors).view(-1, 1, 1)
        return units.flatten(0, 1).T

    yield "input_layernorm.weight", torch.ones(widener.wide)
    yield "self_attn.q_proj.weight", reads("self_attn.q_proj", "input_layernorm", queries, head)
    yield "self_attn.k_proj.weight", reads("self_attn.k_proj", "input_layernorm", keys, head)
    yield "self_attn.v_proj.weight", reads("self_attn.v_proj", "input_layernorm", keys, head)
    yield "self_attn.o_proj.weight", writes("self_attn.o_proj", queries, head)
    yield "post_attention_layernorm.weight", torch.ones(widener.wide)
    yield "mlp.gate_proj.weight", reads("mlp.gate_proj", "post_attention_layernorm", neurons, 1)
    yield "mlp.up_proj.weight", reads("mlp.up_proj", "post_attention_layernorm", neurons, 1)
    yield "mlp.down_proj.weight", writes("mlp.down_proj", neurons, 1)

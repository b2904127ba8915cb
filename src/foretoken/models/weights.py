"""A checkpoint's tensors in the shape the runners take: one layer at a time, what belongs together fused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.models.architecture import Architecture
from foretoken.models.finite import converted
from foretoken.models.memory import give_back
from foretoken.models.prequantized import read_int8
from foretoken.models.quantize import Int8, Matrix, quantise


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer, on the CPU. Matrices are [out, in] row-major in the model's dtype, or int8.

    A matrix may be a view of a mapped file, so copy or pack it; the mapping goes with it. Norm weights are float32
    [n], Gemma's offset of 1 included; a norm is computed in float32 and rounded once. ``qkv`` holds the rows of
    queries, keys, values, ``gate_up`` those of gate, up: one product in parts of one kind, as many as are stored.
    """

    norm: Tensor | None  # None in the first layer of EAGLE-1
    qkv: tuple[Matrix, ...]
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Matrix
    out_bias: Tensor | None
    post_attention_norm: Tensor | None  # Gemma 2 and 3: on the attention's output, before it is added
    mlp_norm: Tensor
    gate_up: tuple[Matrix, ...]
    down: Matrix
    post_mlp_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class Ends:
    """What lies before the first layer and after the last. ``head`` is the embedding itself where they are tied."""

    embedding: Tensor  # [V, H]
    norm: Tensor | None  # float32 [H]
    head: Matrix  # [V, H]


@dataclass(frozen=True, slots=True)
class Entry:
    """How a model begins that is given features: the residual stream is theirs, not the embeddings'.

    joined: the first layer's attention reads [norm(embedding), norm(features)], its ``qkv`` is [out, 2H] (EAGLE-3,
    2503.01840); else embeddings are not read at all. norm: float32 [H], on the features. norm_first: before the
    residual stream begins too, not only beside it.
    """

    joined: bool = False
    norm: Tensor | None = None
    norm_first: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """Where weights come from and what they become. quantise: matrices to int8 that are not so already."""

    weights: Mapping[str, Tensor]
    architecture: Architecture
    dtype: torch.dtype
    quantise: bool = False

    @property
    def reader(self) -> Reader:
        return Reader(self.weights, self.dtype, self.quantise, self.architecture.norm_offset)


@dataclass(frozen=True, slots=True)
class Layers:
    """All layers in turn, each read when it is asked for; iterating again reads again."""

    source: Source

    def __iter__(self) -> Iterator[LayerWeights]:
        for index in range(self.source.architecture.layers):
            yield read_layer(self.source, index)
            give_back()


def read_layer(source: Source, index: int) -> LayerWeights:
    """Layer ``index``. Raises ModelLoadError when a tensor is missing or has the wrong shape."""
    a, reader = source.architecture, source.reader
    at = f"model.layers.{index}"
    attention, mlp = f"{at}.self_attn", f"{at}.mlp"
    wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
    fused, sandwich = a.family == "phi3", a.family in ("gemma2", "gemma3_text")
    qkv = (f"{attention}.qkv_proj",) if fused else tuple(f"{attention}.{p}_proj" for p in "qkv")
    gate_up = (f"{mlp}.gate_up_proj",) if fused else (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    heads = a.family in ("qwen3", "gemma3_text")
    return LayerWeights(
        norm=reader.norm(f"{at}.input_layernorm", a.hidden),
        qkv=reader.parts(qkv, wide + 2 * narrow, a.hidden),
        qkv_bias=reader.bias(qkv, wide + 2 * narrow),
        q_norm=reader.norm(f"{attention}.q_norm", a.head_dim) if heads else None,
        k_norm=reader.norm(f"{attention}.k_norm", a.head_dim) if heads else None,
        out=reader.matrix(f"{attention}.o_proj", a.hidden, wide),
        out_bias=reader.bias((f"{attention}.o_proj",), a.hidden),
        post_attention_norm=reader.norm(f"{at}.post_attention_layernorm", a.hidden) if sandwich else None,
        mlp_norm=reader.norm(f"{at}.{'pre_feedforward' if sandwich else 'post_attention'}_layernorm", a.hidden),
        gate_up=reader.parts(gate_up, 2 * a.intermediate, a.hidden),
        down=reader.matrix(f"{mlp}.down_proj", a.hidden, a.intermediate),
        post_mlp_norm=reader.norm(f"{at}.post_feedforward_layernorm", a.hidden) if sandwich else None,
    )


def read_ends(source: Source) -> Ends:
    """Embedding, last norm and head."""
    a, reader = source.architecture, source.reader
    stored = reader.get("model.embed_tokens.weight")
    reader.check((stored,), ("model.embed_tokens",), a.vocab, a.hidden)
    embedding = converted("model.embed_tokens.weight", stored, source.dtype, copy=True)
    head: Matrix = embedding
    if not a.tied and ("lm_head.weight" in source.weights or "lm_head._weight_qdata" in source.weights):
        head = reader.matrix("lm_head", a.vocab, a.hidden)
    elif source.quantise:
        head = quantise(stored)
    return Ends(embedding, reader.norm("model.norm", a.hidden), head)


@dataclass(frozen=True, slots=True)
class Reader:
    """Tensors by name, checked, as the runners take them. norm_offset: what stored norm weights lack."""

    weights: Mapping[str, Tensor]
    dtype: torch.dtype
    quantise: bool = False
    norm_offset: float = 0.0

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """[rows, columns]: the weight of one product."""
        return self.parts((name,), rows, columns)[0]

    def parts(self, names: tuple[str, ...], rows: int, columns: int) -> tuple[Matrix, ...]:
        """The weights of these products, [rows, columns] below one another."""
        parts = tuple(self._part(name) for name in names)
        if len({isinstance(part, Int8) for part in parts}) > 1:
            raise ModelLoadError(f"of {' and '.join(names)} only some are quantised; they are one product here")
        self.check(parts, names, rows, columns)
        return parts

    def check(self, parts: Sequence[Matrix], names: tuple[str, ...], rows: int, columns: int) -> None:
        shapes = [tuple(part.shape) for part in parts]
        if any(len(s) != 2 or s[1] != columns for s in shapes) or sum(s[0] for s in shapes) != rows:
            raise self._misshapen(names, parts, (rows, columns))

    def bias(self, names: tuple[str, ...], rows: int) -> Tensor | None:
        """The biases of these products in one vector [rows], None where they have none."""
        if not any(f"{name}.bias" in self.weights for name in names):
            return None
        biases = [self.get(f"{name}.bias") for name in names]
        if any(bias.ndim != 1 for bias in biases) or sum(map(len, biases)) != rows:
            raise self._misshapen([f"{name}.bias" for name in names], biases, (rows,))
        return torch.cat([converted(f"{name}.bias", b, self.dtype) for name, b in zip(names, biases, strict=True)])

    def norm(self, name: str, size: int) -> Tensor:
        """float32 [size]; Gemma stores weights minus 1."""
        return self.floats(f"{name}.weight", (size,)).add_(self.norm_offset)

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A copy of the tensor in float32. Raises ModelLoadError where it has another shape."""
        stored = self.get(name)
        if stored.shape != shape:
            raise self._misshapen([name], [stored], shape)
        return stored.to(torch.float32, copy=True)

    def get(self, name: str) -> Tensor:
        """The tensor as it is stored. Raises ModelLoadError where it is missing or holds no floats."""
        try:
            tensor = self.weights[name]
        except KeyError:
            raise ModelLoadError(f"the checkpoint lacks the tensor {name!r}; is it complete?") from None
        if not tensor.is_floating_point():
            raise ModelLoadError(f"the tensor {name!r} holds {tensor.dtype} instead of floats; is it damaged?")
        return tensor

    def _misshapen(self, names: Sequence[str], parts: Sequence[Matrix], shape: tuple[int, ...]) -> ModelLoadError:
        found = " and ".join(str(tuple(part.shape)) for part in parts)
        return ModelLoadError(
            f"{' and '.join(names)} have the shape {found}, but config.json says {shape}"
            f"{' together' * (len(parts) > 1)}"
        )

    def _part(self, name: str) -> Matrix:
        stored = read_int8(self.weights, name)
        if stored is not None:
            return stored
        weight = self.get(f"{name}.weight")
        if weight.ndim != 2:
            raise ModelLoadError(f"the tensor {name + '.weight'!r} is not a matrix; is the checkpoint damaged?")
        return quantise(weight) if self.quantise else converted(f"{name}.weight", weight, self.dtype)

"""A decoder's weights as the runners take them: one layer at a time, with projections of the same input fused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.finite import converted
from foretoken.models.formats.grouped import Grouped, GroupedWeights
from foretoken.models.formats.memory import give_back, reuse_freed
from foretoken.models.formats.prequantized import read_int8
from foretoken.models.formats.quantize import Matrix, Quantizer, floats


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer, on the CPU.

    Matrices are [out, in] row-major in the model's dtype, or quantized. A matrix may be a view of a mapped file, so
    runners copy or pack it; the mapping ends with it. Norm weights are float32 [n], Gemma's offset of 1 included; a
    norm is computed in float32 and rounded once. ``qkv`` holds the rows of queries, keys and values, ``gate_up`` those
    of gate and up: one product in as many parts as the checkpoint stores, all of one kind.
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
    """Embedding, last norm and vocabulary head. ``head`` is the embedding itself if the two are tied."""

    embedding: Matrix  # [V, H]; floats or grouped
    norm: Tensor | None  # float32 [H]
    head: Matrix  # [V, H]


@dataclass(frozen=True, slots=True)
class Entry:
    """The input side of a model whose residual stream starts from features instead of embeddings.

    Attributes:
        joined: whether the input of the first attention is [norm(embedding), norm(features)], so that its ``qkv`` is
            [out, 2H] (EAGLE-3, 2503.01840); otherwise embeddings are not used.
        norm: weight of the norm on the features, float32 [H].
        norm_first: whether the residual stream starts from the normed features.
    """

    joined: bool = False
    norm: Tensor | None = None
    norm_first: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint's tensors with the dtype to convert them to. quantize: how float matrices are quantized."""

    weights: Mapping[str, Tensor]
    architecture: Architecture
    dtype: torch.dtype
    quantize: Quantizer | None = None

    @property
    def reader(self) -> TensorReader:
        """Reads the tensors by name."""
        return TensorReader(self.weights, self.dtype, self.quantize, self.architecture.norm_offset)


@dataclass(frozen=True, slots=True)
class Layers:
    """Iterates over all layers. Each is read when the iteration reaches it; another iteration reads it again."""

    source: Source

    def __iter__(self) -> Iterator[LayerWeights]:
        reuse_freed()
        for index in range(self.source.architecture.layers):
            yield read_layer(self.source, index)
            give_back()


def read_layer(source: Source, index: int) -> LayerWeights:
    """Reads layer ``index``. Raises ModelLoadError if a tensor is missing or has the wrong shape."""
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
    """Reads embedding, last norm and head. Raises ModelLoadError if a tensor is missing or has the wrong shape."""
    a, reader = source.architecture, source.reader
    stored: Matrix = reader.grouped("model.embed_tokens") or reader.get("model.embed_tokens.weight")
    reader.check((stored,), ("model.embed_tokens",), a.vocab, a.hidden)
    embedding = stored
    if isinstance(stored, Tensor):
        embedding = converted("model.embed_tokens.weight", stored, source.dtype, copy=True)
    head = embedding
    if not a.tied and ("lm_head.weight" in source.weights or "lm_head._weight_qdata" in source.weights):
        head = reader.matrix("lm_head", a.vocab, a.hidden)
    elif source.quantize is not None and isinstance(stored, Tensor):
        head = source.quantize(stored)
    return Ends(embedding, reader.norm("model.norm", a.hidden), head)


@dataclass(frozen=True, slots=True)
class TensorReader:
    """Reads and checks tensors by name.

    Methods raise ModelLoadError for a tensor that is missing or has the wrong shape.

    Attributes:
        weights: the checkpoint's tensors.
        dtype: dtype to convert matrices and biases to.
        quantize: how float matrices are quantized; None if they stay as they are.
        norm_offset: offset that is added to stored norm weights.
    """

    weights: Mapping[str, Tensor]
    dtype: torch.dtype
    quantize: Quantizer | None = None
    norm_offset: float = 0.0

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """Returns the weight of a linear layer, [rows, columns]."""
        return self.parts((name,), rows, columns)[0]

    def parts(self, names: tuple[str, ...], rows: int, columns: int) -> tuple[Matrix, ...]:
        """Returns the weights of linear layers with the same input; concatenated they are [rows, columns]."""
        parts = tuple(self._part(name) for name in names)
        if any(isinstance(part, Grouped) for part in parts) and any(isinstance(part, Tensor) for part in parts):
            parts = tuple(floats(part, self.dtype) for part in parts)
        if len({type(part) for part in parts}) > 1:
            raise ModelLoadError(f"of {' and '.join(names)} only some are quantized; they are one product here")
        self.check(parts, names, rows, columns)
        return parts

    def check(self, parts: Sequence[Matrix], names: tuple[str, ...], rows: int, columns: int) -> None:
        """Raises ModelLoadError unless the concatenated parts are [rows, columns]."""
        shapes = [tuple(part.shape) for part in parts]
        if any(len(s) != 2 or s[1] != columns for s in shapes) or sum(s[0] for s in shapes) != rows:
            raise self._misshapen(names, parts, (rows, columns))

    def bias(self, names: tuple[str, ...], rows: int) -> Tensor | None:
        """Returns the concatenated biases [rows] of linear layers; None if they have none."""
        if not any(f"{name}.bias" in self.weights for name in names):
            return None
        biases = [self.get(f"{name}.bias") for name in names]
        if any(bias.ndim != 1 for bias in biases) or sum(map(len, biases)) != rows:
            raise self._misshapen([f"{name}.bias" for name in names], biases, (rows,))
        return torch.cat([converted(f"{name}.bias", b, self.dtype) for name, b in zip(names, biases, strict=True)])

    def norm(self, name: str, size: int) -> Tensor:
        """Returns the weight of a norm, float32 [size]."""
        return self.floats(f"{name}.weight", (size,)).add_(self.norm_offset)

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a copy of the tensor in float32."""
        stored = self.get(name)
        if stored.shape != shape:
            raise self._misshapen([name], [stored], shape)
        return stored.to(torch.float32, copy=True)

    def get(self, name: str) -> Tensor:
        """Returns the tensor as it is stored. Raises ModelLoadError if it is missing or holds no floats."""
        try:
            tensor = self.weights[name]
        except KeyError:
            raise ModelLoadError(f"the checkpoint lacks the tensor {name!r}; is it complete?") from None
        if not tensor.is_floating_point():
            raise ModelLoadError(f"the tensor {name!r} holds {tensor.dtype} instead of floats; is it damaged?")
        return tensor

    def _misshapen(self, names: Sequence[str], parts: Sequence[Matrix], shape: tuple[int, ...]) -> ModelLoadError:
        shapes = " and ".join(str(tuple(part.shape)) for part in parts)
        return ModelLoadError(
            f"{' and '.join(names)} have the shape {shapes}, but config.json says {shape}"
            f"{' together' * (len(parts) > 1)}"
        )

    def grouped(self, name: str) -> Grouped | None:
        """Returns the weight of ``name`` if it is stored in groups and need not be dequantized; else None."""
        if self.quantize is not None or not isinstance(self.weights, GroupedWeights):
            return None
        return self.weights.grouped(f"{name}.weight") if f"{name}.weight" in self.weights else None

    def _part(self, name: str) -> Matrix:
        stored = read_int8(self.weights, name)
        if stored is not None:
            return stored
        grouped = self.grouped(name)
        if grouped is not None:
            return grouped
        weight = self.get(f"{name}.weight")
        if weight.ndim != 2:
            raise ModelLoadError(f"the tensor {name + '.weight'!r} is not a matrix; is the checkpoint damaged?")
        return converted(f"{name}.weight", weight, self.dtype) if self.quantize is None else self.quantize(weight)

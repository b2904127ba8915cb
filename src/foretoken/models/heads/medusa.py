"""Medusa (2401.10774) and blockwise heads (1811.03115): several tokens are predicted from one hidden state.

Medusa checkpoints have the names of the original or of vLLM. Head i: x <- x + SiLU(W x + b) once or more, then a
vocabulary head: its own, one that all heads share, or the target's. It predicts the token i + 2 positions after x's
row; the target's head predicts the next one. Blockwise heads add down(relu(up x)) to x, before the target's head.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.devices import on_host
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.schema import Schema, parse
from foretoken.models.heads.dialects import Written
from foretoken.models.heads.files import MAX_HEADS, check_shapes, check_vocabulary_head, number, open_head
from foretoken.models.heads.weights import HeadProduct

MEDUSA_DIALECTS = ("medusa", "vllm")
_ORIGINAL = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")


class MedusaCheckpointConfig(Schema):
    """The fields of config.json other than sizes."""

    original_lm_head: bool | None = None
    base_model_name_or_path: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MedusaHeads:
    """The heads of one checkpoint."""

    hidden: int  # hidden size of the target
    vocab: int  # size of the target's vocabulary
    blocks: tuple[tuple[tuple[Tensor, Tensor | None], ...], ...]  # W [H, H] and b [H] or None, by head and layer
    # vocabulary heads [V', H]: one for each head, a single shared one, or none for the target's
    vocabulary: tuple[Tensor, ...] = ()
    # token ids of the rows of the vocabulary heads, int64 [V']; None for the whole vocabulary in order
    tokens: Tensor | None = None
    base: str | None = None  # the target, if the checkpoint names it

    @property
    def depth(self) -> int:
        return len(self.blocks)

    def with_vocabulary(self, matrix: Tensor) -> "MedusaHeads":
        """Returns the heads with the target's vocabulary head [V, H], unless they have one.

        Raises InvalidRequest if the matrix has another shape.
        """
        check_vocabulary_head(matrix, self.vocab, self.hidden)
        return self if self.vocabulary else replace(self, vocabulary=(matrix,))


def read_medusa(path: Path) -> MedusaHeads:
    """Reads the checkpoint in ``path``. Raises ModelLoadError if it is incomplete or inconsistent."""
    config, weights = open_head(path)
    parse(MedusaCheckpointConfig, config, str(path / "config.json"))
    tensors = {_canonical(name, weights): weights[name] for name in weights}
    heads = number(config, path, "num_heads", "medusa_num_heads", high=MAX_HEADS)
    layers = number(config, path, "num_hidden_layers", "medusa_num_layers", default=1, high=MAX_HEADS)
    if "blocks.0.layers.0.weight" not in tensors:
        raise ModelLoadError(f"{path} holds no Medusa heads: neither 0.0.linear.weight nor blocks.0.layers.0.weight")
    hidden = number(config, path, "hidden_size", default=int(tensors["blocks.0.layers.0.weight"].shape[-1]))
    shapes: dict[str, tuple[int, ...]] = {
        f"blocks.{i}.layers.{j}.weight": (hidden, hidden) for i in range(heads) for j in range(layers)
    }
    biases = (f"blocks.{i}.layers.{j}.bias" for i in range(heads) for j in range(layers))
    shapes |= {name: (hidden,) for name in biases if name in tensors}
    vocabulary = _vocabulary(tensors, heads, bool(config.get("original_lm_head")))
    rows_of = tensors.get(vocabulary[0]) if vocabulary else None
    vocab = number(config, path, "vocab_size", default=rows_of.shape[0] if rows_of is not None else None)
    tokens = tensors.get("token_map")
    rows = vocab if tokens is None else len(tokens)
    check_shapes(path, tensors, shapes | dict.fromkeys(vocabulary, (rows, hidden)))
    blocks = tuple(
        tuple(
            (tensors[f"blocks.{i}.layers.{j}.weight"], tensors.get(f"blocks.{i}.layers.{j}.bias"))
            for j in range(layers)
        )
        for i in range(heads)
    )
    matrices = tuple(tensors[name] for name in vocabulary)
    if matrices and all(torch.equal(matrix, matrices[0]) for matrix in matrices):
        matrices = matrices[:1]
    base = config.get("base_model_name_or_path")
    return MedusaHeads(hidden, vocab, blocks, matrices, None if tokens is None else tokens.to(torch.int64), base)


def write_medusa(heads: MedusaHeads, dialect: str) -> Written:
    """Returns ``heads`` in the format ``dialect``, one of ``MEDUSA_DIALECTS``.

    Raises InvalidRequest if the format is unknown or does not support these heads, or they have no vocabulary head.
    """
    if dialect not in MEDUSA_DIALECTS:
        raise InvalidRequest(f"Medusa heads have no dialect {dialect!r}; known: {', '.join(MEDUSA_DIALECTS)}")
    if not heads.vocabulary:
        raise InvalidRequest(
            "these heads use the target's vocabulary head; name the target with --target to write it out"
        )
    return _original(heads) if dialect == "medusa" else _vllm(heads)


def _original(heads: MedusaHeads) -> Written:
    if heads.tokens is not None:
        raise InvalidRequest("the original form of Medusa has no reduced vocabulary; write these heads for vllm")
    layers = len(heads.blocks[0])
    tensors = _named(heads, lambda i, j, kind: f"{i}.{j}.linear.{kind}")
    for i in range(heads.depth):
        tensors[f"{i}.{layers}.weight"] = heads.vocabulary[i % len(heads.vocabulary)].clone()
    config = {"medusa_num_heads": heads.depth, "medusa_num_layers": layers, "base_model_name_or_path": heads.base or ""}
    return {**config, "hidden_size": heads.hidden, "vocab_size": heads.vocab}, tensors


def _vllm(heads: MedusaHeads) -> Written:
    tensors = _named(heads, lambda i, j, kind: f"blocks.{i}.layers.{j}.{kind}")
    shared = len(heads.vocabulary) == 1
    names = ["lm_head.weight"] if shared else [f"lm_heads.{i}.weight" for i in range(heads.depth)]
    tensors |= dict(zip(names, heads.vocabulary, strict=True))
    if heads.tokens is not None:
        tensors["token_map"] = heads.tokens
    return _config(heads, heads.vocab if heads.tokens is None else len(heads.tokens), shared), tensors


def _config(heads: MedusaHeads, kept: int, shared: bool) -> dict[str, Any]:
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": heads.hidden,
        "vocab_size": heads.vocab,
        "truncated_vocab_size": kept,
        "num_heads": heads.depth,
        "num_hidden_layers": len(heads.blocks[0]),
        "medusa_fc_bias": any(bias is not None for block in heads.blocks for _, bias in block),
        "original_lm_head": shared,
        "torch_dtype": str(heads.blocks[0][0][0].dtype).removeprefix("torch."),
    }


def bare(heads: MedusaHeads) -> Written:
    """Returns ``heads`` in our own format: vLLM's, but the heads may use the target's vocabulary head."""
    tensors = _named(heads, lambda i, j, kind: f"blocks.{i}.layers.{j}.{kind}")
    names = [f"lm_heads.{i}.weight" for i in range(len(heads.vocabulary))]
    return _config(heads, heads.vocab, not names), tensors | dict(zip(names, heads.vocabulary, strict=True))


def _named(heads: MedusaHeads, name: Callable[[int, int, str], str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for i, block in enumerate(heads.blocks):
        for j, (weight, bias) in enumerate(block):
            tensors[name(i, j, "weight")] = weight
            if bias is not None:
                tensors[name(i, j, "bias")] = bias
    return tensors


def _canonical(name: str, names: Mapping[str, Any] | Sequence[str]) -> str:
    match = _ORIGINAL.fullmatch(name)
    if match is None:
        return name
    head, layer, kind = match.groups()
    block = f"{head}.{layer}.linear.weight"
    if any(other.endswith(block) for other in names):
        return f"blocks.{head}.layers.{layer}.{kind}"
    return f"lm_heads.{head}.{kind}"


def _vocabulary(tensors: Mapping[str, Tensor], heads: int, shared: bool) -> list[str]:
    """Returns the names of the vocabulary heads, in order; none if the target's is used."""
    if shared:
        return [name for name in ("lm_head.weight", "lm_heads.0.weight") if name in tensors][:1]
    if "lm_head.weight" in tensors:
        return ["lm_head.weight"]
    return [f"lm_heads.{i}.weight" for i in range(heads)]


MODEL_TYPE = "foretoken_blockwise"


@dataclass(frozen=True, slots=True, eq=False)
class Feedforward:
    """One head: up [I, H] with bias [I], down [H, I] with bias [H]."""

    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BlockwiseHeads:
    """The heads of one checkpoint."""

    hidden: int
    heads: tuple[Feedforward, ...]

    @property
    def depth(self) -> int:
        return len(self.heads)


def read_blockwise(path: Path) -> BlockwiseHeads:
    """Reads the checkpoint in ``path``. Raises ModelLoadError if it is incomplete or inconsistent."""
    config, weights = open_head(path)
    if config.get("model_type") != MODEL_TYPE:
        raise ModelLoadError(f"{path} has model_type {config.get('model_type')!r}; blockwise heads have {MODEL_TYPE!r}")
    hidden, inner = number(config, path, "hidden_size"), number(config, path, "intermediate_size")
    count = number(config, path, "num_heads", high=MAX_HEADS)
    parts = {"up.weight": (inner, hidden), "up.bias": (inner,), "down.weight": (hidden, inner), "down.bias": (hidden,)}
    check_shapes(path, weights, {f"heads.{i}.{part}": shape for i in range(count) for part, shape in parts.items()})
    return BlockwiseHeads(
        hidden, tuple(Feedforward(*(weights[f"heads.{i}.{part}"] for part in parts)) for i in range(count))
    )


def write_blockwise(heads: BlockwiseHeads) -> Written:
    tensors: dict[str, Tensor] = {}
    for i, head in enumerate(heads.heads):
        parts = {"up.weight": head.up, "up.bias": head.up_bias, "down.weight": head.down, "down.bias": head.down_bias}
        tensors |= {f"heads.{i}.{part}": tensor for part, tensor in parts.items()}
    inner = heads.heads[0].up.shape[0]
    sizes = {"hidden_size": heads.hidden, "intermediate_size": inner, "num_heads": heads.depth}
    return {"model_type": MODEL_TYPE, **sizes}, tensors


Unembed = Callable[[Tensor], Tensor]
"""The target's vocabulary head: normed states [rows, H] -> float32 [rows, V]."""


class MedusaNet:
    """x <- x + SiLU(W x + b) for each head, then its vocabulary head (2401.10774).

    It maps the target's normed last states [rows, H] to logits [rows, depth, V] of the next ``depth`` positions; -inf
    for tokens outside a head's vocabulary.

    The first layers of all heads are one product.
    """

    def __init__(self, heads: MedusaHeads, dtype: torch.dtype, device: torch.device, unembed: Unembed) -> None:
        self.depth, self._heads, self._dtype, self._device = heads.depth, heads, dtype, device
        first = [block[0] for block in heads.blocks]
        biases = [b if b is not None else w.new_zeros(heads.hidden) for w, b in first]
        self._first = HeadProduct(torch.cat([w for w, _ in first]), torch.cat(biases), device, dtype)
        self._later = [[HeadProduct(w, b, device, dtype) for w, b in block[1:]] for block in heads.blocks]
        self._own = [HeadProduct(matrix, None, device, dtype) for matrix in heads.vocabulary]
        self._unembed = unembed
        self._tokens = heads.tokens

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(self._device, self._dtype)
        states = rows[:, None] + F.silu(self._first(rows).view(len(rows), self.depth, -1))
        for i, layers in enumerate(self._later):
            for layer in layers:
                states[:, i] += F.silu(layer(states[:, i].contiguous()))
        if len(self._own) == self.depth:
            logits = torch.stack([m(states[:, i].contiguous()) for i, m in enumerate(self._own)], dim=1)
        else:
            shared = self._own[0] if self._own else self._unembed
            logits = shared(states.flatten(0, 1).contiguous()).view(len(rows), self.depth, -1)
        logits = on_host(logits.float())
        if self._tokens is None:
            return logits
        spread = logits.new_full((*logits.shape[:2], self._heads.vocab), -torch.inf)
        spread[..., self._tokens] = logits
        return spread


class BlockwiseNet:
    """x + down(relu(up x)) for each head, then the target's vocabulary head (1811.03115).

    The up-projections of all heads are one product.
    """

    def __init__(self, heads: BlockwiseHeads, dtype: torch.dtype, device: torch.device, unembed: Unembed) -> None:
        self.depth, self._dtype, self._device, self._unembed = heads.depth, dtype, device, unembed
        up, bias = torch.cat([head.up for head in heads.heads]), torch.cat([head.up_bias for head in heads.heads])
        self._up = HeadProduct(up, bias, device, dtype)
        self._down = [HeadProduct(head.down, head.down_bias, device, dtype) for head in heads.heads]

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(self._device, self._dtype)
        inner = F.relu(self._up(rows)).view(len(rows), self.depth, -1)
        added = torch.stack([down(inner[:, i].contiguous()) for i, down in enumerate(self._down)], dim=1)
        return self._unembed((rows[:, None] + added).flatten(0, 1)).view(len(rows), self.depth, -1)


ParallelNet = MedusaNet | BlockwiseNet

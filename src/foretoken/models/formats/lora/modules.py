"""The modules of a decoder that an adapter may change: the linear layers of its attention and dense MLPs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from foretoken.models.families.architecture import Architecture

Product = Literal["qkv", "out", "up", "down"]
PRODUCTS: tuple[Product, ...] = ("qkv", "out", "up", "down")


@dataclass(frozen=True, slots=True)
class LinearModule:
    """A linear layer of a checkpoint, which is one part of a product of the runtime.

    Attributes:
        name: its name, relative to the prefix of a decoder's names.
        rows: outputs.
        columns: inputs.
    """

    name: str
    rows: int
    columns: int


def linear_modules(a: Architecture, layer: int) -> Iterator[tuple[Product, list[LinearModule]]]:
    """Yields the products of a layer that an adapter may change, each with its modules in order."""
    described, names = a.stack[layer], a.names
    at, sizes = names.layer.format(layer), a.sizes(described)
    wide, narrow = a.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    if described.attention and a.latent is None:
        rows = [(1 + a.gated_attention) * wide, *([narrow, narrow] if described.source is None else [])]
        yield "qkv", _modules(at, names.qkv_of(described), rows, a.hidden)
        yield "out", [LinearModule(at + names.out, a.hidden, wide)]
    if described.mlp in ("gated", "ungated"):
        inner = described.inner or a.intermediate
        rows = [inner] * (2 if described.mlp == "gated" else 1)
        yield "up", _modules(at, names.up, rows, a.hidden)
        yield "down", [LinearModule(at + names.down, a.hidden, inner)]


def _modules(at: str, names: tuple[str, ...], rows: list[int], columns: int) -> list[LinearModule]:
    """Returns the modules of a product that is stored in as many parts as there are names: all of them, or one."""
    rows = rows if len(names) == len(rows) else [sum(rows)]
    return [LinearModule(at + name, count, columns) for name, count in zip(names, rows, strict=True)]

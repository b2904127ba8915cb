"""Where the rows of a pass lie in the KV cache and what they see."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

STRETCH = 256  # keys of one program; the sums over stretches depend on this number alone, not on the cache's length
EDGE = 16  # rows and columns of a tile that the tensor cores multiply, at least
UNIT = 16  # bytes; places of pages are multiples of it, so that the compiler knows that loads are aligned


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Where pages hold the keys [heads, PAGE, width] and values [heads, PAGE, dim] of a layer.

    They are counted in numbers from a page's start. With latent attention values are the first numbers of keys.

    Attributes:
        base: what ``PassRows.pages`` counts from, in the dtype of the cache.
        scales: the same memory as float32.
        heads: number of heads.
        width: numbers of a key.
        dim: numbers of a value.
        keys: where keys begin.
        values: where values begin; where keys do if they are parts of them.
        scales_at: where the scales of keys and those of values begin, float32 [heads, PAGE], if numbers are int8.
    """

    base: Tensor
    scales: Tensor
    heads: int
    width: int
    dim: int
    keys: int
    values: int
    scales_at: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PassRows:
    """Where the rows of a pass lie and what they see, int64 tensors on the device.

    Attributes:
        counts: number of positions up to the row's own, which windows are counted from; 0 for padding, [R].
        ends: number of keys that the row sees without a window, [R]: ``counts``, or more where rows see each other.
        pages: where the pages of the row's sequence are, in ``UNIT`` bytes from ``LayerPages.base``, [pages, R].
        places: the cache row of the row's own keys and values, [R].
        prefixes: number of keys that lie at the rows of their positions, [R].
        paths: cache rows of the keys behind them in the order of their positions, [depth, R]; depth 0 without trees.
        tiles: first row of each tile, [R]. The rows of a tile follow each other in one sequence and not in a tree, so
            that one program reads the keys for all of them.
        sizes: number of rows of each tile, [R]; 0 behind the last tile. With the query heads of one key head there are
            at most ``EDGE`` of them.
        longest: at least the greatest of ``ends``.
    """

    counts: Tensor
    ends: Tensor
    pages: Tensor
    places: Tensor
    prefixes: Tensor
    paths: Tensor
    tiles: Tensor
    sizes: Tensor
    longest: int


def rows_per_tile(group: int) -> int:
    """Returns how many rows a tile may have where ``group`` query heads share one of keys."""
    return max(1, EDGE // group)

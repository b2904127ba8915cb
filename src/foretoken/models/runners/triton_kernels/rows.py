"""Rows of a pass as tensors on the device: positions in the KV cache, keys that they see, and requests for tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

STRETCH = 256  # keys of one program; the sums over stretches depend on this number alone, not on the cache's length
EDGE = 16  # rows and columns of a tile that the tensor cores multiply, at least
UNIT = 16  # bytes; positions of pages are multiples of it, so that the compiler knows that loads are aligned


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Positions of a layer's keys [heads, PAGE, width] and values [heads, PAGE, dim] in pages.

    They are counted in elements from a page's start. With latent attention values are the first elements of keys.
    """

    base: Tensor  # origin of ``PassRows.pages``, in the dtype of the cache
    scales: Tensor  # the same memory as float32
    heads: int  # number of heads
    width: int  # elements of a key
    dim: int  # elements of a value
    keys: int  # start of keys
    values: int  # start of values; that of keys if values are part of them
    # starts of the scales of keys and of values, float32 [heads, PAGE], for int8
    scales_at: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PassRows:
    """Positions of a pass's rows and the keys that they see, int64 tensors on the device."""

    counts: Tensor  # number of positions up to the row's, from which windows are counted; 0 for padding, [R]
    ends: Tensor  # number of keys that the row sees without a window, [R]: ``counts``, or more if rows see each other
    pages: Tensor  # positions of the sequence's pages, in ``UNIT`` bytes from ``LayerPages.base``, [pages, R]
    places: Tensor  # the cache row of the row's keys and values, [R]
    prefixes: Tensor  # number of keys in the cache rows of their positions, [R]
    paths: Tensor  # cache rows of the later keys in the order of their positions, [depth, R]; depth 0 without trees
    # first row of each tile, [R]; the rows of a tile follow each other in one sequence and not in a tree, so that one
    # program reads the keys for all of them
    tiles: Tensor
    # number of rows of each tile, [R]; 0 after the last tile; with the query heads of one key head there are at most
    # ``EDGE`` of them
    sizes: Tensor
    longest: int  # at least the greatest of ``ends``

    def followed(self, other: PassRows) -> PassRows:
        """Returns these rows and then the others, whose paths are at least as deep."""
        fields = ("counts", "ends", "pages", "places", "prefixes", "sizes")
        joined = {name: torch.cat((getattr(self, name), getattr(other, name)), -1) for name in fields}
        paths = F.pad(self.paths, (0, 0, 0, len(other.paths) - len(self.paths)))
        tiles = torch.cat((self.tiles, other.tiles + len(self.counts)))
        return PassRows(**joined, paths=torch.cat((paths, other.paths), 1), tiles=tiles, longest=self.longest)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Requests for tokens as tensors on the device, [R] each."""

    addresses: Tensor  # addresses of the logits, float32; 0 for padding
    sources: Tensor  # values of ``native.TokenSource``
    noise: Tensor  # bits of the fraction, a float64, or the key of the race
    top_k: Tensor  # number of tokens to keep; 0 for all
    inverse: Tensor  # inverse temperatures, float32
    floor: Tensor  # logarithms of min_p, float32
    top_p: Tensor  # mass of the nucleus, float32


@dataclass(frozen=True, slots=True)
class ChainRows:
    """Rows above one sampled token among all rows of a step, int64 tensors on the device, [R] each."""

    # addresses of the distributions, float32 [V], that the tokens below the rows were sampled from; 0 without a token
    drawn_from: Tensor
    drafted: Tensor  # these tokens
    firsts: Tensor  # the root's row of each row's chain; the row itself for others, whose weight is 1
    ratios: Tensor  # float64, room for the ratio of target and draft of each token
    masses: Tensor  # float64, mass of each distribution, which it is divided by


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Rows of trees sampled without replacement among all rows of a step, tensors on the device.

    Row numbers and depths are int64, the others float64. Each fills a row once its parent's chunk is computed.
    """

    # addresses of the distributions, float32 [V], that a row's children were sampled from; 0 without children, [R]
    drawn_from: Tensor
    drafted: Tensor  # the token of each row, [R]
    children: Tensor  # the rows below each row in their order, -1 for none, [R, ranks]
    depths: Tensor  # [R]
    recursive: Tensor  # bool, whether a row's tree is verified from the root down: the row begins with weight 1, [R]
    reached: Tensor  # weight with which a row is reached from that of its parent; 1 at the root, [R]
    weights: Tensor  # weight of a row before each of its children is rejected, and at last; 1 at first, [R, 1 + ranks]
    # mass of the excess over the draft's distribution, and of that distribution without the rejected child, [R, ranks]
    masses: Tensor
    rests: Tensor
    chances: Tensor  # the draft's probability of each row's token, [R]
    deepest: int  # the largest depth of a row that may have children

    def measures(self, part: slice) -> Tensor:
        """Returns three measures of computed rows, float64 [rows, 3].

        They are ``reached``, the weight with which a row is accepted as a leaf, and ``chances``.
        """
        weights, children = self.weights[part], (self.children[part] >= 0).sum(1, keepdim=True)
        return torch.stack((self.reached[part], weights.gather(1, children)[:, 0], self.chances[part]), 1)


def rows_per_tile(group: int) -> int:
    """Returns the maximum number of rows of a tile if ``group`` query heads share a key head."""
    return max(1, EDGE // group)

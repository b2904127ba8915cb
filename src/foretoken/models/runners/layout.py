"""A pass as the operations of a layer see it: its rows, and the sizes of its attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.families.layers import Layer
from foretoken.models.runners.triton_kernels.steps import Steps


class Layout(Protocol):
    """The rows of a pass as the operations of a layer see them."""

    @property
    def tokens(self) -> Tensor:
        """The token of each row, int64 [R]."""

    @property
    def positions(self) -> Tensor:
        """The position of each row, int64 [R]."""

    @property
    def counts(self) -> Tensor | None:
        """Number of keys of each row, integers [R], 0 for padding; None if no row is padding."""

    @property
    def steps(self) -> Steps | None:
        """The steps of recurrent layers; None without them."""

    def attend(
        self,
        layer: int,
        queries_keys: Tensor,
        values: Tensor,
        a: Heads,
        view: tuple[int, bool],
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Writes new keys and values to the cache, if any, then computes attention.

        Args:
            layer: index of the layer in the cache.
            queries_keys: [R, heads + kv_heads, head_dim]; [R, heads, head_dim] for a layer without keys.
            values: [R, kv_heads, head_dim], or [R, 0, head_dim].
            view: the keys that a row sees; see ``families.layers.Layer.view``.
            sinks: scores [heads] of a key without a value; None for none.

        Returns:
            [R, heads * head_dim]
        """


class Heads(Protocol):
    """The sizes and factors of a layer's attention."""

    @property
    def heads(self) -> int:
        """Number of query heads."""

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""

    @property
    def scale(self) -> float:
        """Factor of the scores."""

    @property
    def attention_softcap(self) -> float:
        """Cap of the scores; 0 for none."""


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The sizes and factors of one layer's attention, which are ``Heads``."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    attention_softcap: float

    @staticmethod
    def of(a: Architecture, layer: Layer) -> AttentionSizes:
        """Returns the sizes and factors of a decoder's layer."""
        sizes = a.sizes(layer)
        return AttentionSizes(a.heads, sizes.kv_heads, sizes.head_dim, a.scale, a.attention_softcap)

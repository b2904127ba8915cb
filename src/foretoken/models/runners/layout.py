"""A pass as the operations of a layer see it: its rows, and the sizes of its attention."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.families.layers import Layer
from foretoken.models.runners.triton_kernels.steps import Steps


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The sizes and factors of one layer's attention."""

    heads: int  # number of query heads
    kv_heads: int  # number of heads of keys and values
    head_dim: int  # width of a head
    scale: float  # factor of the scores
    attention_softcap: float  # cap of the scores; 0 for none

    @staticmethod
    def of(a: Architecture, layer: Layer) -> "AttentionSizes":
        sizes = a.sizes(layer)
        return AttentionSizes(a.heads, sizes.kv_heads, sizes.head_dim, a.scale, a.attention_softcap)


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
        layer: int,  # index of the layer in the cache
        queries_keys: Tensor,  # [R, heads + kv_heads, head_dim]; [R, heads, head_dim] for a layer without keys
        values: Tensor,  # [R, kv_heads, head_dim], or [R, 0, head_dim]
        a: AttentionSizes,
        view: tuple[int, bool],  # the keys that a row sees; see ``families.layers.Layer.view``
        sinks: Tensor | None = None,  # scores [heads] of a key without a value; None for none
    ) -> Tensor:
        """Writes new keys and values to the cache, if any, then computes attention. Returns [R, heads * head_dim]."""

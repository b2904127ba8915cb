"""Changes of llama.cpp's converter to a checkpoint's tensors, and their inverses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.families.family import group_order
from foretoken.models.families.recurrence import Recurrence
from foretoken.models.formats.gguf.header import StoredTensor
from foretoken.models.formats.grouped import Grouped

Order = NDArray[np.int64]
_TAPS = ("ssm_conv1d", "shortconv.conv")
_STATE_NORM = "ssm_norm"  # the norm of a state's outputs, which has no offset


@dataclass(frozen=True, slots=True, eq=False)
class ChangedTensor:
    """A stored tensor and its differences from the checkpoint's.

    Attributes:
        stored: the tensor.
        shape: its shape in the checkpoint.
        order: the row in the file of each row of the checkpoint; None if they are the same.
        columns: the head in the file of each head of inputs; None if they are the same.
        offset: is subtracted from the stored values.
        transposed: whether a checkpoint has a matrix of floats as [in, out].
    """

    stored: StoredTensor
    shape: tuple[int, ...]
    order: Order | None = None
    columns: Order | None = None
    offset: float = 0.0
    transposed: bool = False

    @property
    def rows(self) -> int:
        """Number of rows. A vector has one, or its length if its order differs."""
        shape = self.stored.shape
        return math.prod(shape[:-1]) if len(shape) > 1 else 1 if self.order is None else shape[0]

    def restored(self, values: Tensor) -> Tensor:
        """Returns the checkpoint's tensor from the stored values by rows."""
        if self.columns is not None:
            values = values.unflatten(-1, (len(self.columns), -1))[..., torch.from_numpy(self.columns), :].flatten(-2)
        values = values.reshape(self.shape[::-1] if self.transposed else self.shape)
        values = values.float() - self.offset if self.offset else values
        return values.t() if self.transposed else values

    def arranged(self, groups: Grouped) -> Grouped | None:
        """Returns a quantized matrix with the checkpoint's inputs; None if groups do not allow it."""
        if self.columns is None:
            return groups
        return groups.with_inputs(torch.from_numpy(self.columns))


def source(stored: StoredTensor, a: Architecture, part: str, interleaved: bool, tiled: bool) -> ChangedTensor:
    """Returns the stored tensor with its differences from the checkpoint's.

    Args:
        part: its name in the file, without ``blk.N.``.
        interleaved: whether rows of queries and keys are stored in pairs.
        tiled: whether heads of values are stored in another order than the keys that serve them.

    Raises:
        ValueError: its shape does not fit the architecture.
    """
    name, _, suffix = part.rpartition(".") if part.endswith((".weight", ".bias")) else (part, "", "")
    result = ChangedTensor(stored, stored.shape)
    if suffix == "weight" and name.endswith("norm") and name != _STATE_NORM:
        result = replace(result, offset=a.norm_offset)
    if name in _TAPS and suffix == "weight":
        result = replace(result, shape=(stored.shape[0], 1, *stored.shape[1:]))
    if a.names.transposed and len(stored.shape) == 2 and name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
        result = replace(result, shape=stored.shape[::-1], transposed=True)
    rows = stored.shape[0]
    if interleaved and name in ("attn_q", "attn_k"):
        return replace(result, order=_pairs(rows, a.heads if name == "attn_q" else a.kv_heads))
    if a.names.by_group and name == "attn_qkv":
        order = np.argsort(group_order(a.heads, a.kv_heads, a.head_dim).numpy())
        if len(order) != rows:
            raise ValueError(f"where {a.heads} and {a.kv_heads} heads have {len(order)} rows")
        return replace(result, order=order)
    r = a.recurrence
    if not tiled or r is None or r.value_heads == r.key_heads:
        return result
    if name == "ssm_out":
        if stored.shape[-1] % r.value_heads:
            raise ValueError(f"which {r.value_heads} heads do not divide")
        return replace(result, columns=_tiles(r, 1))
    if name in ("attn_gate", "attn_qkv", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt", "ssm_conv1d"):
        return replace(result, order=_values_last(r, rows))
    return result


def _pairs(rows: int, heads: int) -> Order:
    """Returns the stored row of each row of heads whose halves are stored in turns."""
    if heads < 1 or rows % (2 * heads):
        raise ValueError(f"which {heads} heads do not divide")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _tiles(r: Recurrence, width: int) -> Order:
    """Returns the stored row of each row of all heads of values.

    A checkpoint groups heads of values by the head of keys that serves them; a file has the first of each group first.
    """
    by_key = np.arange(r.value_heads * width).reshape(-1, r.key_heads, width)
    return by_key.swapaxes(0, 1).reshape(-1)


def _values_last(r: Recurrence, rows: int) -> Order:
    """Returns the stored row of each row of a tensor that ends with the heads of values, all of one width."""
    keys = 2 * r.key_heads * r.key_dim if rows == r.channels else 0
    if (rows - keys) % r.value_heads:
        raise ValueError(f"which {r.value_heads} heads do not divide")
    return np.concatenate([np.arange(keys), keys + _tiles(r, (rows - keys) // r.value_heads)])

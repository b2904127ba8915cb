"""Top-k and top-p filters that avoid sorting whole rows where possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 32  # entries per block; ``largest`` compares the maxima of blocks first


def kth_largest(scores: Tensor, k: int) -> Tensor:
    """Returns the k-th largest score of each row. [rows, V] -> [rows, 1]

    On the CPU numpy's partition is used: torch's topk sorts all k entries.
    """
    if not scores.is_cpu:
        return scores.topk(k, dim=-1).values[..., -1:]
    return torch.from_numpy(np.partition(scores.numpy(), -k, axis=-1)[:, -k, None])


def largest(row: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Returns the ids of the ``k`` largest entries and of entries that tie with the k-th, in rising order.

    The row is divided into blocks, each of every ``blocks``-th entry. At least k entries, and few others, reach the
    k-th largest of the blocks' maxima, so only those are partitioned. NaN is kept: the draw refuses it later.

    Args:
        row: [V], with at least k blocks.
        k: Number of entries.
    """
    blocks = row.size // BLOCK
    floor = np.partition(row[: blocks * BLOCK].reshape(BLOCK, blocks).max(0), -k)[-k]
    ids = np.flatnonzero(~(row < floor))
    return ids[~(row[ids] < np.partition(row[ids], -k)[-k])]


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Returns probabilities over the nucleus of each row: the smallest set of top tokens whose mass reaches ``top_p``.

    The nucleus has at least one token and equals that of ``nucleus_sorted``. On the CPU only the head of each row is
    sorted and normalized.

    Args:
        scores: [rows, V].
        top_p: Mass of the nucleus.
    """
    if not scores.is_cpu:
        return nucleus_sorted(scores, top_p).softmax(-1)
    result = torch.zeros_like(scores)
    for probs, row, target in zip(scores.softmax(-1).numpy(), scores, result, strict=True):
        ids = torch.from_numpy(_head(probs, top_p))
        target[ids] = row[ids].softmax(-1)
    return result


def _head(probs: NDArray[Any], top_p: float) -> NDArray[np.int64]:
    """Returns the ids of one row's nucleus: tokens preceded by less than ``top_p`` of the mass, lowest ids on ties.

    Apart from rounding, no token under (1 - top_p) / V belongs to it. Usually far fewer tokens are sorted.
    """
    for floor in (1e-3, (1.0 - top_p) / probs.size, 0.0):
        head = np.sort(probs[probs >= floor])[::-1]
        # torch sums a row in the same way: in float64, rounded at every entry.
        before = head.cumsum(dtype=np.float64).astype(head.dtype) - head
        count = int(np.searchsorted(before, head.dtype.type(top_p)))
        if 0 < count < head.size or floor == 0.0:
            break
    if count == 0:  # a row of NaN, which the draw refuses
        return np.arange(0)
    lowest = head[count - 1]
    ids = np.flatnonzero(probs >= lowest)
    if ids.size > count:
        tied = np.flatnonzero(probs[ids] == lowest)
        ids = np.delete(ids, tied[count - ids.size :])
    return ids


def nucleus_sorted(scores: Tensor, top_p: float) -> Tensor:
    """Returns ``scores`` with -inf outside the nucleus, by sorting whole rows, lowest id first on ties.

    It needs no synchronization with the device.
    """
    ordered, ids = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    dropped = torch.empty_like(before, dtype=torch.bool).scatter_(-1, ids, before >= top_p)
    return scores.masked_fill(dropped, -torch.inf)

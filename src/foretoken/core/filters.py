"""Which tokens top-k and top-p leave, without ordering whole rows where that can be helped."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 32  # tokens whose largest score is looked at first where few are wanted


def kth_largest(scores: Tensor, k: int) -> Tensor:
    """[rows, V] to [rows, 1]. numpy selects where torch would order all k."""
    if not scores.is_cpu:
        return scores.topk(k, dim=-1).values[..., -1:]
    return torch.from_numpy(np.partition(scores.numpy(), -k, axis=-1)[:, -k, None])


def largest(row: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Ids of the ``k`` largest entries and of those equal to the least of them, in rising order.

    row: [V], of at least k blocks; a block is every ``blocks``-th entry. The k-th largest of their maxima is a floor
    that k entries reach and few others, so few are ordered. NaN is kept, for the draw to refuse.
    """
    blocks = row.size // BLOCK
    floor = np.partition(row[: blocks * BLOCK].reshape(BLOCK, blocks).max(0), -k)[-k]
    ids = np.flatnonzero(~(row < floor))
    return ids[~(row[ids] < np.partition(row[ids], -k)[-k])]


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """[rows, V] to probabilities: the smallest set of most probable tokens whose mass reaches ``top_p``, at least one.

    The set is that of ``nucleus_sorted``; here the head of each row alone is ordered, and normalised.
    """
    if not scores.is_cpu:
        return nucleus_sorted(scores, top_p).softmax(-1)
    found = torch.zeros_like(scores)
    for probs, row, target in zip(scores.softmax(-1).numpy(), scores, found, strict=True):
        ids = torch.from_numpy(_head(probs, top_p))
        target[ids] = row[ids].softmax(-1)
    return found


def _head(probs: NDArray[Any], top_p: float) -> NDArray[np.int64]:
    """Ids of one row's nucleus: the tokens before which less than ``top_p`` of the mass lies, lowest ids on ties.

    Tokens under (1 - top_p) / V cannot be among them, save for rounding; mostly far fewer are ordered.
    """
    for floor in (1e-3, (1.0 - top_p) / probs.size, 0.0):
        head = np.sort(probs[probs >= floor])[::-1]
        # As torch sums a row: in float64, rounded at every entry.
        before = head.cumsum(dtype=np.float64).astype(head.dtype) - head
        count = int(np.searchsorted(before, head.dtype.type(top_p)))
        if 0 < count < head.size or floor == 0.0:
            break
    if count == 0:  # a row of NaN, which the draw will refuse
        return np.arange(0)
    least = head[count - 1]
    ids = np.flatnonzero(probs >= least)
    if ids.size > count:
        tied = np.flatnonzero(probs[ids] == least)
        ids = np.delete(ids, tied[count - ids.size :])
    return ids


def nucleus_sorted(scores: Tensor, top_p: float) -> Tensor:
    """The nucleus by ordering whole rows, lowest id first on ties: no waiting where that matters."""
    ordered, ids = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    dropped = torch.empty_like(before, dtype=torch.bool).scatter_(-1, ids, before >= top_p)
    return scores.masked_fill(dropped, -torch.inf)

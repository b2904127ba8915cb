"""Python interface of the compiled sampling kernels: probabilities and draws from float32 logits on the CPU.

Each caller also implements the function with torch or numpy operators, for all other tensors.
"""

import ctypes
import functools
import logging
import math
import os
from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.native import cpu
from foretoken.core.native.build import SHARED, SWITCH, KernelsUnavailable, compiled, require
from foretoken.core.native.status import Headers, check_layout, declare, load

_SOURCE = SHARED / "sampling.cpp"
_MAX_FLOAT = torch.finfo(torch.float32).max
_log = logging.getLogger(__name__)
_HEADERS = Headers(
    SHARED,
    (
        *("adjustment.hpp", "distribution.hpp", "token_row.hpp", "successors.hpp", "copies.hpp"),
        *("leader_spec.hpp", "chain_verdict.hpp"),
    ),
)


@_HEADERS.mirrored
class _Distribution(Structure):
    """See csrc/distribution.hpp."""


@_HEADERS.mirrored
class Adjustment(Structure):
    """Changes of one row of logits, in the order in which they are applied (csrc/adjustment.hpp, ``SamplingLaw``)."""

    def hold(self, **arrays: NDArray[Any]) -> None:
        """Sets pointers to arrays, which the object keeps alive. Their lengths are set by the caller."""
        for name, array in arrays.items():
            if self.__dict__.get(f"_{name}") is not array:
                self.__dict__[f"_{name}"] = array
                setattr(self, name, array.ctypes.data)


@_HEADERS.mirrored
class FilterSpec(Structure):
    """Parameters of a row for the kernels."""


class TokenSource(IntEnum):
    """The source of a row's token, with the values of csrc/sampling.cpp."""

    GIVEN = 0
    LIKELIEST = 1
    FRACTION = 2
    RACE = 3


@_HEADERS.mirrored
class DraftNodes(Structure):
    """The nodes of a draft of fixed candidates into which a row's token may lead (csrc/token_row.hpp)."""


@_HEADERS.mirrored
class TokenRow(Structure):
    """All that is read of a row of logits: its token, log-probabilities and most probable tokens (csrc/token_row.hpp).

    The noise is that of ``Noise.bits``; with a position it is the ``streams.purpose_key`` of the draw at index 0.
    Listed tokens are the most probable ones of the unchanged logits, lower ids first on ties.
    """

    tensor: Tensor | None
    adjustment: Adjustment | None
    pointer: ctypes.Array[c_void_p]
    unread: Any = None  # the draft below, if it is on a device
    node: int = 0  # address of its first node there
    # masks [n] of possible tokens of the row and of the draft's nodes, in place of those of ``changes``, for a device
    masks: Sequence[NDArray[np.bool_]] = ()
    tokenwise: bool = False  # whether a device verifies a sampled chain token by token

    @staticmethod
    def of(logits: Tensor, source: TokenSource, changes: Adjustment | None = None) -> "TokenRow":
        """Returns the request for one row, which keeps ``logits`` [1, V] and ``changes`` alive."""
        row = TokenRow(logits=logits.data_ptr(), source=source, top_count=-1, position=-1)
        row.tensor, row.adjustment, row.pointer = logits, changes, (c_void_p * 1)(addressof(row))
        if changes is not None:
            row.changes = addressof(changes)
        return row

    def at_node(self) -> "TokenRow":
        """Returns a request like this one for a node of the draft below it. The kernels set its logits and changes."""
        row = TokenRow.from_buffer_copy(self)
        row.below = None
        if self.top_count >= 0:
            row.list_top(self.top_count)
        return row

    def list_top(self, count: int) -> None:
        """Requests log-probabilities of the token and of the ``count`` most probable ones."""
        self._ids, self._logprobs = (c_int64 * count)(), (c_double * count)()
        self.top_count, self.top_ids, self.top_logprobs = count, addressof(self._ids), addressof(self._logprobs)

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """The most probable tokens and their log-probabilities, the most probable first."""
        return tuple(zip(self._ids, self._logprobs, strict=True))


class Filter(NamedTuple):
    """Temperature and filters of a row. See ``SamplingLaw``."""

    temperature: float
    min_p: float
    top_k: int
    top_p: float

    def spec(self, vocabulary: int) -> FilterSpec:
        """Returns these numbers for the kernels."""
        floor = math.log(self.min_p) if self.min_p > 0.0 else -math.inf
        top_k = min(max(self.top_k, 0), vocabulary)  # a larger one would overflow 32 bits
        return FilterSpec(min(1.0 / self.temperature, _MAX_FLOAT), floor, top_k, self.top_p)


class Noise(NamedTuple):
    """The random number of one draw."""

    races: bool  # whether the token is the winner of a race, else the token at a fraction of the mass
    bits: int  # key of the race, or the bits of the fraction, a float64


@_HEADERS.mirrored
class SuccessorTable(Structure):
    """Likeliest successors of each token, and how often those of each rank came true, as the kernels read them."""

    @staticmethod
    def of(successors: NDArray[np.int32], hits: NDArray[np.float64]) -> "SuccessorTable":
        """Returns the table of contiguous arrays [V, width] (-1 for none) and [width], which it does not keep alive."""
        return SuccessorTable(successors.ctypes.data, hits.ctypes.data, *successors.shape)


@_HEADERS.mirrored
class CopySearch(Structure):
    """A search for earlier occurrences of the end of a text (csrc/copies.hpp)."""


@_HEADERS.mirrored
class LeaderSpec(Structure):
    """A request for the best tokens of rows of logits (csrc/leader_spec.hpp)."""


@_HEADERS.mirrored
class SampledChain(Structure):
    """A chain of sampled tokens and the target's logits (csrc/chain_verdict.hpp)."""


class Kernels:
    """The compiled library. Logits are float32 [rows, V] with contiguous rows."""

    def __init__(self, library: ctypes.CDLL) -> None:
        check_layout(
            library,
            (
                FilterSpec,
                _Distribution,
                SuccessorTable,
                SampledChain,
                CopySearch,
                Adjustment,
                LeaderSpec,
                DraftNodes,
                TokenRow,
            ),
        )
        functions = (library[f"foretoken_{name}"] for name in ("choose", "draw", "leaders", "change"))
        self.drawing = tuple(ctypes.cast(function, c_void_p).value for function in functions)
        pointer, wide, number = c_void_p, c_int64, c_int32
        logits, token = (pointer, wide, wide, wide), POINTER(c_int64)
        distributions, filters = POINTER(_Distribution), POINTER(FilterSpec)
        self._find = declare(library, "foretoken_distributions", *logits, filters, distributions, number)
        self._rows = declare(library, "foretoken_rows", *logits, distributions, pointer, number)
        self._chances = declare(library, "foretoken_chances", *logits, distributions, token, POINTER(c_float))
        self._best = declare(library, "foretoken_best", *logits, token, number)
        self._adjust = declare(library, "foretoken_adjust", *logits, POINTER(Adjustment), pointer, number)
        self._largest = declare(library, "foretoken_largest", *logits, wide, pointer, number)
        self._leaders = declare(library, "foretoken_leaders", POINTER(LeaderSpec), number)
        self._choose_tokens = declare(library, "foretoken_choose_tokens", pointer, wide, wide, number)
        tree = (POINTER(SuccessorTable), c_double, wide, wide, wide, pointer, pointer, pointer, token)
        self._tree = declare(library, "foretoken_heaviest_tree", *tree)
        chain = (POINTER(SampledChain), filters, c_uint64, token, token, number)
        self._verify_chain = declare(library, "foretoken_verify_chain", *chain)
        short = POINTER(c_int32)
        copies = (POINTER(CopySearch), pointer, pointer, pointer, short, short)
        self._copies = declare(library, "foretoken_copies", *copies)
        excess = (pointer, number, pointer, c_double, pointer, wide, POINTER(c_double), number)
        self._excess = declare(library, "foretoken_excess", *excess)
        weights = (pointer, number, wide)
        self._draw = declare(library, "foretoken_draw", *weights, c_double, token, POINTER(c_double), number)
        self._race = declare(library, "foretoken_race", *weights, c_uint64, token, number)

    def best(self, logits: Tensor) -> list[int]:
        """Returns the likeliest token of each row, the lowest id on ties; -1 if the row has none.

        A row has none if a logit is NaN or the largest one is not finite.
        """
        (rows, vocabulary), tokens = logits.shape, (c_int64 * logits.shape[0])()
        self._best(logits.data_ptr(), logits.stride(0), rows, vocabulary, tokens, torch.get_num_threads())
        return list(tokens)

    def adjusted(self, logits: Tensor, changes: Sequence[Adjustment]) -> Tensor:
        """Returns a copy of the rows with their changes. A row without a possible token is NaN."""
        out, (rows, vocabulary) = torch.empty(logits.shape), logits.shape
        specs, threads = (Adjustment * rows)(*changes), torch.get_num_threads()
        self._adjust(logits.data_ptr(), logits.stride(0), rows, vocabulary, specs, out.data_ptr(), threads)
        return out

    def largest(self, logits: Tensor, count: int) -> NDArray[np.int64]:
        """Returns the ids of the largest logits of each row, largest first, lower ids first on ties: [rows, count]."""
        rows, vocabulary = logits.shape
        ids = np.empty((rows, min(count, vocabulary)), dtype=np.int64)
        target, threads = ids.ctypes.data, torch.get_num_threads()
        self._largest(logits.data_ptr(), logits.stride(0), rows, vocabulary, ids.shape[1], target, threads)
        return ids

    def leaders(self, logits: Tensor, count: int, kept: Filter, keys: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Returns the ``count`` best tokens of each row, best first, and the logs of their shares.

        Args:
            logits: [rows, V].
            count: At most V.
            kept: Temperature and filters.
            keys: Key of each row's race, whose leaders are returned with their shares of all scores. Empty for the most
                probable tokens.

        Returns:
            int64 [rows, count] and float32 [rows, count]; a share is -inf if there is no such token.
        """
        (rows, vocabulary), noise = logits.shape, (c_uint64 * len(keys))(*keys)
        ids, shares = torch.empty(rows, count, dtype=torch.int32), torch.empty(rows, count)
        filters = kept.spec(vocabulary)
        spec = LeaderSpec(logits.data_ptr(), None, addressof(filters), addressof(noise) if keys else None)
        spec.stride, spec.key_stride, spec.rows, spec.n, spec.count = logits.stride(0), 1, rows, vocabulary, count
        spec.tokens, spec.scores = ids.data_ptr(), shares.data_ptr()
        self._leaders(spec, torch.get_num_threads())
        return ids.long(), shares

    def choose_tokens(self, rows: Sequence[TokenRow], vocabulary: int, threads: int = 0) -> None:
        """Computes the results of rows of ``vocabulary`` logits, all in one call. threads: 0 for torch's number."""
        count = len(rows)
        pointers = rows[0].pointer if count == 1 else (c_void_p * count)(*map(addressof, rows))
        self._choose_tokens(pointers, count, vocabulary, threads or torch.get_num_threads())

    def tree(
        self, table: SuccessorTable, trials: float, root: int, budget: int, max_depth: int
    ) -> tuple[list[int], list[int], list[float]]:
        """Returns the ``budget`` heaviest nodes below ``root`` as tokens, parents and weights. See ``Recycling``."""
        tokens, parents, weights = (c_int64 * budget)(), (c_int64 * budget)(), (c_double * budget)()
        count = c_int64()
        self._tree(table, trials, root, budget, max_depth, tokens, parents, weights, count)
        return tokens[: count.value], parents[: count.value], weights[: count.value]

    def verify_chain(self, logits: Tensor, ids: Sequence[int], q: Tensor, kept: Filter, key: int) -> tuple[int, int]:
        """Verifies sampled tokens as ``verify.block`` does.

        Args:
            logits: [n+1, V].
            ids: [n].
            q: float32 [n, V] or more rows, contiguous; the distributions of the tokens.
            kept: The target's filters.
            key: Of a ``PrivateStream``.

        Returns:
            The number of accepted tokens and the token behind them, -1 where none is possible.
        """
        accepted, token, (vocabulary, count) = c_int64(), c_int64(), (logits.shape[1], len(ids))
        tokens = (c_int64 * count)(*ids)
        chain = SampledChain(logits.data_ptr(), addressof(tokens), q.data_ptr(), logits.stride(0), vocabulary, count)
        self._verify_chain(chain, kept.spec(vocabulary), key, accepted, token, torch.get_num_threads())
        return accepted.value, token.value

    def copies(self, search: CopySearch) -> tuple[list[int], list[int], list[float], int]:
        """Returns tokens, parents and probabilities of the tree that a search finds, and the length of its match."""
        budget = search.budget
        tokens, parents, probs = (c_int32 * budget)(), (c_int32 * budget)(), (c_double * budget)()
        count, length = c_int32(), c_int32()
        self._copies(search, tokens, parents, probs, count, length)
        return tokens[: count.value], parents[: count.value], probs[: count.value], length.value

    def rows(self, logits: Tensor, kept: Filter) -> Tensor:
        """Returns probabilities, float32 [rows, V]. A row that contains NaN or whose maximum is not finite is NaN."""
        out = torch.empty(logits.shape)
        distributions, (rows, vocabulary) = self._distributions(logits, kept), logits.shape
        self._rows(
            logits.data_ptr(),
            logits.stride(0),
            rows,
            vocabulary,
            distributions,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def chances(self, logits: Tensor, tokens: Sequence[int], kept: Filter) -> list[float]:
        """Returns the probability of ``tokens[r]`` in row r, equal to that of ``rows``, without writing rows."""
        ids, out = (c_int64 * len(tokens))(*tokens), (c_float * len(tokens))()
        distributions = self._distributions(logits, kept)
        self._chances(logits.data_ptr(), logits.stride(0), len(tokens), logits.shape[1], distributions, ids, out)
        return list(out)

    def _distributions(self, logits: Tensor, kept: Filter) -> ctypes.Array[_Distribution]:
        rows, vocabulary = logits.shape
        distributions = (_Distribution * rows)()
        filters, threads = kept.spec(vocabulary), torch.get_num_threads()
        self._find(logits.data_ptr(), logits.stride(0), rows, vocabulary, filters, distributions, threads)
        return distributions

    def excess(self, p: Tensor, q: Tensor, weight: float) -> tuple[Tensor, float]:
        """Returns (weight p - q)+ in float64 [V], and its mass. p: float32 or float64; q: float32."""
        out = torch.empty(p.shape, dtype=torch.float64)
        mass, wide, threads = c_double(), p.dtype == torch.float64, torch.get_num_threads()
        self._excess(p.data_ptr(), wide, q.data_ptr(), weight, out.data_ptr(), p.shape[0], mass, threads)
        return out, mass.value

    def draw(self, weights: Tensor, u: float) -> tuple[int, float]:
        """Returns the token at fraction ``u`` of the total weight (-1 if no token is possible), and the total."""
        token, total = c_int64(), c_double()
        wide = weights.dtype == torch.float64
        self._draw(weights.data_ptr(), wide, weights.shape[0], u, token, total, torch.get_num_threads())
        return token.value, total.value

    def race(self, weights: Tensor, key: int) -> int:
        """Returns the argmax of weights / E under ``key``, lowest id on ties; -1 where all are zero."""
        token, wide = c_int64(), weights.dtype == torch.float64
        self._race(weights.data_ptr(), wide, weights.shape[0], key, token, torch.get_num_threads())
        return token.value


def kernels() -> Kernels | None:
    """Returns the library, compiled on first use; None if it cannot be compiled."""
    return _kernels(os.environ.get(SWITCH), os.environ.get(cpu.VARIABLE))


@functools.cache
def _kernels(*_: str | None) -> Kernels | None:
    """Returns the library for the environment variables that choose it."""
    try:
        library = load(compiled(_SOURCE, (), require()))
    except KernelsUnavailable as why:
        _log.info("sampling uses torch operators: %s", why)
        return None
    return Kernels(library)


def drawing() -> tuple[int | None, ...] | None:
    """Returns the addresses of kernels that other kernels call: they draw a token by logits, draw one by weights,
    rank tokens, and change logits. None without kernels.
    """
    return library.drawing if (library := kernels()) else None


def for_rows(logits: Tensor) -> Kernels | None:
    """Returns the kernels if they support ``logits`` [rows, V], else None."""
    fits = logits.is_cpu and logits.dtype == torch.float32 and logits.ndim == 2 and logits.stride(1) == 1
    return kernels() if fits and logits.shape[1] > 1 else None


def for_weights(*weights: Tensor) -> Kernels | None:
    """Returns the kernels if they support ``weights``, [V] each: the first float32 or float64, the others float32."""
    for i, tensor in enumerate(weights):
        kinds = (torch.float32, torch.float64)[: 2 - bool(i)]
        if not tensor.is_cpu or tensor.dtype not in kinds or tensor.ndim != 1 or tensor.stride(0) != 1:
            return None
    return kernels()

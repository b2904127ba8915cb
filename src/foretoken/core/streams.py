"""Counter-based random numbers, addressed by (seed, purpose, position, index).

The generator is SplitMix64's output function (Steele et al., OOPSLA 2014) over a key mixed from the address. It has no
state, so a request's numbers do not depend on what shares its batch. Drafting and verification use the same numbers
only in the trajectory grade (2408.07978), where both use the purpose SHARED.
"""

import hashlib
import math
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import lru_cache
from struct import pack, unpack
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.checks import MAX_SEED as MAX_SEED
from foretoken.core.checks import MIN_SEED as MIN_SEED
from foretoken.core.native import sampling as native

MAX_DERIVED_SEED = 2**128 - 1

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_SMALL = 1 << 14  # vocabularies up to this size compute the noise of all tokens
EARLY = 2.0**-8  # larger ones first list exponentials under this; dividing by a power of two is exact

Reals = NDArray[np.floating[Any]]
Ids = NDArray[np.int64]


class Purpose(IntEnum):
    """The use of a random number. Different purposes never use the same number."""

    DRAFT = 1
    VERIFY = 2
    SHARED = 3


class SeedDomain(StrEnum):
    """The use of a derived seed. Seeds of different domains differ."""

    COMPLETION = "completion"  # the second and later completions of a request with a seed
    REQUEST = "request"  # all completions of a request without a seed
    REPLICA = "replica"  # the engine of one replica of a server
    GENERATE = "generate"  # a row of a call of transformers' ``generate``
    PLAN = "plan"  # a text that the planner generates


class Uniform(Protocol):
    """One number between 0 and 1."""

    def below(self, p: float) -> bool:
        """Returns whether the number is below ``p``. Calls with several ``p`` compare the same number."""
        ...


class Stream(Protocol):
    """Interface of the random numbers of a verifier or proposer. Tests replace it by exact enumeration.

    ``index`` addresses the draw within the step. No index may be used for two different draws.
    """

    def bernoulli(self, p: float, index: int) -> bool:
        """Returns True with probability ``p``."""
        ...

    def uniform(self, index: int) -> Uniform:
        """Returns the number that ``bernoulli(p, index)`` compares with p, for callers that refine p stepwise."""
        ...

    def categorical(self, weights: Tensor, index: int) -> int:
        """Samples a token with probability proportional to ``weights`` [V]."""
        ...


@dataclass(frozen=True, slots=True)
class Streams:
    """All random numbers of one sequence.

    seed: A user's seed, from ``MIN_SEED`` to ``MAX_SEED``, or a result of ``derived_seed``.
    """

    seed: int

    def private(self, purpose: Purpose, position: int) -> Stream:
        """Returns the stream of one purpose for the step that begins after ``position`` generated tokens."""
        return PrivateStream(stream_key(self.seed, purpose, position))

    def shared(self, position: int) -> Stream:
        """Returns the stream of the noise G[seed, position + index, token], shared by all its users."""
        return SharedStream(self.seed, position)


@dataclass(frozen=True, slots=True)
class Number:
    """A ``Uniform`` with a known value."""

    value: float

    def below(self, p: float) -> bool:
        return self.value < p


@dataclass(frozen=True, slots=True)
class PrivateStream:
    """Inverse-CDF sampling with one uniform number per draw."""

    key: int

    def bernoulli(self, p: float, index: int) -> bool:
        return self._uniform(2 * index) < p

    def uniform(self, index: int) -> Uniform:
        return Number(self._uniform(2 * index))

    def categorical(self, weights: Tensor, index: int) -> int:
        u = self._uniform(2 * index + 1)
        if kernels := native.for_weights(weights):
            token, total = kernels.draw(weights, u)
        else:
            cumulative = weights.double().cumsum(-1)
            total = float(cumulative[-1])
            token = int(torch.searchsorted(cumulative, u * total, right=True)) if total > 0.0 else -1
        if token < 0:
            raise ValueError(f"cannot draw from weights that sum to {total}")
        # Rounding can put the point past the end; the last token with any mass is then the right one.
        return token if token < weights.shape[-1] else int(weights.nonzero()[-1])

    def noise(self, index: int) -> native.Noise:
        """Returns the number of a categorical draw."""
        (bits,) = unpack("<Q", pack("<d", self._uniform(2 * index + 1)))
        return native.Noise(False, bits)

    def uniforms(self, count: int) -> list[float]:
        """Returns the numbers of the first ``count`` categorical draws."""
        return [self._uniform(2 * index + 1) for index in range(count)]

    def _uniform(self, counter: int) -> float:
        # 52 bits and a half: never 0, and never 1, which 53 bits could round to.
        return ((splitmix(self.key + counter * GOLDEN) >> 12) + 0.5) * 2.0**-52


@dataclass(frozen=True, slots=True)
class SharedStream:
    """Sampling by the exponential race argmax(p / E), which equals argmax(log p + Gumbel noise), with addressed E."""

    seed: int
    position: int

    def bernoulli(self, p: float, index: int) -> bool:
        raise TypeError("shared noise answers categorical draws only; the coupled rule needs no other")

    def uniform(self, index: int) -> Uniform:
        raise TypeError("shared noise answers categorical draws only; the coupled rule needs no other")

    def categorical(self, weights: Tensor, index: int) -> int:
        if kernels := native.for_weights(weights):
            token = kernels.race(weights, self._key(index))
            return token if token >= 0 else _nothing_to_draw()
        if weights.is_cpu:
            return race_winner(weights.numpy(), self._key(index))
        scores = self.race(weights, index)
        return int(scores.argmax()) if bool((scores > 0).any()) else _nothing_to_draw()

    def noise(self, index: int) -> native.Noise:
        """Returns the key of a categorical draw."""
        return native.Noise(True, self._key(index))

    def race(self, weights: Tensor, index: int) -> Tensor:
        """Returns weights / E, float64 [V]. The largest entry wins; the next largest are the likeliest alternatives."""
        return weights.double() / exponentials(self._key(index), weights.shape[-1], weights.device)

    def keys(self, count: int) -> list[int]:
        """Returns the keys of the first ``count`` categorical draws."""
        return [self._key(index) for index in range(count)]

    def _key(self, index: int) -> int:
        return stream_key(self.seed, Purpose.SHARED, self.position + index)


def exponentials(key: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """Returns ``size`` standard exponentials of one key, float64. Entry i depends on (key, i) alone."""
    if torch.device(device).type == "cpu":
        return torch.from_numpy(_finished(_mixed(key, _counters(size))))
    return exponentials_at(_signed(key), torch.arange(size, device=device))


def exponentials_at(key: int | Tensor, ids: Tensor) -> Tensor:
    """Returns the exponentials of ``ids``, int64 [n], with torch's operators, which may run on a device.

    key: A key as a signed number, or int64 [rows, 1], whose exponentials are [rows, n].
    """
    z = (ids + 1) * _signed(GOLDEN) + key
    for shift, multiplier in _MIX:
        z = (z ^ _shift_right(z, shift)) * _signed(multiplier)
    bits = _shift_right(z ^ _shift_right(z, 31), 12)
    return -torch.log((bits.double() + 0.5) * 2.0**-52)


def race_winner(weights: Reals, key: int) -> int:
    """Returns the argmax of weights / E, lowest id on ties, computing noise only for tokens that can win.

    Where most weights are zero, only the others can win. Otherwise tokens with E < ``EARLY`` are scored first; b is
    their best score. Every other token scores at most weight / ``EARLY``, so it can win only if its weight is at least
    b ``EARLY``. Both bounds are exact, and so is the winner.
    """
    if weights.size <= _SMALL:
        scores = weights / _all_exponentials(key, weights.size)
        best = int(scores.argmax())
        return best if scores[best] > 0.0 else _nothing_to_draw()
    possible = weights > 0.0
    count = np.count_nonzero(possible)
    if count == 0:
        return _nothing_to_draw()
    if count * 16 < weights.size:
        ids = np.flatnonzero(possible)
        return int(ids[(weights[ids] / _exponentials(key, ids)).argmax()])
    early, noise = early_exponentials(key, weights.size)
    scores = weights[early] / noise
    # Rounded down, so that rounding the bound to the weights' type excludes no token.
    bound = np.nextafter(weights.dtype.type(scores.max(initial=0.0) * EARLY), -1.0)
    ids = np.flatnonzero(weights > max(0.0, bound))
    scores = np.concatenate((scores, weights[ids] / _exponentials(key, ids)))
    return int(np.concatenate((early, ids))[scores == scores.max()].min())


def _nothing_to_draw() -> NoReturn:
    raise ValueError("cannot draw from weights that are all zero")


# These caches let the target reuse the noise that its draft computed for the same positions.


@lru_cache(maxsize=128)
def _all_exponentials(key: int, size: int) -> Reals:
    return _finished(_mixed(key, _counters(size)))


@lru_cache(maxsize=1024)
def early_exponentials(key: int, size: int) -> tuple[Ids, Reals]:
    """Returns the ids under ``size`` whose exponential is under ``EARLY``, and those exponentials.

    A few larger ones may be included: only the upper 31 bits are compared, which the hash's last step does not change.
    """
    mixed = _mixed(key, _counters(size))
    ids = np.flatnonzero(mixed >= np.uint64(math.floor(math.exp(-EARLY) * 2**31) << 33))
    return ids, _finished(mixed[ids])


@lru_cache(maxsize=8)
def _counters(size: int) -> NDArray[np.uint64]:
    """Returns the counters of ids under ``size``, to which a key is added."""
    return np.arange(1, size + 1, dtype=np.uint64) * np.uint64(GOLDEN)


def _exponentials(key: int, ids: Ids) -> Reals:
    return _finished(_mixed(key, (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)))


def _mixed(key: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns SplitMix64 of ``counters`` under one key, without its last step."""
    z = counters + np.uint64(key & _MASK)
    for shift, multiplier in _MIX:
        z ^= z >> np.uint64(shift)
        z *= np.uint64(multiplier)
    return z


def splitmixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = _mixed(0, z)
    return z ^ z >> np.uint64(31)


def step_keys(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns ``stream_key`` for results of ``purpose_key`` and a position each."""
    return splitmixed(keys ^ positions.astype(np.uint64) * np.uint64(_MIX[1][1]))


def _finished(z: NDArray[np.uint64]) -> Reals:
    """Applies the last step of the hash. Returns the numbers in (0, 1) as exponentials."""
    z = (z ^ z >> np.uint64(31)) >> np.uint64(12)
    noise = np.log((z + 0.5) * 2.0**-52)
    return np.negative(noise, out=noise)


def derived_seed(domain: SeedDomain, *parts: int | str) -> int:
    """Returns a seed from 2**127 to ``MAX_DERIVED_SEED``, a range that contains no user's seed.

    Args:
        domain: The use of the seed.
        parts: Distinguish it from the other seeds of its domain, for example the number of a request.
    """
    data = repr((str(domain), *parts)).encode()
    return 2**127 | int.from_bytes(hashlib.blake2b(data, digest_size=16).digest(), "big")


def random_seed_from(*parts: int) -> int:
    """Returns a 64-bit hash of ``parts``. Their order and number matter."""
    data = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def stream_key(seed: int, purpose: int, position: int) -> int:
    """Returns the key, 64 bits, from which all numbers of an address are mixed."""
    return step_key(purpose_key(seed, purpose), position)


def step_key(key: int, position: int) -> int:
    """Returns ``stream_key`` for a result of ``purpose_key``."""
    return splitmix(key ^ (position * _MIX[1][1] & _MASK))


def purpose_key(seed: int, purpose: int) -> int:
    """Returns the key of a seed and a purpose, into which ``stream_key`` mixes the position."""
    key = splitmix(seed & _MASK)
    if seed > _MASK:  # a derived seed has 128 bits
        key = splitmix((key + GOLDEN) ^ (seed >> 64))
    return splitmix(key ^ (purpose * GOLDEN & _MASK))


def splitmix(z: int) -> int:
    z &= _MASK
    for shift, multiplier in _MIX:
        z = ((z ^ (z >> shift)) * multiplier) & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical right shift. torch's own is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)

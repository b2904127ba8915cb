"""Random numbers addressed by (seed, purpose, position, index): the same address, the same number, anywhere.

A counter-based generator: SplitMix64's output function (Steele et al., OOPSLA 2014) over a key mixed from the
address. No state, so a request's numbers never depend on its neighbours, and drafting and verifying share
one only when they share all of it on purpose (the trajectory grade, 2408.07978).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


class Purpose(IntEnum):
    """Who draws. Two purposes never see the same number."""

    DRAFT = 1
    VERIFY = 2
    SHARED = 3


class Stream(Protocol):
    """The randomness a verifier or proposer sees; an exact enumerator can stand in for it.

    ``index`` addresses the draw within the round: no address may be used twice for different questions.
    """

    def bernoulli(self, p: float, index: int) -> bool:
        """True with probability ``p``."""
        ...

    def categorical(self, weights: Tensor, index: int) -> int:
        """A token with probability proportional to ``weights`` [V]."""
        ...


@dataclass(frozen=True, slots=True)
class Streams:
    """All random numbers of one request."""

    seed: int

    def private(self, purpose: Purpose, position: int) -> Stream:
        """Numbers of one round that begins after ``position`` tokens, for one purpose alone."""
        return PrivateStream(_key(self.seed, purpose, position))

    def shared(self, position: int) -> Stream:
        """The noise G[seed, position + index, token], the same for whoever asks."""
        return SharedStream(self.seed, position)


@dataclass(frozen=True, slots=True)
class PrivateStream:
    """One uniform per draw, inverse-CDF sampling."""

    key: int

    def bernoulli(self, p: float, index: int) -> bool:
        return self._uniform(2 * index) < p

    def categorical(self, weights: Tensor, index: int) -> int:
        cumulative = weights.double().cumsum(-1)
        total = float(cumulative[-1])
        if not total > 0.0:
            raise ValueError(f"cannot draw from weights that sum to {total}")
        point = torch.tensor(self._uniform(2 * index + 1) * total, dtype=torch.float64)
        drawn = int(torch.searchsorted(cumulative, point.to(cumulative.device), right=True))
        # Rounding can put the point at the very end; the last token with any mass is then the right one.
        return drawn if drawn < weights.shape[-1] else int(weights.nonzero()[-1])

    def _uniform(self, counter: int) -> float:
        # 52 bits and a half: never 0 and, as 53 bits would sometimes round to, never 1.
        return ((_splitmix(self.key + counter * _GOLDEN) >> 12) + 0.5) * 2.0**-52


@dataclass(frozen=True, slots=True)
class SharedStream:
    """Exponential race argmax(p / E), the same as argmax(log p + Gumbel noise), with addressed E."""

    seed: int
    position: int

    def bernoulli(self, p: float, index: int) -> bool:
        raise TypeError("shared noise answers categorical draws only; the coupled rule needs no other")

    def categorical(self, weights: Tensor, index: int) -> int:
        return int(self.race(weights, index).argmax())

    def race(self, weights: Tensor, index: int) -> Tensor:
        """weights / E for every token, float64 [V]; the largest wins, the next largest are the likeliest rivals."""
        if not bool((weights > 0).any()):
            raise ValueError("cannot draw from weights that are all zero")
        key = _key(self.seed, Purpose.SHARED, self.position + index)
        return weights.double() / exponentials(key, weights.shape[-1], weights.device)


def exponentials(key: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """``size`` standard exponentials of one key, float64; entry i depends on (key, i) alone."""
    z = torch.arange(1, size + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN) + _signed(key)
    for shift, multiplier in _MIX:
        z = (z ^ _shift_right(z, shift)) * _signed(multiplier)
    bits = _shift_right(z ^ _shift_right(z, 31), 12)
    return -torch.log((bits.double() + 0.5) * 2.0**-52)


def random_seed_from(*parts: int) -> int:
    """A request's seed from the engine's seed and the request's number."""
    data = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def _key(seed: int, purpose: int, position: int) -> int:
    key = _splitmix(seed & _MASK)
    key = _splitmix(key ^ (purpose * _GOLDEN & _MASK))
    return _splitmix(key ^ (position * _MIX[1][1] & _MASK))


def _splitmix(z: int) -> int:
    z &= _MASK
    for shift, multiplier in _MIX:
        z = ((z ^ (z >> shift)) * multiplier) & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)

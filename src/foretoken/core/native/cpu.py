"""Instruction-set levels of processors: their features and compiler flags, and the level of this machine."""

from __future__ import annotations

import functools
import os
import platform
from typing import NamedTuple

from foretoken.core.errors import InvalidRequest
from foretoken.core.native.processor import ARM, X86, read_features

VARIABLE = "FORETOKEN_CPU"  # selects a lower level


class Level(NamedTuple):
    """A set of instructions that kernels are compiled for.

    Attributes:
        name: its name in FORETOKEN_CPU.
        machines: names of the architecture in ``platform.machine``.
        features: required features of the processor, by Linux's names.
        flags: compiler flags.
    """

    name: str
    machines: tuple[str, ...]
    features: frozenset[str]
    flags: tuple[str, ...]


def _x86(name: str, features: str) -> Level:
    """Returns a level of x86-64, whose features are named almost as the compiler's flags."""
    flags = (feature.replace("avx_", "avx").replace("avx512_", "avx512") for feature in features.split())
    return Level(name, X86, frozenset(features.split()), tuple(f"-m{flag.replace('_', '-')}" for flag in flags))


_AVX2 = "avx2 fma f16c"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512vl avx512dq"
_BF16 = f"{_AVX512} avx512_vnni avx512_bf16 avx512vbmi"

LEVELS = (  # of each architecture, best first
    _x86("amx", f"{_BF16} amx_tile amx_bf16 amx_int8"),
    _x86("avx512-bf16", _BF16),
    _x86("avx512-vnni", f"{_AVX512} avx512_vnni"),
    _x86("avx512", _AVX512),
    _x86("avx2-vnni", f"{_AVX2} avx_vnni"),
    _x86("avx2", _AVX2),
    Level("generic", X86, frozenset(), ()),  # every x86-64
    Level("neon-dotprod", ARM, frozenset({"asimd", "asimddp"}), ("-mcpu=generic+dotprod",)),
    Level("neon", ARM, frozenset({"asimd"}), ("-mcpu=generic",)),
)


@functools.cache
def features() -> frozenset[str]:
    """Returns the processor's features by the names that Linux has for them; empty if they are unknown."""
    return read_features()


def available() -> list[Level]:
    """Returns the levels that this processor can run, best first."""
    machine = platform.machine()
    return [level for level in LEVELS if machine in level.machines and features() >= level.features]


def chosen() -> Level | None:
    """Returns the level that kernels are compiled for; None if the processor can run none.

    Raises InvalidRequest if FORETOKEN_CPU names no level, or one that the processor cannot run.
    """
    able, name = available(), os.environ.get(VARIABLE)
    if not name:
        return able[0] if able else None
    names = ", ".join(level.name for level in able) or "none"
    by_name = {level.name: level for level in LEVELS}
    if name not in by_name:
        raise InvalidRequest(f"{VARIABLE}={name} is not known; this processor can run {names}")
    if by_name[name] in able:
        return by_name[name]
    missing = ", ".join(sorted(by_name[name].features - features()))
    raise InvalidRequest(
        f"{VARIABLE}={name} needs {missing or by_name[name].machines[0]}, which this processor lacks; "
        f"it can run {names}"
    )


def reason() -> str:
    """Returns why the chosen level is taken, in words."""
    if os.environ.get(VARIABLE):
        return f"{VARIABLE} is set"
    level = chosen()
    machine = platform.machine()
    levels = [candidate for candidate in LEVELS if machine in candidate.machines]
    if level is None:
        missing = levels[-1].features - features() if levels else ()
        return f"the processor lacks {', '.join(sorted(missing))}" if missing else f"no kernels for {machine}"
    better = levels[: levels.index(level)]
    if not better:
        return "the best level there is"
    return f"the best that the processor can run; {better[-1].name} needs " + ", ".join(
        sorted(better[-1].features - features())
    )

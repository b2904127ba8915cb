"""Loads compiled libraries: statuses as exceptions, layouts of arguments, and the shared pool of threads.

See csrc/status.hpp, csrc/entry.hpp and csrc/pool.hpp.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from ctypes import Structure, c_char_p, c_int32
from enum import IntEnum
from itertools import count
from pathlib import Path
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.native import build


class Status(IntEnum):
    """Results of compiled functions, with the values of csrc/status.hpp."""

    OK = 0
    NO_MEMORY = 1
    BAD_ARGUMENT = 2
    INTERNAL = 3


class KernelArgumentError(ForetokenError, ValueError):
    """An argument that a compiled function refused, such as a token outside the vocabulary. Nothing was computed."""


def raise_for(status: int, problem: str) -> None:
    """Raises the exception of a status, unless it is OK.

    Args:
        status: Return value of a compiled function.
        problem: Its error message.

    Raises:
        MemoryError: Memory is short.
        KernelArgumentError: The function refused an argument.
        RuntimeError: Any other failure.
    """
    if status == Status.OK:
        return
    if status == Status.NO_MEMORY:
        raise MemoryError(problem)
    if status == Status.BAD_ARGUMENT:
        raise KernelArgumentError(f"the compiled kernels refused their arguments: {problem}")
    raise RuntimeError(f"the compiled kernels failed: {problem}")


def declare(library: ctypes.CDLL, name: str, *arguments: Any) -> Callable[..., None]:
    """Returns a function of a library. A call raises as ``raise_for`` does."""
    function = library[name]
    function.argtypes, function.restype = arguments, c_int32
    problem = library.foretoken_problem
    problem.restype = c_char_p

    def check(status: Any, *_: object) -> Any:
        if status:
            raise_for(status, problem().decode())
        return None

    function.errcheck = check
    return function


class LayoutField(Structure):
    """An entry of ``foretoken_layout``: a structure, or one of its fields."""

    _fields_ = [("structure", c_char_p), ("name", c_char_p), ("offset", c_int32), ("size", c_int32)]


def check_layout(library: ctypes.CDLL, mirrors: Iterable[type[Structure]]) -> None:
    """Raises RuntimeError if a library has other structures than ``mirrors``, or other sizes or offsets of a field."""
    library.foretoken_layout.restype = ctypes.POINTER(LayoutField)
    entries = library.foretoken_layout()
    compiled: dict[str, tuple[int, int]] = {}
    for number in count():
        entry = entries[number]
        if entry.structure is None:
            break
        field = entry.structure if entry.name is None else entry.structure + b"." + entry.name
        compiled[field.decode()] = entry.offset, entry.size
    mirrored = dict(_layout(mirrors))
    if compiled == mirrored:
        return
    name = next(name for name in (*mirrored, *compiled) if compiled.get(name) != mirrored.get(name))
    raise RuntimeError(
        f"{name} is {_place(compiled.get(name))} in {library._name} and {_place(mirrored.get(name))} in Python; "
        "make the ctypes structure equal to the one in C++"
    )


def _layout(mirrors: Iterable[type[Structure]]) -> Iterable[tuple[str, tuple[int, int]]]:
    """Yields the name, offset and size of each structure and of its fields."""
    for mirror in mirrors:
        name = mirror.__name__.lstrip("_")
        yield name, (0, ctypes.sizeof(mirror))
        for field, *_ in mirror._fields_:
            member = getattr(mirror, field)
            yield f"{name}.{field}", (member.offset, member.size)


def _place(layout: tuple[int, int] | None) -> str:
    return "missing" if layout is None else f"{layout[1]} bytes at {layout[0]}"


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the pool's library, loaded once. Its threads are started on first use. Raises KernelsUnavailable."""
    pool = ctypes.CDLL(str(build.compiled(build.SHARED / "pool.cpp", (), build.ANY)))
    pool.foretoken_pool.restype = ctypes.c_void_p
    pool.foretoken_pool_spin.argtypes, pool.foretoken_pool_spin.restype = [ctypes.c_int, ctypes.c_int], None
    return pool


def load(path: Path) -> ctypes.CDLL:
    """Returns a library of kernels, loaded, with the functions of the pool. Raises KernelsUnavailable."""
    functions = library().foretoken_pool()
    kernels = ctypes.CDLL(str(path))
    kernels.foretoken_use_pool.restype = None
    kernels.foretoken_use_pool(ctypes.c_void_p(functions))
    return kernels

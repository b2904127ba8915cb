"""Loads compiled libraries: statuses as exceptions, structures of arguments, and the shared pool of threads.

See csrc/status.hpp, csrc/entry.hpp and csrc/pool.hpp.
"""

import ctypes
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint8, c_uint64, c_void_p
from enum import IntEnum
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

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


_Spec = TypeVar("_Spec", bound=Structure)
_SCALARS: dict[str, Any] = {
    "int32_t": c_int32,
    "int64_t": c_int64,
    "uint8_t": c_uint8,
    "uint64_t": c_uint64,
    "float": c_float,
    "double": c_double,
}


class Headers:
    """The structures that C++ headers declare. ``check_layout`` compares their mirrors with a library.

    Args:
        folder: Folder of the headers.
        names: Their names.
        typed: Names of pointers to structures that Python reads or sets as objects; all others are addresses.
        counts: Lengths of arrays, as they are written.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], typed: Sequence[str] = (), counts: Mapping[str, int] | None = None
    ) -> None:
        content = "\n".join((folder / name).read_text(encoding="utf-8") for name in names)
        self._declarations, self._typed, self._counts = re.sub(r"//.*", "", content), typed, counts or {}
        self._structures: dict[str, Any] = {}

    def mirrored(self, structure: type[_Spec]) -> type[_Spec]:
        """Sets the fields of a structure to those of the C++ structure of the same name."""
        name = structure.__name__.lstrip("_")
        body = re.search(rf"struct {name} {{(.*?)^}};", self._declarations, re.DOTALL | re.MULTILINE)
        assert body is not None, name
        fields: list[tuple[str, Any]] = []
        for statement in body[1].split(";"):
            words = statement.strip().removeprefix("const ")
            if not words or re.search("[(){}]", words):  # functions
                continue
            kind, declared = re.split(r"(?<=\w)(?=\W)", words, maxsplit=1)
            fields += (self._field(kind, declarator) for declarator in declared.split(","))
        structure._fields_ = fields
        self._structures[name] = structure
        return structure

    def _field(self, kind: str, declarator: str) -> tuple[str, Any]:
        """Returns name and type of a field. Types that are no scalars or structures are those of functions."""
        name, _, count = re.sub(r"[*\s]|\bconst\b", "", declarator).partition("[")
        value = _SCALARS.get(kind) or self._structures.get(kind, c_void_p)
        if "*" in declarator:
            value = POINTER(value) if name in self._typed and declarator.count("*") == 1 else c_void_p
        return name, value * self._counts[count.removesuffix("]")] if count else value


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

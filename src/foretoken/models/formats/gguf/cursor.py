"""Reads the values of a GGUF header in order, never beyond the end of the file."""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGUFValueType

from foretoken.core.errors import ModelLoadError

_T = GGUFValueType
_FORMATS = {
    _T.UINT8: "B",
    _T.INT8: "b",
    _T.UINT16: "H",
    _T.INT16: "h",
    _T.UINT32: "I",
    _T.INT32: "i",
    _T.FLOAT32: "f",
    _T.BOOL: "?",
    _T.UINT64: "Q",
    _T.INT64: "q",
    _T.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of the metadata that is not yet decoded; ``start`` is the offset of its first element."""

    kind: GGUFValueType
    count: int
    start: int


class Cursor:
    """Reads values in sequence, and never beyond the end of the file."""

    def __init__(self, path: Path, content: mmap.mmap, at: int) -> None:
        self.path = path
        self.at = at
        self._content = content
        self._size = len(content)

    def kind(self) -> GGUFValueType:
        number = self.number(_T.UINT32)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise damaged(self.path, f"its metadata has a value of unknown type {number}") from None

    def value(self, kind: GGUFValueType) -> Any:
        if kind == _T.STRING:
            return self.string()
        if kind == _T.ARRAY:
            return self._array()
        return self.number(kind)

    def number(self, kind: GGUFValueType) -> Any:
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: GGUFValueType, count: int) -> list[Any]:
        start = self._skip(count * struct.calcsize(_FORMATS[kind]))
        return list(struct.unpack_from(f"<{count}{_FORMATS[kind]}", self._content, start))

    def string(self, limit: int | None = None) -> str:
        """Reads a string of at most ``limit`` bytes."""
        length = self.number(_T.UINT64)
        if limit is not None and length > limit:
            raise damaged(self.path, f"it has a name of {length} bytes")
        start = self._skip(length)
        try:
            return self._content[start : self.at].decode("utf-8")
        except UnicodeDecodeError:
            raise damaged(self.path, f"the string at byte {start} is not UTF-8") from None

    def strings(self, count: int) -> list[str]:
        """Reads the strings of an array that ``value`` skipped."""
        content = self._content
        try:
            return [content[self.at - length : self.at].decode("utf-8") for length in self._lengths(count)]
        except UnicodeDecodeError:
            raise damaged(self.path, f"a string before byte {self.at} is not UTF-8") from None

    def _array(self) -> StoredArray:
        kind, count = self.kind(), self.number(_T.UINT64)
        start = self.at
        if kind == _T.ARRAY:
            raise damaged(self.path, "its metadata has an array of arrays")
        if kind == _T.STRING:
            for _ in self._lengths(count):
                pass
        else:
            self._skip(count * struct.calcsize(_FORMATS[kind]))
        return StoredArray(kind, count, start)

    def _lengths(self, count: int) -> Iterator[int]:
        """Skips ``count`` strings. Yields the length of each once ``at`` is after its last byte."""
        at, last, content, read = self.at, self._size - 8, self._content, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:
                raise self._short()
            (length,) = read(content, at)
            at += 8 + length
            self.at = at
            yield length
        if at > self._size:
            raise self._short()

    def _skip(self, length: int) -> int:
        """Advances by ``length`` bytes. Returns the offset before them."""
        start = self.at
        if length > self._size - start:
            raise self._short()
        self.at = start + length
        return start

    def _short(self) -> ModelLoadError:
        return damaged(self.path, f"its header continues beyond the end of the file, at {self._size} bytes")


def mapped(path: Path) -> mmap.mmap:
    """Maps a file that is not empty."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def damaged(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(f"{path} is damaged or truncated: {reason}; download it again")

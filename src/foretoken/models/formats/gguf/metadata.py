"""The keys of one architecture in the header of a GGUF file."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import shortened
from foretoken.models.formats.gguf.cursor import StoredArray
from foretoken.models.formats.gguf.header import Header

MAX_LAYERS = 2**12


@dataclass(frozen=True, slots=True)
class Metadata:
    """The keys of an architecture. Each is checked when it is read."""

    header: Header  # the file's header
    architecture: str  # prefix of the keys
    used: set[str] = field(default_factory=set)  # the keys that were read

    def get(self, key: str, kinds: tuple[type, ...] = (int,), default: Any = None) -> Any:
        """Returns the value of ``architecture.key``, or the default. Raises ModelLoadError for another type."""
        self.used.add(key)
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if value is default:
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.wrong(key, value, " or ".join(kind.__name__ for kind in kinds))
        return value

    def need(self, key: str, kinds: tuple[type, ...] = (int,)) -> Any:
        """Returns the value of ``architecture.key``. Raises ModelLoadError if it is missing or of another type."""
        value = self.get(key, kinds)
        if value is None:
            raise ModelLoadError(f"{self.header.path} lacks the key {self.architecture}.{key}; is it complete?")
        return value

    def number(self, key: str) -> float | None:
        """Returns a number before its rounding to float32; None if the file has none."""
        value = self.get(key, (float, int))
        return None if value is None else _shortest(value)

    def first_number(self, *keys: str) -> float:
        """Returns the first of these numbers that the file has. Raises ModelLoadError if it has none of them."""
        first = next((value for value in map(self.number, keys) if value is not None), None)
        return self.need(keys[0], (float, int)) if first is None else first

    def by_layer(self, key: str) -> list[int]:
        """Returns a number for each layer, which the file may store once for all; [] without one."""
        layers = self.layers
        if not isinstance(self.header.metadata.get(f"{self.architecture}.{key}"), StoredArray):
            value = self.get(key)
            if value is not None and value < 0:
                raise self.wrong(key, value, "0 or more")
            return [] if value is None else [value] * layers
        self.used.add(key)
        values = self.header.array(f"{self.architecture}.{key}") or []
        if len(values) < layers or not all(isinstance(value, int) and value >= 0 for value in values):
            raise self.wrong(key, values[:8], f"a number for each of {layers} layers")
        return values[:layers]

    def need_by_layer(self, key: str) -> list[int]:
        """Returns ``by_layer``. Raises ModelLoadError if the file stores no number."""
        return self.by_layer(key) or [self.need(key)] * self.layers

    @property
    def layers(self) -> int:
        """Number of layers, without those of multi-token prediction. Raises ModelLoadError for an impossible one."""
        count: int = self.need("block_count") - self.get("nextn_predict_layers", default=0)
        if not 1 <= count <= MAX_LAYERS:
            raise self.wrong("block_count", count, f"1 to {MAX_LAYERS} layers")
        return count

    @property
    def head_dim(self) -> int:
        """Width of a head. Raises ModelLoadError for an impossible one."""
        heads = max(self.need_by_layer("attention.head_count"))
        if heads < 1:
            raise self.wrong("attention.head_count", heads, "1 or more")
        length: int = self.get("attention.key_length") or self.need("embedding_length") // heads
        if length < 1:
            raise ModelLoadError(f"{self.header.path} has heads of width {length}; expected 1 or more")
        return length

    def has(self, part: str, layer: int = 0) -> bool:
        """Returns whether a layer has a tensor. ``part``: its name in the file without ``blk.N.``."""
        return f"blk.{layer}.{part}" in self.header.tensors

    def floats(self, name: str, count: int) -> list[float] | None:
        """Returns a small tensor; None if the file lacks it. Raises ModelLoadError unless it is float32 [count]."""
        stored = self.header.tensors.get(name)
        if stored is None:
            return None
        if stored.kind != GGMLQuantizationType.F32 or stored.shape != (count,):
            raise ModelLoadError(
                f"{self.header.path} has {name} {stored.shape} of {stored.kind.name}; expected float32 ({count},)"
            )
        return [float(value) for value in np.fromfile(stored.path, np.float32, count, offset=stored.start)]

    def wrong(self, key: str, value: Any, expected: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.header.path} has {self.architecture}.{key} = {shortened(value)}; expected {expected}"
        )


def _shortest(value: float) -> float:
    """Returns the shortest decimal number that rounds to the same float32: 1e-6 for 9.99999997e-07."""
    return value if not math.isfinite(value) else float(str(np.float32(value)))

"""Checkpoints larger than memory: reads safetensors one tensor at a time, writes them in shards."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foretoken.core.artifacts import PROVENANCE
from foretoken.core.errors import ModelLoadError
from foretoken.core.files import write_json
from foretoken.models.formats.checkpoint import open_weights

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2_000_000_000
_NOT_COPIED = ("config.json", "README.md", "zoo.json", PROVENANCE, "model.safetensors.index.json")
_COPIED_SUFFIXES = (".json", ".txt", ".jinja", ".model")


def weights_sha256(folder: Path) -> str:
    """Returns a digest of all safetensors files in ``folder`` and of its config. Raises ModelLoadError."""
    digest = hashlib.sha256()
    try:
        for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
            with file.open("rb") as handle:
                digest.update(hashlib.file_digest(handle, "sha256").digest())
    except OSError as error:
        raise ModelLoadError(f"cannot read the checkpoint in {folder}: {error}; pass a model's folder") from error
    return digest.hexdigest()


def copy_companions(source: Path, folder: Path) -> None:
    """Copies a checkpoint's other files, such as the tokenizer's, without what describes its weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _COPIED_SUFFIXES and file.name not in _NOT_COPIED:
            shutil.copyfile(file, folder / file.name)


@dataclass(frozen=True)
class CheckpointPlan:
    """A checkpoint to be written.

    Args:
        parameters: Number of parameters.
        dtype: Their type.
        config: Content of config.json.
        layers: Positions of the source's layers among its own.
        tensors: Names and tensors, one after another.
    """

    parameters: int
    dtype: torch.dtype
    config: dict[str, Any]
    layers: list[int] | dict[str, list[int]]
    tensors: Iterator[tuple[str, torch.Tensor]]


class ShardReader:
    """Tensors of a safetensors checkpoint, whole or sharded, by name. Raises ModelLoadError."""

    def __init__(self, folder: Path) -> None:
        self._weights = open_weights(folder)

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._weights)

    def get(self, name: str) -> torch.Tensor:
        """Returns a tensor in its own dtype. Raises ModelLoadError if there is none of that name."""
        if name not in self._weights:
            raise ModelLoadError(f"the checkpoint has no tensor {name}; it is not a whole Llama checkpoint")
        return self._weights[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape without reading the tensor, () if there is none of that name."""
        return self._weights.shapes.get(name, ())


class ShardWriter:
    """Writes tensors into ``folder`` in shards of at most ``limit`` bytes, so that memory stays bounded."""

    def __init__(self, folder: Path, limit: int = SHARD_BYTES) -> None:
        self.folder, self.limit = folder, limit
        self.parameters = self.bytes = 0
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor. It may be written with later ones."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.limit:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size
        self.bytes += size
        self.parameters += math.prod(tensor.shape)

    def close(self) -> None:
        """Writes the last shard, renames the files, and writes the index if there are several."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            os.replace(self._partial(0), self.folder / "model.safetensors")
            return
        where: dict[str, Any] = {}
        for i, names in enumerate(self._shards):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors"
            os.replace(self._partial(i), self.folder / file)
            where |= dict.fromkeys(names, file)
        total = {"total_size": self.bytes, "total_parameters": self.parameters}
        write_json(self.folder / INDEX, {"metadata": total, "weight_map": where})

    def _partial(self, i: int) -> Path:
        return self.folder / f"shard-{i}.safetensors"

    def _flush(self) -> None:
        save_file(self._pending, self._partial(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

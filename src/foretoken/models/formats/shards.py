"""Writes checkpoints larger than memory in shards, with their companion files and digests."""

import hashlib
import math
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.files import write_json
from foretoken.models.formats.weight_files import INDEX, SINGLE

SHARD_BYTES = 2_000_000_000
COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.jinja",
    "LICENSE*",
)


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
    """Copies tokenizer, chat template and generation settings of a checkpoint."""
    for file in {file for pattern in COMPANIONS for file in source.glob(pattern) if file.is_file()}:
        shutil.copyfile(file, folder / file.name)


class ShardWriter:
    """Writes tensors into ``folder`` in shards of at most ``limit`` bytes, so that memory stays bounded."""

    def __init__(self, folder: Path, limit: int = SHARD_BYTES) -> None:
        self.folder, self.limit = folder, limit
        self.parameters = self.bytes = 0
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor. It may be written with later ones."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.limit:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size
        self.bytes += size
        self.parameters += math.prod(tensor.shape)

    def close(self, **metadata: int) -> None:
        """Writes the last shard, renames the files, and writes the index if there are several, with ``metadata``."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            os.replace(self._partial(0), self.folder / SINGLE)
            return
        where: dict[str, Any] = {}
        for i, names in enumerate(self._shards):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors"
            os.replace(self._partial(i), self.folder / file)
            where |= dict.fromkeys(names, file)
        write_json(self.folder / INDEX, {"metadata": {"total_size": self.bytes, **metadata}, "weight_map": where})

    def _partial(self, i: int) -> Path:
        return self.folder / f"shard-{i}.safetensors"

    def _flush(self) -> None:
        if not self._pending:
            return
        save_file(self._pending, self._partial(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

"""GGUF files as folders: the same model in bfloat16, written to the cache once."""

from __future__ import annotations

import hashlib
from pathlib import Path

from foretoken.core.errors import InvalidRequest
from foretoken.core.folders import cache_folder
from foretoken.models.formats.gguf import is_gguf, parts_of
from foretoken.quantize.run import quantize_checkpoint


def checkpoint_folder(path: Path) -> Path:
    """Returns the folder of a checkpoint; for a GGUF file the cached folder of its model in bfloat16.

    Raises:
        InvalidRequest: A folder has no form for the model of the file.
        ModelLoadError: The file cannot be read.
        WriteError: The folder cannot be written.
    """
    if not is_gguf(path):
        return path
    identity = [f"{part.resolve()} {part.stat().st_size} {part.stat().st_mtime_ns}" for part in parts_of(path)]
    key = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:12]
    folder = cache_folder() / "folders" / key / path.stem
    if not folder.exists():
        try:
            quantize_checkpoint(path, folder, "bfloat16")
        except InvalidRequest:
            if not folder.exists():  # another process may have written it since
                raise
    return folder

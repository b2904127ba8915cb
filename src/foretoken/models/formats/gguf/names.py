"""The names of GGUF files."""

from __future__ import annotations

import re
from pathlib import Path

SPLIT_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")  # as llama.cpp names the parts of a model


def is_gguf(path: Path) -> bool:
    """Returns whether the path is that of a GGUF file, by its name."""
    return path.suffix.lower() == ".gguf"

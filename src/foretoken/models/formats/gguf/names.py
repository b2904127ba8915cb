"""The names of GGUF files."""

from __future__ import annotations

import re
from pathlib import Path

SPLIT_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")  # as llama.cpp names the parts of a model


def is_gguf(path: Path) -> bool:
    """Returns whether the path is that of a GGUF file, by its name."""
    return path.suffix.lower() == ".gguf"


def parts_of(path: Path) -> list[Path]:
    """Returns the files of a model that is split, if ``path`` is a part of one; else ``path`` alone."""
    split = SPLIT_NAME.fullmatch(path.name)
    if split is None:
        return [path]
    return [path.with_name(f"{split[1]}-{number:05}-of-{split[3]}.gguf") for number in range(1, int(split[3]) + 1)]

"""GGUF files: one file with metadata, tokenizer and weights, as llama.cpp writes and reads it."""

import re
from pathlib import Path

SPLIT_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")  # llama.cpp's names of a split model


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def parts_of(path: Path) -> list[Path]:
    """Returns all files of a split model if ``path`` is one of them; else ``path`` alone."""
    split = SPLIT_NAME.fullmatch(path.name)
    if split is None:
        return [path]
    return [path.with_name(f"{split[1]}-{number:05}-of-{split[3]}.gguf") for number in range(1, int(split[3]) + 1)]

"""Files that a command writes when its work is done; whether they can be is asked before it begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretoken.core.errors import WriteError


def check_places(**files: Path | None) -> None:
    """By the option's name. Raises WriteError where a file cannot be: minutes of work must not end in that."""
    for option, file in files.items():
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise WriteError(f"--{option} {file}: expected the name of a file in a folder that exists")


def write_text(file: Path, text: str) -> None:
    """UTF-8. Raises WriteError."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WriteError(f"cannot write {file}: {error.strerror}; choose another file") from error


def write_json(file: Path, record: Any) -> None:
    """Indented; what JSON has no form for as its text. Raises WriteError."""
    write_text(file, json.dumps(record, indent=2, default=str) + "\n")

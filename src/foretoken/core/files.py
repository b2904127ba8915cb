"""Reading and writing files: atomic files and directories, and JSON."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from foretoken.core.errors import ForetokenError, ModelLoadError, WriteError

AGAIN = "download or save it again"


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """Yields a temporary folder that replaces ``out`` once everything in it has been written.

    A folder already at ``out`` is moved aside, and deleted only after the replacement has succeeded.

    Raises:
        WriteError: A file could not be written.
    """
    # The process id is in the name so that two processes that build the same folder do not delete each other's files.
    partial, old = (out.with_name(f".{out.name}.{kind}-{os.getpid()}") for kind in ("partial", "old"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for file in (f for f in partial.rglob("*") if f.is_file()):
            file.chmod(0o644)  # safetensors creates files that only their owner may read
        _exchange(partial, out, old)
    except ForetokenError:
        raise
    except (OSError, SafetensorError) as error:
        raise WriteError(
            f"cannot write {out}: {error}; nothing was left behind: free some space or choose another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def atomic_file(out: Path) -> Iterator[Path]:
    """Yields the path of a temporary file that replaces ``out`` at the end of the block. An error deletes it."""
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        yield partial
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)


def _exchange(partial: Path, out: Path, old: Path) -> None:
    shutil.rmtree(old, ignore_errors=True)
    replaced = out.exists()
    if replaced:
        os.replace(out, old)
    try:
        os.replace(partial, out)
    except BaseException:
        if replaced:
            os.replace(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def read_json(file: Path, hint: str = AGAIN) -> Any:
    """Returns the content of a JSON file.

    Args:
        file: Path of the file.
        hint: What to do about a file that cannot be read, for the error message.

    Raises:
        ModelLoadError: The file does not exist, is not JSON in UTF-8, or is nested too deeply.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{file} does not exist; {hint}") from None
    except RecursionError:
        raise ModelLoadError(f"{file} cannot be read as JSON (it is nested too deeply); {hint}") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON ({error}); {hint}") from error


def write_json(path: Path, value: object) -> None:
    """Writes ``value`` as indented JSON. Types that JSON lacks are written as strings."""
    path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")

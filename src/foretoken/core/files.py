"""What is written to disk, whole folders or nothing, and where what can be made again is kept."""

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


def cache_folder() -> Path:
    """Where built files go: $FORETOKEN_CACHE, else $XDG_CACHE_HOME/foretoken, else ~/.cache/foretoken."""
    if chosen := os.environ.get("FORETOKEN_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "foretoken"


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """Yield a folder to fill; it takes ``out``'s place only when everything in it was written.

    A folder already at ``out`` is moved aside, not deleted, until the exchange has succeeded.
    Raises WriteError when the disk refuses.
    """
    # Named by process, so that two that build the same folder do not delete each other's work.
    partial, old = (out.with_name(f".{out.name}.{kind}-{os.getpid()}") for kind in ("partial", "old"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for file in (f for f in partial.rglob("*") if f.is_file()):
            file.chmod(0o644)  # safetensors leaves its files to their owner alone
        _exchange(partial, out, old)
    except ForetokenError:
        raise
    except (OSError, SafetensorError) as error:
        raise WriteError(
            f"cannot write {out}: {error}; nothing was left behind: free some space or choose another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
    """Returns what a JSON file holds.

    Args:
        file: where it lies.
        hint: what to do about a file that cannot be read.

    Raises:
        ModelLoadError: it does not exist, is not JSON in UTF-8, or is nested too deeply.
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
    """Indented JSON; what JSON does not know is written as text."""
    path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")

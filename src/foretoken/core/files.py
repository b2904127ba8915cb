"""Reading and writing files: atomic files and directories, JSON, and the folder that is kept between runs."""

import glob
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from foretoken.core.errors import ForetokenError, InvalidRequest, ModelLoadError, WriteError


def cache_folder() -> Path:
    """Returns the cache folder: $FORETOKEN_CACHE, else $XDG_CACHE_HOME/foretoken, else ~/.cache/foretoken."""
    if chosen := os.environ.get("FORETOKEN_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "foretoken"


AGAIN = "download or save it again"


Check = Callable[[Path], None]
"""Raises ForetokenError if the file or folder may not be replaced."""


def _free(existing: Path) -> None:
    """Allows to replace anything."""


def read_text(what: str, file: Path, expected: str) -> str:
    """Returns the text of a file that a user named. Raises InvalidRequest, with what it is and what is expected."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {what} {file}: {error}; expected {expected} in UTF-8") from error


@contextmanager
def atomic_directory(out: Path, check: Check = _free) -> Iterator[Path]:
    """Yields a temporary folder that replaces ``out`` once everything in it has been written.

    A folder already at ``out`` is moved aside, and deleted only after the replacement has succeeded. If the process is
    killed in between, ``restore_interrupted`` moves it back. Raises WriteError if a file could not be written.

    Args:
        out: Folder to write.
        check: Called before what is at ``out`` at the end of the block is replaced.
    """
    partial = _beside(out, "partial")
    try:
        with write_errors(out):
            partial.mkdir(parents=True)
            yield partial
            for file in (f for f in partial.rglob("*") if f.is_file()):
                file.chmod(0o644)  # safetensors creates files that only their owner may read
            restore_interrupted(out)
            _exchange(partial, out, check)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def atomic_file(out: Path, check: Check = _free) -> Iterator[Path]:
    """Yields the path of a temporary file that replaces ``out`` at the end of the block. An error deletes it.

    Args:
        out: File to write. A file that replaces another grants no more access than either.
        check: Called before what is at ``out`` at the end of the block is replaced.
    """
    partial = _beside(out, "partial")
    try:
        yield partial
        if out.exists():
            check(out)
            partial.chmod(partial.stat().st_mode & out.stat().st_mode & 0o777)
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def write_errors(out: Path) -> Iterator[None]:
    """Raises errors of writing ``out`` in the block as WriteError."""
    try:
        yield
    except ForetokenError:
        raise
    except (OSError, SafetensorError) as error:
        advice = "nothing was left behind: free some space or choose another folder"
        raise WriteError(f"cannot write {out}: {error}; {advice}") from error


def restore_interrupted(out: Path) -> None:
    """Moves a folder back to ``out`` that a killed process had moved aside and could not replace."""
    aside = list(out.parent.glob(f".{glob.escape(out.name)}.old-*"))
    if aside and not out.exists():
        os.replace(max(aside, key=lambda folder: folder.stat().st_mtime), out)


def _beside(out: Path, what: str) -> Path:
    # Unique, so that processes that write the same artifact, maybe on several machines, keep apart.
    return out.with_name(f".{out.name}.{what}-{secrets.token_hex(4)}")


def _exchange(partial: Path, out: Path, check: Check) -> None:
    old = _beside(out, "old")
    try:
        if os.path.lexists(out):
            check(out)
            os.replace(out, old)
            check(old)  # another process may have written it since
        os.replace(partial, out)  # fails if another process has written it since
    except BaseException:
        if old.exists() and not out.exists():
            os.replace(old, out)
        elif out.exists():
            shutil.rmtree(old, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def read_json(file: Path, hint: str = AGAIN) -> Any:
    """Returns the content of a JSON file.

    Raises ModelLoadError if the file does not exist, is not JSON in UTF-8, or is nested too deeply.
    hint: What to do about a file that cannot be read, for the error message.
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

"""What a training run leaves on disk: whole folders or nothing, and never somebody else's folder overwritten."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from foretoken.core.errors import ForetokenError, InvalidRequest, TrainingError

PROVENANCE = "provenance.json"


def checkpoint_of(out: Path) -> Path:
    """Where a run that writes ``out`` keeps its checkpoint."""
    return out.with_name(out.name + ".checkpoint")


def check_output(out: Path, force: bool = False) -> Path:
    """The absolute ``out``, refused early when it is a file or a folder that no run of ours wrote.

    Raises InvalidRequest; ``force`` allows any folder.
    """
    out = out.expanduser().absolute()
    if not out.name:
        raise InvalidRequest(f"{out} cannot be written to; name a folder that does not exist yet")
    if out.exists() and not out.is_dir():
        raise InvalidRequest(f"{out} is a file; name a folder that does not exist yet")
    if out.is_dir() and any(out.iterdir()) and not (out / PROVENANCE).exists() and not force:
        raise InvalidRequest(
            f"{out} exists and holds something other than a model written by foretoken; "
            "choose another folder, or pass --force to replace it"
        )
    parent = next(p for p in out.parents if p.exists())
    if not os.access(parent, os.W_OK):
        raise InvalidRequest(f"cannot write in {parent}; choose a folder you may write to")
    return out


def check_run(out: Path, resume: bool, force: bool) -> Path:
    """``check_output``, and no silent restart over the checkpoint of an interrupted run."""
    out = check_output(out, force)
    checkpoint = checkpoint_of(out)
    if checkpoint.exists() and not (resume or force):
        raise InvalidRequest(
            f"{checkpoint} is left from an interrupted run; pass --resume to continue it, or --force to start afresh"
        )
    if force and not resume:
        checkpoint.unlink(missing_ok=True)
    return out


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """Yield a folder to fill; it takes ``out``'s place only when everything in it was written.

    A folder already at ``out`` is moved aside, not deleted, until the exchange has succeeded.
    Raises TrainingError when the disk refuses.
    """
    # Named by process, so that two that build the same folder do not delete each other's work.
    partial, old = (out.with_name(f".{out.name}.{kind}-{os.getpid()}") for kind in ("partial", "old"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for file in partial.iterdir():
            file.chmod(0o644)  # safetensors leaves its files to their owner alone
        _exchange(partial, out, old)
    except ForetokenError:
        raise
    except (OSError, SafetensorError) as error:
        raise TrainingError(
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


def write_json(path: Path, value: object) -> None:
    """Indented JSON; what JSON does not know is written as text."""
    path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")

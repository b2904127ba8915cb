"""Output folders of training runs. They are written whole or not at all, and other folders are not overwritten."""

from __future__ import annotations

import os
from pathlib import Path

from foretoken.core.errors import InvalidRequest
from foretoken.core.files import atomic_directory, write_json

__all__ = ["PROVENANCE", "atomic_directory", "check_output", "check_run", "checkpoint_of", "write_json"]

PROVENANCE = "provenance.json"


def checkpoint_of(out: Path) -> Path:
    """Returns the checkpoint file of a run that writes ``out``."""
    return out.with_name(out.name + ".checkpoint")


def check_output(out: Path, force: bool = False) -> Path:
    """Returns the absolute path of ``out`` after checking that a run may write it.

    Args:
        out: Output folder.
        force: Allows folders that no training run wrote.

    Raises:
        InvalidRequest: ``out`` is a file, a folder that no training run wrote, or not writable.
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
    """As ``check_output``. Also raises InvalidRequest where the checkpoint of an interrupted run would be lost."""
    out = check_output(out, force)
    checkpoint = checkpoint_of(out)
    if checkpoint.exists() and not (resume or force):
        raise InvalidRequest(
            f"{checkpoint} is left from an interrupted run; pass --resume to continue it, or --force to start again"
        )
    if force and not resume:
        checkpoint.unlink(missing_ok=True)
    return out

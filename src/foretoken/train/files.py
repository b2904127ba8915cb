"""Outputs of training runs: the artifact, and what lies beside it until a run is finished."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from foretoken.core.artifacts import CHECKPOINT, DISTRIBUTIONS, TRAINING_TEXT, Destination
from foretoken.core.errors import InvalidRequest
from foretoken.core.files import write_json

__all__ = ["PROVENANCE", "check_run", "checkpoint_of", "distributions_of", "lessons_of", "write_json"]

PROVENANCE = "provenance.json"


def checkpoint_of(out: Path) -> Path:
    """Returns the checkpoint file of a run that writes ``out``."""
    return out.with_name(out.name + ".checkpoint")


def lessons_of(out: Path) -> Path:
    """Returns the folder of text and hidden states of a run that writes ``out``."""
    return out.with_name(out.name + ".lessons")


def distributions_of(out: Path) -> Path:
    """Returns the folder of the target's distributions of a run that writes ``out``."""
    return out.with_name(out.name + ".distributions")


def check_run(
    out: Path, kind: str, inputs: Iterable[Path | None] = (), resume: bool = False, force: bool = False
) -> Destination:
    """Returns the destination of a training run. An earlier checkpoint of a run that is not resumed is deleted.

    Args:
        out: Folder of the artifact.
        kind: Its kind.
        inputs: Files and folders that the run reads.
        resume: Whether to continue an interrupted run.
        force: Whether to replace an artifact of the same kind, and to start again where a run was interrupted.

    Raises:
        InvalidRequest: ``out`` or a file beside it must not be written, or a checkpoint of an interrupted run would be
            lost.
    """
    sources = [source for source in inputs if source is not None]
    result = Destination.checked(out, kind, sources, force)
    checkpoint = checkpoint_of(result.path)
    for beside, its_kind in (
        (checkpoint, CHECKPOINT),
        (lessons_of(result.path), TRAINING_TEXT),
        (distributions_of(result.path), DISTRIBUTIONS),
    ):
        Destination.checked(beside, its_kind, sources, force=True)
    if checkpoint.exists() and not (resume or force):
        raise InvalidRequest(
            f"{checkpoint} is left from an interrupted run; pass --resume to continue it, or --force to start again"
        )
    if force and not resume:
        checkpoint.unlink(missing_ok=True)
    return result

"""Changes to a key file, one at a time, each of which leaves a whole file that only its owner may read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from foretoken.core.errors import InvalidRequest, WriteError
from foretoken.core.files import atomic_file
from foretoken.serve.access.records import KeyRecord, as_document, read_keys


def add(file: Path, record: KeyRecord) -> None:
    """Adds a key to a file, which is made if it does not exist. Raises InvalidRequest or WriteError."""

    def added(records: list[KeyRecord]) -> list[KeyRecord]:
        if any(other.name == record.name for other in records):
            raise InvalidRequest(
                f"{file} already has a key named {record.name}; revoke it first, or choose another name"
            )
        return [*records, record]

    _change(file, added, missing_ok=True)


def revoke(file: Path, name: str) -> None:
    """Removes a key from a file. Raises InvalidRequest or WriteError."""

    def without(records: list[KeyRecord]) -> list[KeyRecord]:
        left = [record for record in records if record.name != name]
        if len(left) == len(records):
            known = ", ".join(record.name for record in records) or "none"
            raise InvalidRequest(f"{file} has no key named {name!r}; it has: {known}")
        return left

    _change(file, without)


def _change(file: Path, change: Callable[[list[KeyRecord]], list[KeyRecord]], missing_ok: bool = False) -> None:
    with _alone(file):
        records = change([] if missing_ok and not file.exists() else read_keys(file))
        _write(file, records)


def _write(file: Path, records: Sequence[KeyRecord]) -> None:
    file = file.resolve()  # a link stays one
    try:
        with atomic_file(file) as partial:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as opened:
                json.dump(as_document(records), opened, indent=2)
                opened.write("\n")
                opened.flush()
                os.fsync(opened.fileno())
    except OSError as error:
        raise WriteError(f"cannot write {file}: {error.strerror or error}; the keys are as they were") from error


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Waits until no other command changes a key file of this folder, so that no revocation is lost."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    try:
        folder = os.open(file.resolve().parent, os.O_RDONLY)
    except OSError as error:
        raise WriteError(f"cannot open the folder of {file}: {error.strerror or error}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)

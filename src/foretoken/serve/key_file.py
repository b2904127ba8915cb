"""The key file: one record for each API key, with the key's hash and never the key.

Changes to a file are made one at a time, and each leaves a complete file that only its owner may read. Imports nothing
of the server's packages, so that ``foretoken keys`` starts quickly and works without them.
"""

import hashlib
import json
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretoken.core.checks import check_keys, integer, shown
from foretoken.core.errors import InvalidRequest, WriteError
from foretoken.core.files import atomic_file

GENERATE, METRICS, ADMIN = SCOPES = ("generate", "metrics", "admin")
PREFIX = "ft-"  # of keys, so that a leaked one is recognized

_MAX_KEYS = 10_000  # keys of a file: each request is compared with all of them
_MAX_BYTES = 2**24  # bytes of a file
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrency")


@dataclass(frozen=True, kw_only=True)
class KeyRecord:
    """One API key as it is stored. Raises InvalidRequest for a value that is not valid."""

    name: str  # identifies the key in logs and commands; logs never have the key
    sha256: str  # in hexadecimal; keys have 256 random bits, so a fast hash cannot be reversed
    created: str | None = None  # in ISO 8601
    expires: str | None = None  # when it stops being accepted, in ISO 8601 with an offset; None is never
    scopes: tuple[str, ...] = (GENERATE,)  # which of ``SCOPES`` it has
    models: tuple[str, ...] | None = None  # names of models that it may use; None is all
    requests_per_minute: int | None = None  # None is no limit
    tokens_per_minute: int | None = None  # of prompts and outputs together; None is no limit
    max_concurrency: int | None = None  # requests that are answered at once; None is no limit

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InvalidRequest(f"name must be 1 to 64 letters, digits and . _ @ -, got {shown(self.name)}")
        if not isinstance(self.sha256, str) or not _HASH.fullmatch(self.sha256):
            raise InvalidRequest("sha256 must be the key's hash, 64 hexadecimal digits")  # not shown: may be the key
        for name in self.scopes:
            if name not in SCOPES:
                raise InvalidRequest(f"scopes must be among {', '.join(SCOPES)}, got {shown(name)}")
        if not self.scopes:
            raise InvalidRequest(f"scopes must have at least one of {', '.join(SCOPES)}")
        if self.models is not None and not self.models:
            raise InvalidRequest("models must name at least one model; leave it out for all")
        for name in _LIMITS:
            integer(name, getattr(self, name), 1, optional=True)
        self.expiry()

    def expiry(self) -> float:
        """Returns the Unix time after which the key is not accepted, infinity for never. Raises InvalidRequest."""
        if self.expires is None:
            return float("inf")
        try:
            when = datetime.fromisoformat(self.expires)
        except (TypeError, ValueError):
            raise InvalidRequest(
                f"expires must be a time such as 2027-01-31T00:00:00+00:00, got {shown(self.expires)}"
            ) from None
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def new_key() -> str:
    """Returns a new key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def read_keys(file: Path) -> list[KeyRecord]:
    """Returns the records of a key file. Raises InvalidRequest, with the record's number and never a hash."""
    again = "make one with foretoken keys add FILE"
    try:
        with file.open("rb") as opened:
            content = opened.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise InvalidRequest(f"the key file {file} is larger than {_MAX_BYTES} bytes")
        document = json.loads(content)
    except OSError as error:
        raise InvalidRequest(f"cannot read the key file {file}: {error.strerror or error}; {again}") from error
    except (ValueError, RecursionError):  # the parser's message may quote the file
        raise InvalidRequest(f"the key file {file} is not JSON in UTF-8; {again}") from None
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or set(document) != {"keys"}:
        raise InvalidRequest(f'the key file {file} must be an object with a list "keys" and nothing else; {again}')
    if len(entries) > _MAX_KEYS:
        raise InvalidRequest(f"the key file {file} has {len(entries)} keys; at most {_MAX_KEYS} are served")
    records = []
    for number, entry in enumerate(entries, 1):
        try:
            records.append(_record(entry))
        except InvalidRequest as error:
            raise InvalidRequest(f"key {number} of the key file {file}: {error}") from error
    _check_unique(file, records)
    return records


def _record(entry: Any) -> KeyRecord:
    if not isinstance(entry, Mapping):
        raise InvalidRequest("it must be an object")
    check_keys("it", entry, [f.name for f in fields(KeyRecord)])
    for name in ("name", "sha256"):
        if name not in entry:
            raise InvalidRequest(f"it has no {name}")
    values = dict(entry)
    for name in ("scopes", "models"):
        value = values.pop(name, None)
        if value is not None:
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise InvalidRequest(f"{name} must be a list of texts, got {shown(value)}")
            values[name] = tuple(value)
    return KeyRecord(**values)


def _check_unique(file: Path, records: Sequence[KeyRecord]) -> None:
    for field, what in (("name", "names"), ("sha256", "hashes")):
        seen: set[str] = set()
        for number, record in enumerate(records, 1):
            if getattr(record, field) in seen:
                raise InvalidRequest(f"key {number} of the key file {file} repeats an earlier one: {what} are unique")
            seen.add(getattr(record, field))


def add(file: Path, record: KeyRecord) -> None:
    """Adds a key to a file, which is made if it does not exist. Raises InvalidRequest or WriteError."""
    with _editing(file, missing_ok=True) as records:
        if any(other.name == record.name for other in records):
            raise InvalidRequest(
                f"{file} already has a key named {record.name}; revoke it first, or choose another name"
            )
        records.append(record)


def revoke(file: Path, name: str) -> None:
    """Removes a key from a file. Raises InvalidRequest or WriteError."""
    with _editing(file) as records:
        kept = [record for record in records if record.name != name]
        if len(kept) == len(records):
            names = ", ".join(record.name for record in records) or "none"
            raise InvalidRequest(f"{file} has no key named {name!r}; it has: {names}")
        records[:] = kept


@contextmanager
def _editing(file: Path, missing_ok: bool = False) -> Iterator[list[KeyRecord]]:
    """Yields the records of a file, and writes them at the end of the ``with`` block unless it raises."""
    with _locked(file):
        records = [] if missing_ok and not file.exists() else read_keys(file)
        yield records
        _write(file, records)


def _write(file: Path, records: Sequence[KeyRecord]) -> None:
    """Writes the records. Values of None are omitted."""
    entries = [{name: value for name, value in asdict(record).items() if value is not None} for record in records]
    file = file.resolve()  # a link stays one
    try:
        with atomic_file(file) as partial:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as opened:
                json.dump({"keys": entries}, opened, indent=2)
                opened.write("\n")
                opened.flush()
                os.fsync(opened.fileno())
    except OSError as error:
        raise WriteError(f"cannot write {file}: {error.strerror or error}; the keys are as they were") from error


@contextmanager
def _locked(file: Path) -> Iterator[None]:
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

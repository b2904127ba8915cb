"""The API keys that a server accepts: those of the command line, and those of a file that may change."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretoken.core.errors import InvalidRequest
from foretoken.serve.access.granted import Access
from foretoken.serve.access.rates import KeyUsage
from foretoken.serve.access.records import ADMIN, GENERATE, METRICS, KeyRecord, read_keys
from foretoken.serve.errors import ApiError

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # between looks at the file's time


@dataclass(frozen=True)
class Identity:
    """The owner of a request.

    Args:
        digest: Hash of its key.
        access: What it may do.
        usage: What it has used; None if it has no limits of its own.
    """

    digest: bytes
    access: Access
    usage: KeyUsage | None = None


@dataclass(frozen=True)
class _Entry:
    identity: Identity
    expires: float = float("inf")


class KeyRing:
    """Accepted keys. Not thread-safe: it belongs to the event loop.

    Args:
        keys: Keys without limits, as they are.
        file: A key file, which is read again when it changes.
        allow_admin: Whether ``keys`` have the scope admin.
        clock: Returns monotonic seconds.

    Raises:
        InvalidRequest: The file cannot be read.
    """

    def __init__(
        self,
        keys: Sequence[str] = (),
        file: Path | None = None,
        allow_admin: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file, self._clock = file, clock
        scopes = frozenset({GENERATE, METRICS, *([ADMIN] if allow_admin else [])})
        digests = dict.fromkeys(_digest(key.encode()) for key in keys)
        self._fixed = [
            _Entry(Identity(digest, Access(f"api-key-{number}", scopes))) for number, digest in enumerate(digests, 1)
        ]
        self._filed: list[_Entry] = []
        self._usages: dict[str, KeyUsage] = {}  # by hash
        self._seen: tuple[int, ...] | None = None  # of the file, when it was last read
        self._next_look = 0.0
        if file is not None:
            self._seen = _fingerprint(file)
            self._take(read_keys(file))
            _warn_if_readable(file)

    @property
    def asks(self) -> bool:
        """Whether requests need a key."""
        return bool(self._fixed) or self._file is not None

    @property
    def reloads(self) -> bool:
        """Whether there is a file to read again."""
        return self._file is not None

    @property
    def several(self) -> bool:
        """Whether there may be more than one key."""
        return len(self._fixed) > 1 or self._file is not None

    def identify(self, given: str) -> Identity | None:
        """Returns the owner of a key, None for an unknown key. Raises a 401 ApiError for an expired one.

        It is compared with every key in constant time, so that the response time reveals nothing about the keys.
        """
        self._look()
        digest, match = _digest(given.strip().encode("latin-1")), None
        for entry in (*self._fixed, *self._filed):
            if hmac.compare_digest(digest, entry.identity.digest):
                match = entry
        if not given or match is None:
            return None
        if time.time() >= match.expires:
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, "this API key has expired", code="invalid_api_key", headers=headers)
        return match.identity

    def reload(self) -> None:
        """Reads the file again. A bad file leaves the keys as they are, and the log says why."""
        if self._file is None:
            return
        self._seen = _fingerprint(self._file)
        try:
            records = read_keys(self._file)
        except InvalidRequest as error:
            _log.error("the API keys stay as they were: %s", error)
            return
        self._take(records)
        _warn_if_readable(self._file)
        _log.info("read %d API keys from %s", len(records), self._file)

    def _look(self) -> None:
        now = self._clock()
        if self._file is not None and now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            if _fingerprint(self._file) != self._seen:
                self.reload()

    def _take(self, records: Sequence[KeyRecord]) -> None:
        usages = {}
        for record in records:
            usage = self._usages.get(record.sha256)
            if usage is None:
                usage = KeyUsage(record, self._clock)
            else:
                usage.update(record)
            usages[record.sha256] = usage
        self._usages = usages
        self._filed = [
            _Entry(
                Identity(
                    bytes.fromhex(record.sha256),
                    Access(record.name, frozenset(record.scopes), record.models),
                    usages[record.sha256],
                ),
                record.expiry(),
            )
            for record in records
        ]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _fingerprint(file: Path) -> tuple[int, ...] | None:
    """Returns what changes when the file does; None if it cannot be looked at."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _warn_if_readable(file: Path) -> None:
    if os.name != "posix":
        return
    try:
        mode = stat.S_IMODE(os.stat(file).st_mode)
    except OSError:  # it went away since it was read
        return
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        _log.warning("the key file %s can be read by others (mode %o); chmod 600 %s", file, mode, file)

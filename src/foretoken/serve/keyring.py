"""The API keys that a server accepts, what each key may do, and its rates."""

import hashlib
import hmac
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretoken.core.errors import InvalidRequest
from foretoken.serve.errors import ApiError, invalid_key, too_many_requests
from foretoken.serve.key_file import ADMIN, GENERATE, METRICS, KeyRecord, digest, read_keys
from foretoken.serve.request_state import Access

SPECULATION = "/v1/speculation"
SAVE_DRAFT = "/v1/save_draft"
LOAD_LORA, UNLOAD_LORA = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_LISTINGS = ("/v1/models", "/version", "/openapi.json")

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")
)
_MINUTE = 60.0
_BYTES_PER_TOKEN = 4  # of a body, by which its tokens are estimated until they are known
_log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0  # between checks for a change of the file


def check_scope(access: Access, needed: str | None) -> None:
    """Raises a 403 ApiError if a request lacks a scope."""
    if needed is None or needed in access.scopes:
        return
    if access.name is None:
        message = (
            "this server allows no changes: it has no keys and is not on loopback alone; start it with "
            "--api-key-file and use a key with the scope admin, or start it with --allow-admin"
        )
        raise ApiError(403, message, code="admin_not_allowed")
    raise ApiError(403, f"this key lacks the scope {needed}", code="insufficient_scope")


def needed_scope(method: str, path: str) -> str | None:
    """Returns the scope that a request needs; None if any key will do."""
    if path == "/metrics":
        return METRICS
    if path.rstrip("/") == SPECULATION:
        return METRICS if method == "GET" else ADMIN
    if path.rstrip("/") in (LOAD_LORA, UNLOAD_LORA, SAVE_DRAFT):
        return ADMIN
    if method == "GET" and any(path == listing or path.startswith(f"{listing}/") for listing in _LISTINGS):
        return None
    return GENERATE


def scopes_without_key(allow_admin: bool) -> frozenset[str]:
    """Returns the scopes of requests without a key, and of keys without a record."""
    return frozenset({GENERATE, METRICS, *([ADMIN] if allow_admin else [])})


@dataclass(slots=True)
class RateBucket:
    """A token bucket that holds one minute's amount, and gains it evenly over a minute. ``level`` may be negative."""

    per_minute: int
    level: float
    at: float

    def refill(self, now: float) -> None:
        """Adds the gain until ``now``."""
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / _MINUTE)
        self.at = now

    def seconds_until(self, amount: float) -> float:
        """Returns the seconds until the bucket holds ``amount``."""
        return max(0.0, (amount - self.level) * _MINUTE / self.per_minute)


class KeyUsage:
    """Requests and tokens that one key has used.

    A request takes one from the bucket of requests. It is admitted while the bucket of tokens is not empty, and holds
    an estimate by its size until its tokens are known; a long output may leave the bucket in debt, which later
    requests wait for.
    """

    def __init__(self, record: KeyRecord, clock: Callable[[], float] = time.monotonic) -> None:
        self.running, self._clock = 0, clock
        self._buckets: dict[str, RateBucket] = {}  # of requests and tokens, if they are limited
        self.update(record)

    def update(self, record: KeyRecord) -> None:
        """Takes over changed limits and keeps the usage."""
        self._refill()
        self._max_concurrency, before, self._buckets = record.max_concurrency, self._buckets, {}
        for name, per_minute in (("requests", record.requests_per_minute), ("tokens", record.tokens_per_minute)):
            if per_minute is not None:
                bucket = before.get(name) or RateBucket(per_minute, float(per_minute), self._clock())
                bucket.level += per_minute - bucket.per_minute
                bucket.per_minute = per_minute
                self._buckets[name] = bucket

    def begin(self, size: int) -> float:
        """Admits a request of ``size`` bytes. Returns the tokens that it holds. Raises a 429 ApiError."""
        limit = self._max_concurrency
        if limit is not None and self.running >= limit:
            raise self._refusal(f"this key may have {limit} requests answered at once", 1.0)
        self._refill()
        for name, bucket in self._buckets.items():
            if wait := bucket.seconds_until(1.0):
                verb = "send" if name == "requests" else "use"
                raise self._refusal(f"this key may {verb} {bucket.per_minute} {name} per minute", wait)
        held = 0.0
        if (requests := self._buckets.get("requests")) is not None:
            requests.level -= 1.0
        if (tokens := self._buckets.get("tokens")) is not None:
            held = min(size / _BYTES_PER_TOKEN, tokens.per_minute)
            tokens.level -= held
        self.running += 1
        return held

    def end(self, held: float, tokens: int) -> None:
        """Ends a request that held ``held`` and used ``tokens``."""
        self.running -= 1
        self._refill()
        if (bucket := self._buckets.get("tokens")) is not None:
            bucket.level = min(bucket.per_minute, bucket.level + held - tokens)

    def headers(self) -> dict[str, str]:
        """Returns OpenAI's headers about the limits."""
        self._refill()
        headers = {}
        for name, bucket in self._buckets.items():
            headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
            headers[f"x-ratelimit-reset-{name}"] = duration(bucket.seconds_until(bucket.per_minute))
        return headers

    def _refill(self) -> None:
        now = self._clock()
        for bucket in self._buckets.values():
            bucket.refill(now)

    def _refusal(self, limit: str, wait: float) -> ApiError:
        seconds = max(1, math.ceil(wait))
        return too_many_requests(f"{limit}; try again in {seconds} s", seconds, self.headers())


def duration(seconds: float) -> str:
    """Returns a duration as OpenAI writes it, such as 6m0s or 20ms."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    rounded = math.ceil(seconds)
    return f"{rounded // 60}m{rounded % 60}s" if rounded >= 60 else f"{rounded}s"


@dataclass(frozen=True)
class Identity:
    """The owner of a request."""

    digest: bytes  # hash of its key
    access: Access  # its permissions
    usage: KeyUsage | None = None  # usage of its key; None if the key has no limits
    expires: float = float("inf")  # Unix time after which the key is not accepted


class KeyRing:
    """Accepted keys. Not thread-safe: it belongs to the event loop. Raises InvalidRequest if its file is unreadable."""

    def __init__(
        self,
        keys: Sequence[str] = (),  # keys without limits, as they are
        file: Path | None = None,  # a key file, which is read again when it changes
        allow_admin: bool = False,  # whether ``keys`` have the scope admin
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file, self._clock = file, clock
        scopes, digests = scopes_without_key(allow_admin), dict.fromkeys(map(digest, keys))
        self._fixed = [
            Identity(hashed, Access(f"api-key-{number}", scopes)) for number, hashed in enumerate(digests, 1)
        ]
        self._filed: list[Identity] = []
        self._seen: tuple[int, ...] | None = None  # of the file, when it was last read
        self._next_look = 0.0
        if file is not None:
            self._read(file)

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

    def identify(self, key: str) -> Identity | None:
        """Returns the owner of a key, None for an unknown key. Raises a 401 ApiError for an expired one.

        It is compared with every key in constant time, so that the response time reveals nothing about the keys.
        """
        self._look()
        hashed, match = hashlib.sha256(key.strip().encode("latin-1")).digest(), None
        for identity in (*self._fixed, *self._filed):
            if hmac.compare_digest(hashed, identity.digest):
                match = identity
        if not key or match is None:
            return None
        if time.time() >= match.expires:
            raise invalid_key("this API key has expired")
        return match

    def reload(self) -> None:
        """Reads the file again. A bad file leaves the keys as they are, and the log says why."""
        if self._file is None:
            return
        try:
            self._read(self._file)
        except InvalidRequest as error:
            _log.error("the API keys stay as they were: %s", error)
        else:
            _log.info("read %d API keys from %s", len(self._filed), self._file)

    def _look(self) -> None:
        now = self._clock()
        if self._file is not None and now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            if _fingerprint(self._file) != self._seen:
                self.reload()

    def _read(self, file: Path) -> None:
        """Takes over the keys of a file, and keeps what each has used. Raises InvalidRequest."""
        self._seen = _fingerprint(file)
        records = read_keys(file)
        before, self._filed = {identity.digest: identity.usage for identity in self._filed}, []
        for record in records:
            hashed = bytes.fromhex(record.sha256)
            usage = before.get(hashed) or KeyUsage(record, self._clock)
            usage.update(record)
            access = Access(record.name, frozenset(record.scopes), record.models)
            self._filed.append(Identity(hashed, access, usage, record.expiry()))
        _warn_if_readable(file)


def _fingerprint(file: Path) -> tuple[int, ...] | None:
    """Returns attributes that change with the file; None if it cannot be read."""
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

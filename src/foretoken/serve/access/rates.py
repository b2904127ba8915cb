"""Rates of one API key: requests and tokens per minute, and requests at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from foretoken.serve.access.records import KeyRecord
from foretoken.serve.errors import ApiError

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")
)

_MINUTE = 60.0
_BYTES_PER_TOKEN = 4  # of a body, by which its tokens are estimated until they are known


@dataclass(slots=True)
class RateBucket:
    """A token bucket that holds one minute's amount, and gains it evenly over a minute. ``level`` may be negative."""

    per_minute: int
    level: float
    at: float

    def refill(self, now: float) -> None:
        """Adds what was gained until ``now``."""
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / _MINUTE)
        self.at = now

    def seconds_until(self, amount: float) -> float:
        """Returns the seconds until the bucket holds ``amount``."""
        return max(0.0, (amount - self.level) * _MINUTE / self.per_minute)


class KeyUsage:
    """What one key has used.

    A request takes one from the bucket of requests. It is admitted while the bucket of tokens is not empty, and holds
    an estimate by its size until its tokens are known; a long output may leave the bucket in debt, which later
    requests wait for.

    Args:
        record: The key's limits.
        clock: Returns monotonic seconds.
    """

    def __init__(self, record: KeyRecord, clock: Callable[[], float] = time.monotonic) -> None:
        self.record, self.running = record, 0
        self._clock = clock
        now = clock()
        self.requests = _bucket(record.requests_per_minute, now)
        self.tokens = _bucket(record.tokens_per_minute, now)

    def update(self, record: KeyRecord) -> None:
        """Takes over changed limits. What was used stays used."""
        now = self._clock()
        for old, per_minute in ((self.requests, record.requests_per_minute), (self.tokens, record.tokens_per_minute)):
            if old is not None and per_minute is not None:
                old.refill(now)
                old.level += per_minute - old.per_minute
                old.per_minute = per_minute
        self.requests = _kept(self.requests, record.requests_per_minute, now)
        self.tokens = _kept(self.tokens, record.tokens_per_minute, now)
        self.record = record

    def begin(self, size: int) -> float:
        """Admits a request of ``size`` bytes. Returns the tokens that it holds. Raises a 429 ApiError."""
        limit = self.record.max_concurrency
        if limit is not None and self.running >= limit:
            raise self._refusal(f"this key may have {limit} requests answered at once", 1.0)
        self._refill()
        if self.requests is not None and (wait := self.requests.seconds_until(1.0)):
            raise self._refusal(f"this key may send {self.requests.per_minute} requests per minute", wait)
        if self.tokens is not None and (wait := self.tokens.seconds_until(1.0)):
            raise self._refusal(f"this key may use {self.tokens.per_minute} tokens per minute", wait)
        held = 0.0
        if self.requests is not None:
            self.requests.level -= 1.0
        if self.tokens is not None:
            held = min(size / _BYTES_PER_TOKEN, self.tokens.per_minute)
            self.tokens.level -= held
        self.running += 1
        return held

    def end(self, held: float, tokens: int) -> None:
        """Ends a request that held ``held`` and used ``tokens``."""
        self.running -= 1
        if self.tokens is not None:
            self._refill()
            self.tokens.level = min(self.tokens.per_minute, self.tokens.level + held - tokens)

    def headers(self) -> dict[str, str]:
        """Returns OpenAI's headers about the limits."""
        self._refill()
        headers = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                headers[f"x-ratelimit-reset-{name}"] = duration(bucket.seconds_until(bucket.per_minute))
        return headers

    def _refill(self) -> None:
        now = self._clock()
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.refill(now)

    def _refusal(self, what: str, wait: float) -> ApiError:
        seconds = max(1, math.ceil(wait))
        headers = {"Retry-After": str(seconds), **self.headers()}
        message = f"{what}; try again in {seconds} s"
        return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", headers=headers)


def duration(seconds: float) -> str:
    """Returns a duration as OpenAI writes it, such as 6m0s or 20ms."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole // 60}m{whole % 60}s" if whole >= 60 else f"{whole}s"


def _bucket(per_minute: int | None, now: float) -> RateBucket | None:
    return None if per_minute is None else RateBucket(per_minute, float(per_minute), now)


def _kept(bucket: RateBucket | None, per_minute: int | None, now: float) -> RateBucket | None:
    return bucket if bucket is not None and per_minute is not None else _bucket(per_minute, now)

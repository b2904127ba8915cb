"""What stands before every request: keys, the size of bodies, how many at once; and a line for the log."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.serve.errors import RETRY_SECONDS, ApiError

_log = logging.getLogger(__name__)

_CLIENT = "client"  # in the state of an ASGI scope: the digest of the API key, where keys are scopes of their own
_DISCARDED = 8  # times the limit are read and forgotten, so that a client that sends first gets to read the answer


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an app serves.

    model_names: what clients may call the model; the first is what answers say.
    api_keys: any of them opens everything; without keys everything is open.
    share_cache_across_keys: requests of different keys share the prefix cache and what proposers keep of earlier
    requests. Otherwise each key is a scope of its own where there are several.
    chat_template: a template in place of the tokenizer's own.
    origins: pages of other origins that browsers may let use the API.
    max_body: bytes. max_n: completions of a prompt, candidates of best_of too. max_prompts: in one request.
    max_concurrency: requests answered at once. timeout: seconds that a request may take, its wait included.
    """

    model_names: Sequence[str] = ("foretoken",)
    api_keys: Sequence[str] = ()
    share_cache_across_keys: bool = False
    chat_template: str | None = None
    origins: Sequence[str] = ()
    max_body: int = 4 * 2**20
    max_n: int = 64
    max_prompts: int = 128
    max_logprobs: int = 20
    max_concurrency: int = 512
    timeout: float = 600.0


class Guard:
    """ASGI middleware. ``open_paths`` need no key and are not counted."""

    def __init__(self, app: ASGIApp, settings: Settings, open_paths: frozenset[str]) -> None:
        self._app, self._settings, self._open_paths = app, settings, open_paths
        self._keys = [_digest(key.encode()) for key in settings.api_keys]
        self._scoped = len(set(self._keys)) > 1 and not settings.share_cache_across_keys
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        watched, is_open = _Watched(scope, send), scope["path"] in self._open_paths
        try:
            if is_open:
                await self._app(scope, receive, watched.send)
            else:
                await self._guarded(scope, receive, watched.send)
        finally:
            watched.log(logging.DEBUG if is_open else logging.INFO)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(receive, self._settings.max_body)
        key = self._key(Headers(scope=scope))
        refusal = self._refusal(scope, key)
        if refusal is None and body.hopeless(Headers(scope=scope).get("content-length")):
            refusal = ApiError(413, body.message, code="body_too_large")
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        if self._scoped and key is not None:
            scope.setdefault("state", {})[_CLIENT] = key.hex()
        self._active += 1
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._active -= 1

    def _refusal(self, scope: Scope, key: bytes | None) -> ApiError | None:
        if self._keys and scope["method"] != "OPTIONS" and key is None:
            return ApiError(
                401,
                "this server asks for an API key; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        most = self._settings.max_concurrency
        if self._active >= most:
            retry = {"Retry-After": str(RETRY_SECONDS)}
            message = f"{most} requests are being answered, which is as many as may; try again later"
            return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", headers=retry)
        return None

    def _key(self, headers: Headers) -> bytes | None:
        """The digest of the key that was sent, if it is one of ours.

        Compared with every key in full, so that the time it takes tells nothing.
        """
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip().encode("latin-1"))
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return digest if scheme.lower() == "bearer" and any(matches) else None


def effective_salt(scope: Scope, cache_salt: str | None) -> str | None:
    """Returns the salt of a request that asks for ``cache_salt``: where API keys are scopes, one within its key's."""
    client = scope.get("state", {}).get(_CLIENT)
    return cache_salt if client is None else _digest(json.dumps([client, cache_salt]).encode()).hex()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class _Body:
    """Counts a request's body as it comes."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive, self._limit = receive, limit
        self._size = 0
        self.message = f"the body is larger than the {limit} bytes that this server takes"

    def hopeless(self, announced: str | None) -> bool:
        """Whether the body says of itself that it is far too large to be read at all."""
        return announced is not None and announced.isdigit() and int(announced) > _DISCARDED * self._limit

    async def receive(self) -> Message:
        """The next part. Raises a 413 once it is one too many, when the client has sent most of it."""
        message = await self._receive()
        self._size += len(message.get("body", b""))
        if self._size <= self._limit:
            return message
        while message.get("more_body", False) and self._size <= _DISCARDED * self._limit:
            message = await self._receive()
            self._size += len(message.get("body", b""))
        raise HTTPException(413, self.message)


class _Watched:
    """Notes how a request was answered."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._status: int | None = None
        self._began = time.monotonic()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        await self._send(message)

    def log(self, level: int) -> None:
        seconds = time.monotonic() - self._began
        status = "gone" if self._status is None else self._status
        _log.log(level, "%s %s %s %.2f s", self._scope["method"], self._scope["path"], status, seconds)

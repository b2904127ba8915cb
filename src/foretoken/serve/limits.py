"""What stands before every request: hosts, keys, sizes, how many at once; and a line for the log."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.serve.bodies import Bodies, replayed
from foretoken.serve.errors import RETRY_SECONDS, ApiError
from foretoken.serve.hosts import AllowedHosts

_log = logging.getLogger(__name__)

_CLIENT = "client"  # in the state of an ASGI scope: the digest of the API key, where keys are scopes of their own
MAX_HEADERS = 64 * 2**10  # bytes of a request's headers


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How an app serves.

    model_names: what clients may call the model; the first is what answers say.
    api_keys: any of them opens everything; without keys everything is open.
    share_cache_across_keys: requests of different keys share the prefix cache and what proposers keep of earlier
    requests. Otherwise each key is a scope of its own where there are several.
    chat_template: a template in place of the tokenizer's own.
    origins: pages of other origins that browsers may let use the API.
    hosts: whose ``Host`` header is answered; None answers any.
    max_body: bytes. max_n: completions of a prompt, candidates of best_of too. max_prompts: in one request.
    body_timeout: seconds in which a body has to arrive.
    max_concurrency: requests answered at once. timeout: seconds that a request may take, its wait included.
    """

    model_names: Sequence[str] = ("foretoken",)
    api_keys: Sequence[str] = ()
    share_cache_across_keys: bool = False
    chat_template: str | None = None
    origins: Sequence[str] = ()
    hosts: AllowedHosts | None = None
    max_body: int = 4 * 2**20
    body_timeout: float = 60.0
    max_n: int = 64
    max_prompts: int = 128
    max_logprobs: int = 20
    max_concurrency: int = 512
    timeout: float = 600.0


class LimitsMiddleware:
    """ASGI middleware. ``open_paths`` need no key and are not counted.

    A request counts as being answered once its body is complete, so that slow senders keep nobody out.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, open_paths: frozenset[str]) -> None:
        self._app, self._settings, self._open_paths = app, settings, open_paths
        self._keys = [_digest(key.encode()) for key in settings.api_keys]
        self._scoped = len(set(self._keys)) > 1 and not settings.share_cache_across_keys
        self._bodies = Bodies(settings.max_body, settings.body_timeout)
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        watched, is_open = _Watched(scope, send), scope["path"] in self._open_paths
        try:
            headers = Headers(scope=scope)
            self._check_head(headers)
            if is_open:
                await self._app(scope, receive, watched.send)
            else:
                await self._guarded(scope, headers, receive, watched.send)
        except ApiError as refusal:
            await refusal.response()(scope, receive, watched.send)
        finally:
            watched.log(logging.DEBUG if is_open else logging.INFO)

    async def _guarded(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Raises ApiError where the app is not to see the request."""
        key = self._key(headers)
        if self._keys and scope["method"] != "OPTIONS" and key is None:
            raise _wrong_key()
        self._check_free()
        self._bodies.check_announced(headers.get("content-length"))
        if self._scoped and key is not None:
            scope.setdefault("state", {})[_CLIENT] = key.hex()
        async with self._bodies.read(receive) as body:
            if body is None:
                return
            self._check_free()
            self._active += 1
            try:
                await self._app(scope, replayed(body, receive), send)
            finally:
                self._active -= 1

    def _check_head(self, headers: Headers) -> None:
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADERS:
            message = f"the request's headers are larger than the {MAX_HEADERS} bytes that this server takes"
            raise ApiError(431, message, code="headers_too_large")
        host, hosts = headers.get("host"), self._settings.hosts
        if host is not None and hosts is not None and not hosts.allows(host):
            name = host.partition(":")[0]
            message = (
                f"this server does not answer to the Host {host!r}; if it is meant to be reached by that name, start "
                f"it with --allowed-host {name}"
            )
            raise ApiError(403, message, code="host_not_allowed")

    def _check_free(self) -> None:
        most = self._settings.max_concurrency
        if self._active >= most:
            retry = {"Retry-After": str(RETRY_SECONDS)}
            message = f"{most} requests are being answered, which is as many as may; try again later"
            raise ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", headers=retry)

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


def _wrong_key() -> ApiError:
    return ApiError(
        401,
        "this server asks for an API key; send it as Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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

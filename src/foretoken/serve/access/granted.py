"""What a request may do, by the key that came with it."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

from foretoken.serve.access.records import ADMIN, GENERATE, METRICS
from foretoken.serve.errors import ApiError

STATE = "access"  # in the state of an ASGI scope

SPECULATION = "/v1/speculation"
LOAD_LORA, UNLOAD_LORA = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_LISTINGS = ("/v1/models", "/version", "/openapi.json")


@dataclass(frozen=True)
class Access:
    """What a request may do.

    Args:
        name: Name of its key; None without keys.
        scopes: See ``KeyRecord``.
        models: See ``KeyRecord``.
    """

    name: str | None = None
    scopes: frozenset[str] = frozenset({GENERATE, METRICS})
    models: tuple[str, ...] | None = None

    def check_scope(self, needed: str | None) -> None:
        """Raises a 403 ApiError if the request lacks a scope."""
        if needed is None or needed in self.scopes:
            return
        if self.name is None:
            message = (
                "this server lets nobody change it: it has no keys and is not on loopback alone; start it with "
                "--api-key-file and use a key with the scope admin, or start it with --allow-admin"
            )
            raise ApiError(403, message, code="admin_not_allowed")
        raise ApiError(403, f"this key lacks the scope {needed}", code="insufficient_scope")

    def may_use(self, model: str) -> bool:
        """Returns whether the request may use a model."""
        return self.models is None or model in self.models


def access_of(scope: Scope) -> Access:
    """Returns what a request may do that has passed the middleware."""
    access: Access = scope.get("state", {}).get(STATE, Access())
    return access


def needed_scope(method: str, path: str) -> str | None:
    """Returns the scope that a request needs; None if any key will do."""
    if path == "/metrics":
        return METRICS
    if path.rstrip("/") == SPECULATION:
        return METRICS if method == "GET" else ADMIN
    if path.rstrip("/") in (LOAD_LORA, UNLOAD_LORA):
        return ADMIN
    if method == "GET" and any(path == listing or path.startswith(f"{listing}/") for listing in _LISTINGS):
        return None
    return GENERATE

"""A private Ray cluster of one server on one machine."""

from __future__ import annotations

import os
import secrets


def keep_to_itself() -> None:
    """Sets the environment variables of Ray's processes. To be called before Ray is imported.

    Nodes are on loopback. Some of Ray's ports listen on all addresses whatever the configuration, and would run what
    they receive, so a token protects them. Usage reports are off.
    """
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # makes 127.0.0.1 the node's address, on Linux too
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_worker_niceness="0",  # replicas keep their priority
    )
    os.environ.pop("RAY_ADDRESS", None)

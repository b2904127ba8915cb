"""A Ray that belongs to one server on one machine, and that nobody else can talk to."""

from __future__ import annotations

import os
import secrets


def keep_to_itself() -> None:
    """Set what Ray's processes read; to be called before Ray is imported.

    Nodes are on loopback. Some of Ray's ports listen on all addresses whatever it is told, and would run what they are
    sent, so there is a token without which they take nothing. Reports of use are off.
    """
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # on Linux as well it makes 127.0.0.1 the node's address
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_worker_niceness="0",  # replicas are what the machine is for
    )
    os.environ.pop("RAY_ADDRESS", None)
